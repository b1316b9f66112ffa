//! One line per request, without anything secret in it.

use std::time::Instant;

use axum::{
    extract::{MatchedPath, Request},
    middleware::Next,
    response::Response,
};
use http::Method;
use tracing::Instrument;

/// Logs and counts a request by its route, never by its query or headers: those carry
/// keys, tokens and signatures.
pub(crate) async fn log(request: Request, next: Next) -> Response {
    let start = Instant::now();
    let method = method_name(request.method());
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map_or("(none)".to_owned(), |path| path.as_str().to_owned());
    let span = tracing::info_span!("request", method, route);
    let response = next.run(request).instrument(span.clone()).await;
    let elapsed = start.elapsed();
    let status = response.status().as_u16();
    span.in_scope(|| {
        let ms = (elapsed.as_secs_f64() * 100_000.0).round() / 100.0;
        tracing::info!(status, ms, "answered");
    });
    let labels = [
        ("method", method.to_owned()),
        ("route", route),
        ("status", status.to_string()),
    ];
    metrics::counter!("sandkeep_http_requests_total", &labels).increment(1);
    metrics::histogram!("sandkeep_http_request_seconds", &labels[..2])
        .record(elapsed.as_secs_f64());
    response
}

/// Methods are free text; a client must not be able to make up metrics.
fn method_name(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "PATCH" => "PATCH",
        "DELETE" => "DELETE",
        "OPTIONS" => "OPTIONS",
        _ => "other",
    }
}
