//! The one error the rooms of the server hand to each other.
//!
//! It is written for whoever must act on it, often an agent: what was refused, why,
//! what to do, and whether trying again makes sense.

use crate::words::printable;
use serde::{Deserialize, Serialize};
use std::fmt;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of refusal this is. The wire name never changes once published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// A field is missing, malformed or out of bounds.
    InvalidArgument,
    /// No key, or a wrong one.
    Unauthenticated,
    /// The key is right but this is not allowed.
    PermissionDenied,
    NotFound,
    /// The thing is in a state in which this can not be done.
    Conflict,
    /// The request, or what it asks for, is larger than a limit.
    TooLarge,
    /// A count or rate limit was reached.
    ResourceExhausted,
    /// The disk, the pool or a quota is full.
    DiskFull,
    /// The chosen isolation level can not enforce what was asked.
    NotEnforceable,
    /// Known, but not built yet.
    NotImplemented,
    /// A tool, a privilege or a kernel feature is missing on this host.
    HostNotReady,
    /// The box is there but does not answer.
    BoxUnreachable,
    /// It took longer than it may.
    DeadlineExceeded,
    /// A fault of ours.
    Internal,
}

impl Code {
    pub const ALL: [Self; 14] = [
        Self::InvalidArgument,
        Self::Unauthenticated,
        Self::PermissionDenied,
        Self::NotFound,
        Self::Conflict,
        Self::TooLarge,
        Self::ResourceExhausted,
        Self::DiskFull,
        Self::NotEnforceable,
        Self::NotImplemented,
        Self::HostNotReady,
        Self::BoxUnreachable,
        Self::DeadlineExceeded,
        Self::Internal,
    ];

    /// The HTTP status that says the same.
    pub const fn status(self) -> u16 {
        match self {
            Self::InvalidArgument | Self::NotEnforceable => 400,
            Self::Unauthenticated => 401,
            Self::PermissionDenied => 403,
            Self::NotFound => 404,
            Self::Conflict => 409,
            Self::TooLarge => 413,
            Self::ResourceExhausted => 429,
            Self::DiskFull => 507,
            Self::NotImplemented => 501,
            Self::HostNotReady => 503,
            Self::BoxUnreachable => 502,
            Self::DeadlineExceeded => 504,
            Self::Internal => 500,
        }
    }

    /// Whether the same request may succeed later without anybody changing it.
    pub const fn retryable(self) -> bool {
        matches!(
            self,
            Self::ResourceExhausted
                | Self::HostNotReady
                | Self::BoxUnreachable
                | Self::DeadlineExceeded
        )
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid_argument",
            Self::Unauthenticated => "unauthenticated",
            Self::PermissionDenied => "permission_denied",
            Self::NotFound => "not_found",
            Self::Conflict => "conflict",
            Self::TooLarge => "too_large",
            Self::ResourceExhausted => "resource_exhausted",
            Self::DiskFull => "disk_full",
            Self::NotEnforceable => "not_enforceable",
            Self::NotImplemented => "not_implemented",
            Self::HostNotReady => "host_not_ready",
            Self::BoxUnreachable => "box_unreachable",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Internal => "internal",
        }
    }
}

/// A typed refusal: what, why, and what to do about it. What others chose of its words cannot do
/// anything to whoever reads them: see [`printable`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Error {
    pub code: Code,
    pub message: String,
    /// What the reader can do. Absent only when there is nothing to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// The field of the request that is meant, e.g. `limits.memory_mib`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    pub retryable: bool,
}

impl Error {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: printable(message),
            hint: None,
            field: None,
            retryable: code.retryable(),
        }
    }

    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = Self::new(Code::InvalidArgument, message);
        error.field = Some(field.into());
        error
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Code::NotFound, message)
    }

    pub fn sandbox_not_found(id: &impl fmt::Display) -> Self {
        Self::not_found(format!("sandbox \"{id}\" was not found"))
            .hint("list the sandboxes that exist with `sandkeep ls` or GET /v1/sandboxes")
    }

    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(Code::Conflict, message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Code::Internal, message)
    }

    pub fn host_not_ready(message: impl Into<String>) -> Self {
        Self::new(Code::HostNotReady, message)
    }

    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(printable(hint));
        self
    }

    #[must_use]
    pub fn field(mut self, field: impl Into<String>) -> Self {
        self.field = Some(field.into());
        self
    }

    #[must_use]
    pub const fn retryable(mut self, retryable: bool) -> Self {
        self.retryable = retryable;
        self
    }

    /// Puts what was being done before the message: `making the disk: no space`.
    #[must_use]
    pub fn context(mut self, doing: impl fmt::Display) -> Self {
        self.message = printable(format!("{doing}: {}", self.message));
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, " ({hint})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

/// An operating system error keeps its meaning: a full disk is a full disk.
impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        use std::io::ErrorKind;
        let code = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Code::DiskFull,
            ErrorKind::TimedOut => Code::DeadlineExceeded,
            _ => Code::Internal,
        };
        let made = Self::new(code, error.to_string());
        if code == Code::DiskFull {
            made.hint("free space on the disk that holds the state directory, or enlarge the pool")
        } else {
            made
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_on_the_wire_match_serde() {
        for code in Code::ALL {
            let wire = serde_json::to_string(&code).unwrap();
            assert_eq!(wire, format!("\"{}\"", code.name()));
            assert!((400..600).contains(&code.status()));
        }
    }

    #[test]
    fn a_full_disk_stays_a_full_disk() {
        let error =
            Error::from(std::io::Error::from_raw_os_error(28)).context("writing the ledger");
        assert_eq!(error.code, Code::DiskFull);
        assert!(error.message.starts_with("writing the ledger: "));
        assert!(error.hint.is_some());
    }
}
