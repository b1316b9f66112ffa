//! All routes, and what every request passes through before it reaches one.

use std::sync::Arc;

use axum::{
    Router,
    extract::{Request, State},
    http::Uri,
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::get,
};
use http::{HeaderName, Method, header::CONTENT_TYPE};
use sandkeep_model::{Code, Error};
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};

use crate::{
    access_log, auth, e2b,
    error::{Dialect, METHOD_FIELD},
    oidc, openapi,
    state::{ApiState, Shared},
    v1,
};

/// The front desk as one router without a state of its own left open.
pub fn router(state: ApiState) -> Router {
    let state: Shared = Arc::new(state);
    let deadline = from_fn_with_state(Arc::clone(&state), in_time);
    let document = openapi::described(state.keeper.most_limits());
    let quick = v1::quick()
        .split_for_parts()
        .0
        .merge(e2b::routes())
        .merge(oidc::routes())
        .route(
            "/v1/openapi.json",
            get(|| async move { axum::Json(document) }),
        )
        .route("/metrics", get(metrics_text))
        .layer(deadline);
    quick
        .merge(v1::streaming().split_for_parts().0)
        .merge(e2b::streaming())
        .method_not_allowed_fallback(wrong_method)
        .fallback(no_route)
        .layer(from_fn_with_state(Arc::clone(&state), auth::require_key))
        .layer(cors())
        .layer(from_fn(access_log::log))
        .with_state(state)
}

/// Any origin, never with credentials: a page needs the API key in a header it sets itself.
fn cors() -> CorsLayer {
    CorsLayer::new()
        .allow_origin(AllowOrigin::any())
        .allow_methods(AllowMethods::list([
            Method::GET,
            Method::HEAD,
            Method::POST,
            Method::PUT,
            Method::PATCH,
            Method::PATCH,
            Method::DELETE,
        ]))
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([
            HeaderName::from_static("x-next-token"),
            HeaderName::from_static("x-total-running"),
        ])
}

async fn in_time(State(state): State<Shared>, request: Request, next: Next) -> Response {
    let dialect = Dialect::of(request.uri().path());
    match tokio::time::timeout(state.request_timeout, next.run(request)).await {
        Ok(response) => response,
        Err(_) => dialect.answer(
            Error::new(
                Code::DeadlineExceeded,
                format!(
                    "the request took longer than {} s and was given up",
                    state.request_timeout.as_secs()
                ),
            )
            .hint("try again; the host may be overloaded"),
        ),
    }
}

async fn metrics_text(State(state): State<Shared>) -> impl IntoResponse {
    (
        [(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")],
        (state.metrics_text)(),
    )
}

async fn no_route(uri: Uri) -> Response {
    let error = Error::not_found("there is nothing at this path")
        .hint("the native API is described at /v1/openapi.json");
    Dialect::of(uri.path()).answer(error)
}

/// The router adds the `Allow` header with what would have been right.
async fn wrong_method(method: Method, uri: Uri) -> Response {
    let name: String = method.as_str().chars().take(16).collect();
    let error = Error::invalid(METHOD_FIELD, format!("{name} is not possible at this path"))
        .hint("the Allow header of this answer names the methods that are");
    Dialect::of(uri.path()).answer(error)
}
