//! The server itself.

use axum::{Json, extract::State};
use sandkeep_keeper::StorageReport;
use sandkeep_model::{ENVD_VERSION, Isolation, ServerKey};
use sandkeep_ward::{Check, Verdict};
use serde::Serialize;
use utoipa::ToSchema;

use crate::state::Shared;

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Health {
    /// `ok`, or `degraded`: it answers, but not everything works; `reasons` say what.
    #[schema(example = "ok")]
    status: &'static str,
    version: String,
    /// What is wrong, and what to do about it.
    reasons: Vec<HealthReason>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct HealthReason {
    /// `storage_low`, `storage_read_only`, `storage_overcommitted` or `state_disk_full`.
    #[schema(example = "storage_low")]
    code: &'static str,
    message: String,
    #[schema(required)]
    hint: Option<String>,
}

/// Whether the server answers. Needs no key.
#[utoipa::path(get, path = "/v1/health", tag = "server", responses((status = 200, body = Health)))]
pub(crate) async fn health(State(state): State<Shared>) -> Json<Health> {
    let reasons = state.keeper.storage().reasons.into_iter();
    let reasons: Vec<_> = reasons
        .map(|(reason, error)| HealthReason {
            code: reason.name(),
            message: error.message,
            hint: error.hint,
        })
        .collect();
    Json(Health {
        status: if reasons.is_empty() { "ok" } else { "degraded" },
        version: state.version.clone(),
        reasons,
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
    /// Whether the server speaks TLS itself: ports are at `https` then, under the `domain`.
    tls: bool,
}

/// Versions of the server and what it speaks.
#[utoipa::path(get, path = "/v1/version", tag = "server", responses((status = 200, body = Version)))]
pub(crate) async fn version(State(state): State<Shared>) -> Json<Version> {
    Json(Version {
        version: state.version.clone(),
        api: "v1",
        envd: ENVD_VERSION,
        domain: state.domain.clone(),
        tls: state.tls,
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
    /// The level of a sandbox whose create names none.
    #[schema(value_type = Option<String>, required, example = "container")]
    isolation_default: Option<Isolation>,
    /// No sandbox is isolated less.
    #[schema(value_type = Option<String>, required)]
    isolation_minimum: Option<Isolation>,
    /// Sandboxes that exist.
    sandboxes: usize,
    /// Sandboxes that wait, started, for somebody to want one.
    pooled: usize,
    storage: StorageView,
}

/// The storage of sandboxes, templates and points.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct StorageView {
    total_bytes: u64,
    free_bytes: u64,
    /// By how much it may still become larger: its setting and the disk below allow so much.
    growable_bytes: u64,
    /// Free on the disk that holds the state directory.
    below_free_bytes: u64,
    /// Whoever writes is held, and nothing new is begun.
    low: bool,
    read_only: bool,
    /// The disk below has not got all that the storage was promised.
    overcommitted: bool,
    /// Sandboxes that stand still because of it.
    held: usize,
    /// While it is low: who took how much in the minutes before, most first.
    taken: Vec<TakenView>,
}

/// What a sandbox took of the storage.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TakenView {
    sandbox_id: String,
    /// Files and images of memory.
    bytes: u64,
    /// The images in it.
    image_bytes: u64,
}

/// More are not told.
const MOST_TAKEN: usize = 20;

impl From<StorageReport> for StorageView {
    fn from(report: StorageReport) -> Self {
        let state = report.state;
        let taken = report.taken.into_iter().take(MOST_TAKEN);
        let taken = taken.filter(|one| one.bytes > 0).map(|one| TakenView {
            sandbox_id: one.id.to_string(),
            bytes: one.bytes,
            image_bytes: one.images,
        });
        Self {
            total_bytes: state.total_bytes,
            free_bytes: state.free_bytes,
            growable_bytes: state.growable_bytes,
            below_free_bytes: state.below_free_bytes,
            low: state.low,
            read_only: state.read_only,
            overcommitted: state.overcommitted,
            held: report.held,
            taken: taken.collect(),
        }
    }
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
        isolation_default: report.plain_level,
        isolation_minimum: report.isolation_minimum,
        sandboxes: report.boxes,
        pooled: report.pooled,
        storage: state.keeper.storage().into(),
    })
}
