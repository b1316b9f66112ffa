//! What went wrong, in Sandkeep's words.

use http::StatusCode;
use sandkeep_model::{Code, Error};
use serde::Deserialize;

/// The longest message of an agent that is passed on.
const MESSAGE_CHARS: usize = 1024;

pub(crate) fn unreachable(what: impl Into<String>) -> Error {
    Error::new(Code::BoxUnreachable, what)
        .hint("try again; if it stays so, kill the sandbox and make a new one")
}

pub(crate) fn nonsense(what: &str) -> Error {
    unreachable(format!("the agent of the box answered nonsense: {what}")).retryable(false)
}

pub(crate) fn late() -> Error {
    Error::new(
        Code::DeadlineExceeded,
        "the agent of the box did not answer in time",
    )
    .hint("the box may be overloaded or frozen; try again or give it more CPU and memory")
}

pub(crate) fn from_hyper(error: &hyper::Error) -> Error {
    if error.is_parse() || error.is_parse_too_large() {
        return nonsense("no proper HTTP");
    }
    unreachable(format!("the connection to the agent broke: {error}"))
}

/// The agent's texts come from inside the box: no control characters, no novels.
pub(crate) fn clean(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_control())
        .take(MESSAGE_CHARS)
        .collect()
}

/// `{"code": …, "message": …}`; code is a Connect name for RPCs, a number for plain HTTP.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct WireError {
    #[serde(default)]
    code: serde_json::Value,
    #[serde(default)]
    message: String,
}

impl WireError {
    /// From the body of a refused request.
    pub(crate) fn into_error(self, status: StatusCode) -> Error {
        match self.code.as_str() {
            Some(name) => from_connect(name, &self.message),
            None => from_status(status, &self.message),
        }
    }

    /// From the end frame of a stream, which has no status of its own.
    pub(crate) fn into_stream_error(self) -> Error {
        from_connect(self.code.as_str().unwrap_or("unknown"), &self.message)
    }
}

fn from_connect(name: &str, message: &str) -> Error {
    let message = clean(message);
    match name {
        "invalid_argument" | "out_of_range" => Error::new(Code::InvalidArgument, message),
        // The host has authenticated already: all the agent can mean is the user name.
        "unauthenticated" => unknown_user(message),
        "not_found" => Error::not_found(message),
        "already_exists" | "failed_precondition" | "aborted" => Error::conflict(message),
        "permission_denied" => Error::new(Code::PermissionDenied, message),
        "resource_exhausted" => Error::new(Code::ResourceExhausted, message),
        "deadline_exceeded" => Error::new(Code::DeadlineExceeded, message),
        "unimplemented" => Error::new(Code::NotImplemented, message),
        "unavailable" | "canceled" => unreachable(message),
        _ => Error::internal(message).context("in the box"),
    }
}

fn from_status(status: StatusCode, message: &str) -> Error {
    let message = if message.is_empty() {
        format!("the agent refused with HTTP status {}", status.as_u16())
    } else {
        clean(message)
    };
    match status.as_u16() {
        401 => unknown_user(message),
        400 | 406 | 416 => Error::new(Code::InvalidArgument, message),
        403 => Error::new(Code::PermissionDenied, message),
        404 => Error::not_found(message),
        409 => Error::conflict(message),
        413 => Error::new(Code::TooLarge, message),
        429 => Error::new(Code::ResourceExhausted, message),
        501 => Error::new(Code::NotImplemented, message),
        502 | 503 => unreachable(message),
        504 => Error::new(Code::DeadlineExceeded, message),
        507 => Error::new(Code::DiskFull, message)
            .hint("remove files in the box, or make one with a larger disk"),
        _ => Error::internal(message).context("in the box"),
    }
}

fn unknown_user(message: String) -> Error {
    Error::invalid("user", message).hint("name a user that is in the sandbox's /etc/passwd")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(json: &str, status: u16) -> Error {
        serde_json::from_str::<WireError>(json)
            .unwrap()
            .into_error(StatusCode::from_u16(status).unwrap())
    }

    #[test]
    fn connect_codes_win_over_the_status() {
        let error = parsed(r#"{"code":"not_found","message":"no such pid"}"#, 500);
        assert_eq!(error.code, Code::NotFound);
        assert_eq!(error.message, "no such pid");
    }

    #[test]
    fn an_unknown_user_is_a_wrong_argument() {
        let error = parsed(
            r#"{"code":"unauthenticated","message":"invalid username: 'x'"}"#,
            401,
        );
        assert_eq!(error.code, Code::InvalidArgument);
        assert_eq!(error.field.as_deref(), Some("user"));
        assert!(error.message.contains("'x'"));
    }

    #[test]
    fn numbers_and_nothing_fall_back_to_the_status() {
        assert_eq!(
            parsed(r#"{"code":507,"message":"full"}"#, 507).code,
            Code::DiskFull
        );
        assert_eq!(parsed("{}", 404).code, Code::NotFound);
        assert_eq!(parsed("{}", 418).code, Code::Internal);
    }

    #[test]
    fn texts_are_cleaned_and_cut() {
        let long = "\u{1b}[31m".to_owned() + &"x".repeat(5000);
        let cleaned = clean(&long);
        assert!(!cleaned.contains('\u{1b}'));
        assert_eq!(cleaned.chars().count(), MESSAGE_CHARS);
    }
}
