//! Why a file call failed, in the two dialects callers know: `/files` answers
//! `{"code":404,"message":…}`, the RPC answers Connect codes.

use crate::Body;
use crate::connect::json_response;
use crate::state::UserError;
use http::{Response, StatusCode};
use rustix::io::Errno;
use sandkeep_agent_api::{Code, ConnectError};
use serde::Serialize;
use std::io;
use std::path::Path;

/// A failed `/files` request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileError {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
}

#[derive(Serialize)]
struct Wire<'a> {
    code: u16,
    message: &'a str,
}

impl FileError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A failed system call on `path`.
    pub(crate) fn from_os(action: &str, path: &Path, error: Errno) -> Self {
        let shown = path.display();
        let status = match error {
            Errno::NOENT => {
                let message = format!("path '{shown}' does not exist");
                return Self::new(StatusCode::NOT_FOUND, message);
            }
            Errno::NOSPC | Errno::DQUOT => {
                let message = format!("not enough disk space available to write '{shown}'");
                return Self::new(StatusCode::INSUFFICIENT_STORAGE, message);
            }
            _ => match Kind::of(error) {
                Kind::BadPath => StatusCode::BAD_REQUEST,
                Kind::Refused => StatusCode::FORBIDDEN,
                Kind::Busy => StatusCode::CONFLICT,
                Kind::Other => StatusCode::INTERNAL_SERVER_ERROR,
            },
        };
        Self::new(
            status,
            format!("cannot {action} '{shown}': {}", words(error)),
        )
    }

    /// The same for errors that came through `std::io`.
    pub(crate) fn from_io(action: &str, path: &Path, error: &io::Error) -> Self {
        match Errno::from_io_error(error) {
            Some(errno) => Self::from_os(action, path, errno),
            None => Self::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("cannot {action} '{}': {error}", path.display()),
            ),
        }
    }

    /// The reply.
    pub(crate) fn response(&self) -> Response<Body> {
        json_response(
            self.status,
            &Wire {
                code: self.status.as_u16(),
                message: &self.message,
            },
        )
    }
}

impl From<UserError> for FileError {
    fn from(error: UserError) -> Self {
        let message = format!("error looking up user '{}': {}", error.name, error.reason);
        Self::new(StatusCode::UNAUTHORIZED, message)
    }
}

impl From<FileError> for ConnectError {
    fn from(error: FileError) -> Self {
        let code = match error.status {
            StatusCode::BAD_REQUEST => Code::InvalidArgument,
            StatusCode::UNAUTHORIZED => Code::Unauthenticated,
            StatusCode::FORBIDDEN => Code::PermissionDenied,
            StatusCode::NOT_FOUND => Code::NotFound,
            StatusCode::CONFLICT => Code::FailedPrecondition,
            _ => Code::Internal,
        };
        Self::new(code, error.message)
    }
}

/// A failed system call of an RPC on `path`.
pub(crate) fn rpc_error(action: &str, path: &Path, error: Errno) -> ConnectError {
    FileError::from_os(action, path, error).into()
}

enum Kind {
    BadPath,
    Refused,
    Busy,
    Other,
}

impl Kind {
    fn of(error: Errno) -> Self {
        match error {
            Errno::NOTDIR | Errno::ISDIR | Errno::NAMETOOLONG | Errno::LOOP | Errno::INVAL => {
                Self::BadPath
            }
            Errno::XDEV | Errno::EXIST | Errno::NXIO | Errno::AGAIN => Self::BadPath,
            Errno::ACCESS | Errno::PERM | Errno::ROFS => Self::Refused,
            Errno::TXTBSY | Errno::BUSY | Errno::NOTEMPTY => Self::Busy,
            _ => Self::Other,
        }
    }
}

/// The system's words for an error, without the number.
fn words(error: Errno) -> String {
    let text = io::Error::from(error).to_string();
    match text.split_once(" (os error") {
        Some((words, _)) => words.to_lowercase(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(error: Errno) -> (u16, String) {
        let error = FileError::from_os("write", Path::new("/x"), error);
        (error.status.as_u16(), error.message)
    }

    #[test]
    fn errors_have_a_status_and_words() {
        assert_eq!(of(Errno::NOENT), (404, "path '/x' does not exist".into()));
        assert_eq!(of(Errno::NOSPC).0, 507);
        assert_eq!(of(Errno::DQUOT).0, 507);
        assert_eq!(
            of(Errno::NOTDIR),
            (400, "cannot write '/x': not a directory".into())
        );
        assert_eq!(of(Errno::ROFS).0, 403);
        assert_eq!(of(Errno::IO).0, 500);
    }
}
