//! What was being done when the operating system said no.

use sandkeep_model::{Error, Result};
use std::{fmt::Display, io, path::Path};

pub trait Doing<T> {
    /// Names the work in the error; the meaning (a full disk) is kept.
    fn doing(self, what: impl Display) -> Result<T>;

    /// The same with the path it was done to.
    fn doing_to(self, what: impl Display, path: &Path) -> Result<T>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing(self, what: impl Display) -> Result<T> {
        self.map_err(|error| Error::from(error.into()).context(what))
    }

    fn doing_to(self, what: impl Display, path: &Path) -> Result<T> {
        self.map_err(|error| {
            Error::from(error.into()).context(format_args!("{what} {}", path.display()))
        })
    }
}
