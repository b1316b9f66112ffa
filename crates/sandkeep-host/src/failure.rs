//! An operating system error together with what was being done.

use sandkeep_model::{Code, Error};
use std::{fmt::Display, io};

#[derive(Debug, thiserror::Error)]
#[error("{doing}: {source}")]
pub struct Failure {
    pub doing: String,
    pub source: io::Error,
}

/// Puts what was being done to an error of the kernel.
pub trait Doing<T> {
    fn doing(self, what: impl Display) -> Result<T, Failure>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing(self, what: impl Display) -> Result<T, Failure> {
        self.map_err(|error| Failure {
            doing: what.to_string(),
            source: error.into(),
        })
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let error = Self::from(failure.source).context(failure.doing);
        if error.code == Code::Internal {
            error.hint("run `sandkeep doctor`: it looks at everything this level needs")
        } else {
            error
        }
    }
}
