//! HTTP/2 on an intercepted connection, for programs that speak nothing else (gRPC): each of its
//! requests is decided on its own, like those of HTTP/1.1.

use std::time::Duration;

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Request, Response, StatusCode, Uri, Version,
    header::{CONTENT_TYPE, HOST, TE},
    uri::Scheme,
};
use http_body_util::Full;
use hyper::{rt::Executor, server::conn::http2::Builder};
use hyper_util::rt::TokioTimer;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use tokio_util::sync::CancellationToken;

use crate::proxy::{MAX_HEAD, Words};

/// As TLS names it.
pub const PROTOCOL: &[u8] = b"h2";
/// Requests at the same time on one connection.
const STREAMS: u32 = 128;
/// A peer that has gone without a word is noticed.
const ALIVE_EVERY: Duration = Duration::from_secs(60);
const GRPC: &str = "application/grpc";
/// The codes of gRPC that fit.
const PERMISSION_DENIED: &str = "7";
const UNAVAILABLE: &str = "14";
/// What gRPC has escaped in its messages.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// Runs the requests of one connection; they end with it.
#[derive(Clone, Debug)]
pub struct Tied(pub CancellationToken);

impl<F> Executor<F> for Tied
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, work: F) {
        let ended = self.0.clone();
        tokio::spawn(async move {
            ended.run_until_cancelled(work).await;
        });
    }
}

pub fn server(tied: Tied) -> Builder<Tied> {
    let mut builder = Builder::new(tied);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(head_limit())
        .keep_alive_interval(ALIVE_EVERY);
    builder
}

pub fn head_limit() -> u32 {
    u32::try_from(MAX_HEAD).unwrap_or(u32::MAX)
}

/// The form a request has in HTTP/2: the whole address, and no Host beside it.
pub fn reshape<B>(request: &mut Request<B>, authority: &str) {
    let path = request.uri().path_and_query().cloned();
    let made = Uri::builder()
        .scheme(Scheme::HTTPS)
        .authority(authority)
        .path_and_query(path.map_or_else(|| "/".to_owned(), |path| path.to_string()))
        .build();
    if let Ok(uri) = made {
        *request.uri_mut() = uri;
        request.headers_mut().remove(HOST);
    }
    *request.version_mut() = Version::HTTP_2;
    // Whoever speaks HTTP/2 reads trailers, and gRPC insists on being told.
    let trailers = HeaderValue::from_static("trailers");
    request.headers_mut().insert(TE, trailers);
}

/// Back to the form of HTTP/1.1, where a host turns out to speak only that.
pub fn unshape<B>(request: &mut Request<B>, authority: &str) {
    if request.version() != Version::HTTP_2 {
        return;
    }
    let path = request
        .uri()
        .path_and_query()
        .map_or("/", |path| path.as_str());
    if let (Ok(uri), Ok(host)) = (path.parse(), HeaderValue::try_from(authority)) {
        *request.uri_mut() = uri;
        request.headers_mut().insert(HOST, host);
    }
    request.headers_mut().remove(TE);
    *request.version_mut() = Version::HTTP_11;
}

pub fn is_grpc(headers: &HeaderMap) -> bool {
    headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|value| value.starts_with(GRPC))
}

/// A refusal in the words of gRPC, whose libraries show no body of a 403 to anybody.
pub fn in_grpc(refusal: Response<Full<Bytes>>) -> Response<Full<Bytes>> {
    let Some(words) = refusal.extensions().get::<Words>() else {
        return refusal;
    };
    let code = match refusal.status() {
        StatusCode::FORBIDDEN => PERMISSION_DENIED,
        _ => UNAVAILABLE,
    };
    let text = utf8_percent_encode(&words.0, ESCAPED).to_string();
    let mut response = Response::new(Full::default());
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(GRPC));
    headers.insert("grpc-status", HeaderValue::from_static(code));
    if let Ok(text) = HeaderValue::try_from(text) {
        headers.insert("grpc-message", text);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_take_the_form_of_http_2() {
        let mut request = Request::post("/pkg.Service/Call?x=1").body(()).unwrap();
        request
            .headers_mut()
            .insert(HOST, HeaderValue::from_static("good.test"));
        reshape(&mut request, "good.test:8443");
        assert_eq!(request.uri(), "https://good.test:8443/pkg.Service/Call?x=1");
        assert_eq!(request.version(), Version::HTTP_2);
        assert!(!request.headers().contains_key(HOST));
        assert_eq!(request.headers()[TE], "trailers");
        unshape(&mut request, "good.test:8443");
        assert_eq!(request.uri(), "/pkg.Service/Call?x=1");
        assert_eq!(request.headers()[HOST], "good.test:8443");
        assert!(!request.headers().contains_key(TE));
    }

    #[test]
    fn refusals_are_put_into_words_of_grpc() {
        let denied = crate::proxy::refusal::denied(
            "a.test",
            &crate::policy::Refusal::of_form("100% no\n", "ask"),
        );
        let told = in_grpc(denied);
        assert_eq!(told.status(), StatusCode::OK);
        assert_eq!(told.headers()["grpc-status"], PERMISSION_DENIED);
        assert_eq!(told.headers()["grpc-message"], "a.test: 100%25 no%0A; ask");
    }
}
