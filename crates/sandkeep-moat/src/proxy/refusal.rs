//! Refusals an agent can act on.

use bytes::Bytes;
use http::{
    HeaderValue, Response, StatusCode,
    header::{CONNECTION, CONTENT_TYPE},
};
use http_body_util::Full;
use serde_json::json;

use crate::policy::Refusal;

/// What a refusal says, for those who tell it in another form.
#[derive(Debug, Clone)]
pub struct Words(pub String);

/// The 403 of the moat. The connection ends after it.
pub fn denied(host: &str, refusal: &Refusal) -> Response<Full<Bytes>> {
    let body = json!({
        "error": "egress_denied",
        "host": host,
        "rule": null,
        "reason": refusal.reason,
        "why": refusal.why,
        "hint": refusal.hint,
    });
    answer(StatusCode::FORBIDDEN, &body)
}

/// The host is allowed but does not answer.
pub fn unreachable(host: &str, why: &str) -> Response<Full<Bytes>> {
    let body = json!({
        "error": "upstream_unreachable",
        "host": host,
        "why": why,
        "hint": "the policy lets this host through; try again later",
    });
    answer(StatusCode::BAD_GATEWAY, &body)
}

/// Something else stands between the box and an answer; `error` is for programs.
pub fn broken(error: &str, host: &str, why: &str, hint: &str) -> Response<Full<Bytes>> {
    let body = json!({ "error": error, "host": host, "why": why, "hint": hint });
    answer(StatusCode::BAD_GATEWAY, &body)
}

fn answer(status: StatusCode, body: &serde_json::Value) -> Response<Full<Bytes>> {
    let mut text = body.to_string();
    text.push('\n');
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    let said = |field: &str| body[field].as_str().unwrap_or_default();
    let words = format!("{}: {}; {}", said("host"), said("why"), said("hint"));
    response.extensions_mut().insert(Words(words));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    response
}
