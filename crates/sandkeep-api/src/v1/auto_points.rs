//! Points that are made by themselves.

use axum::{Json, extract::State};
use sandkeep_model::{Keep, PointPolicy, PointReason, Result};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    error::NativeError,
    extract::{NativeId, NativeJsonOrNothing, object},
    state::Shared,
};

/// When points are made of a sandbox by themselves. They never make a command fail: what can
/// not be made is told as an event `point_not_made`.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct AutoPoints {
    /// Before every command that is started over the API.
    pub before_exec: bool,
    /// After every such command, once its end was told.
    pub after_exec: bool,
    /// Every so many seconds while it runs.
    #[schema(minimum = 1)]
    pub every_seconds: Option<u64>,
    /// Before commands that fit one of these regular expressions, searched in the command
    /// line; `"risky"` is a list of commands that have cost people their work.
    #[schema(example = json!(["risky", "^make deploy"]))]
    pub before_matching: Vec<String>,
    /// With processes and memory, where nobody is connected whom that would cut off.
    pub memory: bool,
    /// Around commands, not more often than this; commands that match always count. 1 when
    /// left out.
    pub min_interval_seconds: Option<u64>,
    #[serde(deserialize_with = "object")]
    pub keep: KeepBody,
}

/// How many of these points stay. Those with a name or the tag `keep` always do.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct KeepBody {
    /// The newest so many; 100 when left out.
    #[schema(minimum = 1, maximum = 10000)]
    pub count: Option<u32>,
    /// Those younger than this.
    pub age_seconds: Option<u64>,
    /// The newest that together added no more than this.
    pub bytes: Option<u64>,
}

impl From<AutoPoints> for PointPolicy {
    fn from(body: AutoPoints) -> Self {
        let default = Self::default();
        Self {
            before_exec: body.before_exec,
            after_exec: body.after_exec,
            every_seconds: body.every_seconds,
            before_matching: body.before_matching,
            memory: body.memory,
            min_interval_seconds: body
                .min_interval_seconds
                .unwrap_or(default.min_interval_seconds),
            keep: Keep {
                count: body.keep.count.unwrap_or(default.keep.count),
                age_seconds: body.keep.age_seconds,
                bytes: body.keep.bytes,
            },
        }
    }
}

impl From<PointPolicy> for AutoPoints {
    fn from(policy: PointPolicy) -> Self {
        Self {
            before_exec: policy.before_exec,
            after_exec: policy.after_exec,
            every_seconds: policy.every_seconds,
            before_matching: policy.before_matching,
            memory: policy.memory,
            min_interval_seconds: Some(policy.min_interval_seconds),
            keep: KeepBody {
                count: Some(policy.keep.count),
                age_seconds: policy.keep.age_seconds,
                bytes: policy.keep.bytes,
            },
        }
    }
}

/// Why a point was made without anybody asking.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ReasonView {
    /// `before_exec`, `after_exec`, `before_matching` or `every`.
    #[schema(example = "before_matching")]
    why: &'static str,
    /// The command it was made for.
    #[schema(required)]
    command: Option<String>,
    /// What the command fits.
    #[schema(required)]
    pattern: Option<String>,
}

impl From<PointReason> for ReasonView {
    fn from(reason: PointReason) -> Self {
        Self {
            why: reason.why.name(),
            command: reason.command,
            pattern: reason.pattern,
        }
    }
}

/// When points are made of a sandbox by themselves.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/auto-points", tag = "time", operation_id = "get_auto_points",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, body = AutoPoints)))]
pub(crate) async fn get(
    State(state): State<Shared>,
    id: NativeId,
) -> Result<Json<AutoPoints>, NativeError> {
    let policy = state.keeper.get(&id).await?.time.points;
    Ok(Json(policy.unwrap_or_default().into()))
}

/// Changes when points are made of a sandbox by themselves, as a whole; an empty rule makes
/// none. Points that the new rule does not keep are removed at once.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/auto-points", tag = "time", operation_id = "set_auto_points",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = AutoPoints,
    responses((status = 200, body = AutoPoints)))]
pub(crate) async fn put(
    State(state): State<Shared>,
    id: NativeId,
    NativeJsonOrNothing(wish): NativeJsonOrNothing<AutoPoints>,
) -> Result<Json<AutoPoints>, NativeError> {
    let policy = Some(wish.into());
    let sandbox = state.keeper.set_point_policy(&id, policy).await?;
    Ok(Json(sandbox.time.points.unwrap_or_default().into()))
}
