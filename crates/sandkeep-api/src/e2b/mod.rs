//! The control plane the E2B SDKs speak, both generations.

mod absent;
mod build_status;
mod builds;
mod dockerfile;
mod iam;
mod lines;
mod list;
mod network;
mod observe;
mod sandboxes;
mod secrets;
mod tags;
mod templates;
mod time;
mod transform;
mod types;

use axum::{
    Router,
    routing::{any, get, patch, post, put},
};

use crate::state::Shared;

pub use builds::Waiting;

pub(crate) fn routes() -> Router<Shared> {
    Router::new()
        .route("/health", get(sandboxes::health))
        .route("/sandboxes", post(sandboxes::create_v1).get(list::v1))
        .route("/v2/sandboxes", post(sandboxes::create_v2).get(list::v2))
        .route("/sandboxes/metrics", get(observe::metrics_of_many))
        .route(
            "/sandboxes/{id}",
            get(sandboxes::get).delete(sandboxes::kill),
        )
        .route("/sandboxes/{id}/timeout", post(sandboxes::set_timeout))
        .route("/sandboxes/{id}/refreshes", post(sandboxes::refresh))
        .route("/sandboxes/{id}/connect", post(sandboxes::connect_v1))
        .route("/v2/sandboxes/{id}/connect", post(sandboxes::connect_v2))
        .route("/sandboxes/{id}/network", put(network::put))
        .route("/sandboxes/{id}/metrics", get(observe::metrics))
        .route("/sandboxes/{id}/logs", get(observe::logs_v1))
        .route("/v2/sandboxes/{id}/logs", get(observe::logs_v2))
        .route("/templates", get(templates::list).post(builds::request_v1))
        .route(
            "/v2/templates",
            get(templates::list_v2).post(builds::request_v2),
        )
        .route("/v3/templates", post(builds::request))
        .route(
            "/templates/{id}",
            get(templates::get)
                .post(builds::rebuild_v1)
                .patch(templates::change)
                .delete(templates::delete),
        )
        .route("/templates/{id}/files/{hash}", get(builds::files))
        .route("/v2/templates/{id}/builds/{build}", post(builds::start))
        .route("/templates/{id}/builds/{build}", post(builds::start_v1))
        .route(
            "/templates/{id}/builds/{build}/status",
            get(build_status::status),
        )
        .route(
            "/templates/{id}/builds/{build}/logs",
            get(build_status::logs),
        )
        .route("/v2/templates/{id}", patch(templates::change))
        .route("/default-templates", get(templates::defaults))
        .route("/templates/tags", post(tags::assign).delete(tags::remove))
        .route("/templates/{id}/tags", get(tags::list))
        .route("/templates/{id}/tags/count", get(tags::count))
        .route("/templates/{id}/tags/exists", get(tags::exists))
        .route("/templates/{id}/tags/groups", get(tags::groups))
        .route(
            "/templates/{id}/tags/{tag}/assignments",
            get(tags::assignments),
        )
        .route("/templates/aliases/{name}", get(templates::alias))
        .route("/secrets", get(secrets::list).post(secrets::create))
        .route(
            "/secrets/{id}",
            get(secrets::get)
                .post(secrets::change)
                .delete(secrets::delete),
        )
        .route("/sandboxes/{id}/pause", post(time::pause))
        .route("/sandboxes/{id}/resume", post(time::resume))
        .route("/sandboxes/{id}/fork", post(time::fork))
        .route("/sandboxes/{id}/snapshots", post(time::snapshot))
        .route("/snapshots", get(time::snapshots))
        .merge(not_yet())
}

/// What lasts as long as a client sends.
pub(crate) fn streaming() -> Router<Shared> {
    Router::new().route("/build-files/{token}", put(builds::upload))
}

/// Known calls whose rooms are not built yet; each says so in words.
fn not_yet() -> Router<Shared> {
    Router::new()
        .route("/volumes", get(absent::volumes).post(absent::volumes))
        .route(
            "/volumes/{id}",
            get(absent::volumes).delete(absent::volumes),
        )
        .route("/volumecontent/{id}/{kind}", any(absent::volumes))
}
