//! Why a check gives no verdict.

use std::{fmt, io};

/// What keeps a check from an answer. None of these ever counts as "held".
#[derive(Debug, Clone)]
pub enum Fault {
    /// The user asked us to stop.
    Stopped,
    /// The server refused a request.
    Refused { status: u16, message: String },
    /// Something on this host or in the sandbox did not work.
    Cannot(String),
}

pub type Result<T, E = Fault> = std::result::Result<T, E>;

impl Fault {
    pub fn cannot(why: impl fmt::Display) -> Self {
        Self::Cannot(why.to_string())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stopped => f.write_str("stopped"),
            Self::Refused {
                status, message, ..
            } => write!(f, "the server refused ({status}): {message}"),
            Self::Cannot(why) => f.write_str(why),
        }
    }
}

/// Adds what was being done to an error of the operating system.
pub trait Doing<T> {
    fn doing(self, what: impl fmt::Display) -> Result<T>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Fault::Cannot(format!("{what}: {error}")))
    }
}

impl<T> Doing<T> for rustix::io::Result<T> {
    fn doing(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Fault::Cannot(format!("{what}: {}", io::Error::from(error))))
    }
}
