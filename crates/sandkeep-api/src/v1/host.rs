//! The server itself.

use axum::{Json, extract::State};
use sandkeep_model::{ENVD_VERSION, Isolation, ServerKey};
use sandkeep_ward::{Check, Verdict};
use serde::Serialize;
use utoipa::ToSchema;

use crate::state::Shared;

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Health {
    #[schema(example = "ok")]
    status: &'static str,
    version: String,
}

/// Whether the server answers. Needs no key.
#[utoipa::path(get, path = "/v1/health", tag = "server", responses((status = 200, body = Health)))]
pub(crate) async fn health(State(state): State<Shared>) -> Json<Health> {
    Json(Health {
        status: "ok",
        version: state.version.clone(),
    })
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Version {
    version: String,
    /// The newest native API.
    #[schema(example = "v1")]
    api: &'static str,
    /// The envd version the agents fulfil.
    envd: &'static str,
    /// Ports of sandboxes are reached at `<port>-<id>.<domain>`, when there is one.
    #[schema(required)]
    domain: Option<String>,
}

/// Versions of the server and what it speaks.
#[utoipa::path(get, path = "/v1/version", tag = "server", responses((status = 200, body = Version)))]
pub(crate) async fn version(State(state): State<Shared>) -> Json<Version> {
    Json(Version {
        version: state.version.clone(),
        api: "v1",
        envd: ENVD_VERSION,
        domain: state.domain.clone(),
    })
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ServerKeyView {
    /// As `trusted_servers` of another server takes it.
    #[schema(value_type = String, example = "ed25519:RofokU5ZfJyEMd8oIn8IGI6A3CnY28WJbo5DCS_osws")]
    key: ServerKey,
}

/// The public key with which this server signs exported points.
#[utoipa::path(get, path = "/v1/host/key", tag = "server", operation_id = "key",
    responses((status = 200, body = ServerKeyView)))]
pub(crate) async fn key(State(state): State<Shared>) -> Json<ServerKeyView> {
    Json(ServerKeyView {
        key: state.keeper.server_key(),
    })
}

/// What the host can do, and what it lacks.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct HostView {
    version: String,
    levels: Vec<LevelView>,
    /// Sandboxes that exist.
    sandboxes: usize,
    /// Sandboxes that wait, started, for somebody to want one.
    pooled: usize,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LevelView {
    #[schema(value_type = String, example = "container")]
    level: Isolation,
    usable: bool,
    checks: Vec<CheckView>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CheckView {
    name: String,
    /// `ok`, `warning` (works, with less) or `missing` (the level does not work).
    #[schema(value_type = String, example = "ok")]
    verdict: Verdict,
    found: String,
    /// What to do, when something is to be done.
    #[schema(required)]
    fix: Option<String>,
}

impl From<Check> for CheckView {
    fn from(check: Check) -> Self {
        Self {
            name: check.name,
            verdict: check.verdict,
            found: check.found,
            fix: check.fix,
        }
    }
}

/// What `sandkeep doctor` shows: isolation levels, checks, counts.
#[utoipa::path(get, path = "/v1/host", tag = "server", responses((status = 200, body = HostView)))]
pub(crate) async fn host(State(state): State<Shared>) -> Json<HostView> {
    let report = state.keeper.report().await;
    let levels = report.levels.into_iter().map(|level| LevelView {
        level: level.level,
        usable: level.usable,
        checks: level.checks.into_iter().map(CheckView::from).collect(),
    });
    Json(HostView {
        version: state.version.clone(),
        levels: levels.collect(),
        sandboxes: report.boxes,
        pooled: report.pooled,
    })
}
