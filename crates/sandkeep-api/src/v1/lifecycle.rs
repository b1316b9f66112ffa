//! What happens to a box that exists.

use axum::{Json, extract::State};
use http::StatusCode;
use sandkeep_agent_api::host::{LogEntry, LogLevel};
use sandkeep_model::{GoneReason, Timestamp};
use serde::Serialize;
use utoipa::ToSchema;

use super::types::{MetricsView, SampleView, SandboxView, TimeoutRequest};
use crate::{
    agent,
    caller::Caller,
    error::NativeError,
    extract::{NativeId, NativeJson},
    query::NativeQuery,
    state::Shared,
};

/// Ends a sandbox and everything in it.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}", tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 204, description = "It is gone")))]
pub(crate) async fn kill(
    State(state): State<Shared>,
    caller: Caller,
    id: NativeId,
) -> Result<StatusCode, NativeError> {
    let by = Some(caller.0);
    state.keeper.kill_for(&id, GoneReason::Killed, by).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Moves the end of a sandbox.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/timeout", tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = TimeoutRequest,
    responses((status = 200, body = SandboxView)))]
pub(crate) async fn set_timeout(
    State(state): State<Shared>,
    id: NativeId,
    NativeJson(request): NativeJson<TimeoutRequest>,
) -> Result<Json<SandboxView>, NativeError> {
    let expiry = request.timeout_seconds.expiry()?;
    let sandbox = if request.extend_only {
        state.keeper.extend(&id, expiry).await?
    } else {
        state.keeper.set_expiry(&id, expiry).await?
    };
    Ok(Json(sandbox.into()))
}

/// What a sandbox used over time.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/metrics", tag = "sandboxes",
    params(
        ("id" = String, Path, description = "The sandbox"),
        ("from" = Option<String>, Query, format = DateTime, description = "Not before"),
        ("to" = Option<String>, Query, format = DateTime, description = "Not after"),
    ),
    responses((status = 200, body = MetricsView)))]
pub(crate) async fn metrics(
    State(state): State<Shared>,
    id: NativeId,
    NativeQuery(mut query): NativeQuery,
) -> Result<Json<MetricsView>, NativeError> {
    let from = query.parsed::<Timestamp>("from")?;
    let to = query.parsed::<Timestamp>("to")?;
    query.finish("from and to")?;
    let samples = state.keeper.samples(&id, from, to).await?;
    Ok(Json(MetricsView {
        samples: samples.into_iter().map(SampleView::from).collect(),
    }))
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LogView {
    entries: Vec<LogLine>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LogLine {
    /// Give the last one back as `after` to read on.
    seq: u64,
    #[schema(value_type = String, format = DateTime)]
    at: Timestamp,
    /// `info`, `warn` or `error`.
    #[schema(value_type = String, example = "info")]
    level: LogLevel,
    message: String,
}

impl From<LogEntry> for LogLine {
    fn from(entry: LogEntry) -> Self {
        Self {
            seq: entry.seq,
            at: Timestamp::from_millis(entry.timestamp_ms),
            level: entry.level,
            message: entry.message,
        }
    }
}

/// The log of a sandbox's agent: processes that started and ended. It keeps the last 1000.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/logs", tag = "sandboxes",
    params(
        ("id" = String, Path, description = "The sandbox"),
        ("after" = Option<u64>, Query, description = "Only entries after this `seq`"),
    ),
    responses((status = 200, body = LogView)))]
pub(crate) async fn logs(
    State(state): State<Shared>,
    id: NativeId,
    NativeQuery(mut query): NativeQuery,
) -> Result<Json<LogView>, NativeError> {
    let after = query.parsed::<u64>("after")?.unwrap_or(0);
    query.finish("after")?;
    let entries = agent::open(&state, &id).await?.logs(after).await?;
    Ok(Json(LogView {
        entries: entries.into_iter().map(LogLine::from).collect(),
    }))
}
