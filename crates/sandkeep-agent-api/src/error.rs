//! Errors as the Connect protocol spells them.

use serde::{Deserialize, Serialize};

macro_rules! codes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $status:literal;)+) => {
        /// A Connect error code.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        pub enum Code {
            $($(#[$doc])* #[serde(rename = $name)] $variant,)+
        }

        impl Code {
            /// Every code, for tables and tests.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// The name on the wire.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// The HTTP status of a unary call that failed with this code.
            #[must_use]
            pub const fn http_status(self) -> u16 {
                match self { $(Self::$variant => $status,)+ }
            }
        }
    };
}

codes! {
    Canceled = "canceled", 499;
    Unknown = "unknown", 500;
    InvalidArgument = "invalid_argument", 400;
    DeadlineExceeded = "deadline_exceeded", 504;
    NotFound = "not_found", 404;
    AlreadyExists = "already_exists", 409;
    PermissionDenied = "permission_denied", 403;
    ResourceExhausted = "resource_exhausted", 429;
    FailedPrecondition = "failed_precondition", 400;
    Aborted = "aborted", 409;
    OutOfRange = "out_of_range", 400;
    Unimplemented = "unimplemented", 501;
    Internal = "internal", 500;
    Unavailable = "unavailable", 503;
    DataLoss = "data_loss", 500;
    Unauthenticated = "unauthenticated", 401;
}

/// A failed call: the body of a unary error, or the `error` of an end-of-stream frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{}: {message}", code.name())]
pub struct ConnectError {
    pub code: Code,
    #[serde(default)]
    pub message: String,
}

macro_rules! constructors {
    ($($name:ident => $code:ident;)+) => {
        impl ConnectError {
            $(
                #[doc = concat!("An error with code `", stringify!($name), "`.")]
                pub fn $name(message: impl Into<String>) -> Self {
                    Self::new(Code::$code, message)
                }
            )+
        }
    };
}

constructors! {
    unknown => Unknown;
    invalid_argument => InvalidArgument;
    deadline_exceeded => DeadlineExceeded;
    not_found => NotFound;
    already_exists => AlreadyExists;
    permission_denied => PermissionDenied;
    resource_exhausted => ResourceExhausted;
    failed_precondition => FailedPrecondition;
    unimplemented => Unimplemented;
    internal => Internal;
    unavailable => Unavailable;
    unauthenticated => Unauthenticated;
}

impl ConnectError {
    /// An error with any code.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }
}

/// The JSON of the last frame of a stream: empty, or the error that ended it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndStream {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ConnectError>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serde_and_the_table_agree_on_names() {
        for &code in Code::ALL {
            let json = serde_json::to_string(&code).unwrap();
            assert_eq!(json, format!("\"{}\"", code.name()));
        }
    }

    #[test]
    fn an_error_reads_back() {
        let error = ConnectError::not_found("process with pid 9 not found");
        let json = serde_json::to_string(&error).unwrap();
        assert_eq!(
            json,
            r#"{"code":"not_found","message":"process with pid 9 not found"}"#
        );
        assert_eq!(serde_json::from_str::<ConnectError>(&json).unwrap(), error);
        assert_eq!(error.code.http_status(), 404);
    }

    #[test]
    fn a_clean_end_is_an_empty_object() {
        assert_eq!(serde_json::to_string(&EndStream::default()).unwrap(), "{}");
    }
}
