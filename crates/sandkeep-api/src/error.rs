//! One error, two ways to say it: the native body and E2B's.

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header};
use sandkeep_model::{Code, Error};
use serde::Serialize;
use utoipa::ToSchema;

/// Which of the two APIs a path belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    Native,
    E2b,
}

impl Dialect {
    pub(crate) fn of(path: &str) -> Self {
        if path == "/v1" || path.starts_with("/v1/") || path == "/metrics" {
            Self::Native
        } else {
            Self::E2b
        }
    }

    pub(crate) fn answer(self, error: Error) -> Response {
        match self {
            Self::Native => NativeError(error).into_response(),
            Self::E2b => E2bError(error).into_response(),
        }
    }
}

/// Fields of HTTP itself whose refusal has a status of its own, which no code of the model
/// stands for.
pub(crate) const CONTENT_TYPE_FIELD: &str = "content-type";
pub(crate) const METHOD_FIELD: &str = "method";

pub(crate) fn status(error: &Error) -> StatusCode {
    match (error.code, error.field.as_deref()) {
        (Code::InvalidArgument, Some(CONTENT_TYPE_FIELD)) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        (Code::InvalidArgument, Some(METHOD_FIELD)) => StatusCode::METHOD_NOT_ALLOWED,
        (code, _) => {
            StatusCode::from_u16(code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
        }
    }
}

/// Faults of ours are told to the operator too: the client can do nothing about them.
fn note(error: &Error) {
    if matches!(error.code, Code::Internal | Code::HostNotReady) {
        tracing::error!(code = error.code.name(), message = %error.message, "request failed");
    }
}

/// `{"error": {...}}`, the body of every refusal under `/v1`.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorBody {
    pub error: ErrorDetail,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorDetail {
    /// What kind of refusal this is; stable.
    #[schema(example = "not_found")]
    pub code: &'static str,
    /// What was refused and why.
    pub message: String,
    /// What to do about it.
    #[schema(required)]
    pub hint: Option<String>,
    /// The field of the request that is meant.
    #[schema(required, example = "limits.memory_mib")]
    pub field: Option<String>,
    /// Whether the same request may succeed later.
    pub retryable: bool,
}

impl From<Error> for ErrorBody {
    fn from(error: Error) -> Self {
        Self {
            error: ErrorDetail {
                code: error.code.name(),
                message: error.message,
                hint: error.hint,
                field: error.field,
                retryable: error.retryable,
            },
        }
    }
}

/// Answers in the native way.
#[derive(Debug)]
pub(crate) struct NativeError(pub Error);

impl<E: Into<Error>> From<E> for NativeError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for NativeError {
    fn into_response(self) -> Response {
        note(&self.0);
        let status = status(&self.0);
        (status, Json(ErrorBody::from(self.0))).into_response()
    }
}

/// Answers as the E2B SDKs expect: `code` is the status again, because the JavaScript SDK
/// decides by it.
#[derive(Debug)]
pub(crate) struct E2bError(pub Error);

impl<E: Into<Error>> From<E> for E2bError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

#[derive(Debug, Serialize)]
struct E2bBody {
    code: u16,
    message: String,
}

impl IntoResponse for E2bError {
    fn into_response(self) -> Response {
        note(&self.0);
        let Self(error) = self;
        let status = status(&error);
        let body = E2bBody {
            code: status.as_u16(),
            // E2B has no place for a hint; the message carries it.
            message: error.to_string(),
        };
        let mut response = (status, Json(body)).into_response();
        // The Python SDK retries these three times unless told; tell it what we know.
        if matches!(status.as_u16(), 429 | 502 | 503 | 504) {
            let headers = response.headers_mut();
            let value = if error.retryable { "true" } else { "false" };
            headers.insert("should-retry", HeaderValue::from_static(value));
            if error.retryable {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    async fn said(response: Response) -> (u16, serde_json::Value) {
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&bytes).unwrap())
    }

    #[tokio::test]
    async fn every_code_has_its_status_in_both_dialects() {
        for code in Code::ALL {
            let error = || Error::new(code, "no").hint("do this");
            let (status, body) = said(Dialect::Native.answer(error())).await;
            assert_eq!(status, code.status());
            assert_eq!(body["error"]["code"], code.name());
            assert_eq!(body["error"]["hint"], "do this");
            assert_eq!(body["error"]["retryable"], code.retryable());

            let (status, body) = said(Dialect::E2b.answer(error())).await;
            assert_eq!(status, code.status());
            assert_eq!(body["code"], code.status());
            assert_eq!(body["message"], "no (do this)");
        }
    }

    #[test]
    fn the_dialect_is_told_by_the_path() {
        assert_eq!(Dialect::of("/v1/sandboxes"), Dialect::Native);
        assert_eq!(Dialect::of("/metrics"), Dialect::Native);
        assert_eq!(Dialect::of("/v10"), Dialect::E2b);
        assert_eq!(Dialect::of("/v2/sandboxes"), Dialect::E2b);
        assert_eq!(Dialect::of("/sandboxes"), Dialect::E2b);
    }

    #[test]
    fn a_refusal_that_will_not_change_is_not_retried() {
        let lasting = Error::new(Code::ResourceExhausted, "full").retryable(false);
        let response = Dialect::E2b.answer(lasting);
        assert_eq!(response.headers()["should-retry"], "false");
        assert!(!response.headers().contains_key(header::RETRY_AFTER));
    }
}
