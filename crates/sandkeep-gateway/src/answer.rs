//! What the gateway says itself.

use http::{
    HeaderMap, HeaderValue, Response, StatusCode,
    header::{ACCEPT, ACCESS_CONTROL_ALLOW_ORIGIN, CACHE_CONTROL, CONTENT_TYPE},
};
use sandkeep_agent_client::{empty, full};
use serde::Serialize;

use crate::{BadTarget, Body, Target};

const JSON: &str = "application/json; charset=utf-8";

/// Clients tell a dead box from a closed port by these very words.
const NOT_FOUND: &str = "The sandbox was not found";
const PORT_CLOSED: &str = "The sandbox is running but port is not open";
/// Keeps the words a client looks for: to it, a silent agent is a closed port.
const NO_ANSWER: &str = "The sandbox is running but does not answer, as if its port is not open";
const BROKEN: &str = "The sandbox is running but the answer from its port was not proper HTTP";

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Unreachable<'a> {
    sandbox_id: &'a str,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    code: u16,
}

/// Why a request could not be carried to the box.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// Dead, paused or never there.
    NoBox,
    PortClosed,
    /// The agent does not answer.
    NoAnswer,
    /// Somebody listens on the port but does not speak HTTP, or hung up.
    Broken,
}

pub(crate) fn unreachable(target: &Target, asked: &HeaderMap, failure: Failure) -> Response<Body> {
    let message = match failure {
        Failure::NoBox => NOT_FOUND,
        Failure::PortClosed => PORT_CLOSED,
        Failure::NoAnswer => NO_ANSWER,
        Failure::Broken => BROKEN,
    };
    if is_browser(asked) {
        return page(StatusCode::BAD_GATEWAY, target, message);
    }
    let body = Unreachable {
        sandbox_id: &target.sandbox,
        message,
        port: (failure != Failure::NoBox).then_some(target.port),
        code: 502,
    };
    json(StatusCode::BAD_GATEWAY, &body)
}

#[derive(Serialize)]
struct Refusal<'a> {
    code: u16,
    message: &'a str,
}

pub(crate) fn refused(status: StatusCode, message: &str) -> Response<Body> {
    let code = status.as_u16();
    json(status, &Refusal { code, message })
}

/// A private port was asked for without its token. E2B's clients know the shape.
pub(crate) fn private(target: &Target, asked: &HeaderMap, message: &str) -> Response<Body> {
    if is_browser(asked) {
        return page(StatusCode::FORBIDDEN, target, message);
    }
    let body = Unreachable {
        sandbox_id: &target.sandbox,
        message,
        port: Some(target.port),
        code: StatusCode::FORBIDDEN.as_u16(),
    };
    json(StatusCode::FORBIDDEN, &body)
}

pub(crate) fn bad_target(bad: BadTarget) -> Response<Body> {
    let text = "text/plain; charset=utf-8";
    made(StatusCode::BAD_REQUEST, text, bad.text().to_owned())
}

/// The answer to a browser's preflight; the agent itself is not bothered with it.
pub(crate) fn preflight() -> Response<Body> {
    let mut response = Response::new(empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    for (name, value) in [
        ("access-control-allow-origin", "*"),
        (
            "access-control-allow-methods",
            "GET, HEAD, POST, PUT, PATCH, DELETE",
        ),
        // `*` does not cover Authorization.
        ("access-control-allow-headers", "*, Authorization"),
        ("access-control-max-age", "7200"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

fn json(status: StatusCode, body: &impl Serialize) -> Response<Body> {
    // Structs of strings and numbers always become JSON.
    made(
        status,
        JSON,
        serde_json::to_string(body).unwrap_or_default(),
    )
}

fn made(status: StatusCode, kind: &'static str, body: String) -> Response<Body> {
    let mut response = Response::new(full(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    response
}

fn is_browser(asked: &HeaderMap) -> bool {
    asked
        .get_all(ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .any(|value| value.contains("text/html"))
}

/// Nothing in it needs escaping: an id is `[a-z0-9]`, the rest is ours.
fn page(status: StatusCode, target: &Target, message: &str) -> Response<Body> {
    let Target { sandbox, port } = target;
    let code = status.as_u16();
    let body = format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>{code}</title>\n\
         <body style=\"font-family:sans-serif;margin:4em auto;max-width:40em\">\n\
         <h1>{message}</h1>\n<p>Sandbox <code>{sandbox}</code>, port <code>{port}</code>.</p>\n\
         </body></html>\n"
    );
    made(status, "text/html; charset=utf-8", body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    async fn body(failure: Failure, accept: Option<&str>) -> (HeaderMap, String) {
        let target = Target {
            sandbox: "iabc".to_owned(),
            port: 3000,
        };
        let mut asked = HeaderMap::new();
        if let Some(accept) = accept {
            asked.insert(ACCEPT, accept.parse().unwrap());
        }
        let response = unreachable(&target, &asked, failure);
        assert_eq!(response.status(), 502);
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        (parts.headers, String::from_utf8(bytes.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn the_words_clients_look_for() {
        let (headers, text) = body(Failure::NoBox, None).await;
        assert_eq!(headers[CONTENT_TYPE], JSON);
        assert_eq!(
            text,
            r#"{"sandboxId":"iabc","message":"The sandbox was not found","code":502}"#
        );
        let (_, text) = body(Failure::PortClosed, Some("*/*")).await;
        assert_eq!(
            text,
            r#"{"sandboxId":"iabc","message":"The sandbox is running but port is not open","port":3000,"code":502}"#
        );
        let (_, text) = body(Failure::NoAnswer, None).await;
        assert!(text.contains("port is not open"));
    }

    #[tokio::test]
    async fn browsers_get_a_page() {
        let accept = Some("text/html,application/xhtml+xml,*/*;q=0.8");
        let (headers, text) = body(Failure::PortClosed, accept).await;
        assert_eq!(headers[CONTENT_TYPE], "text/html; charset=utf-8");
        assert!(text.contains("port is not open") && text.contains("3000"));
    }
}
