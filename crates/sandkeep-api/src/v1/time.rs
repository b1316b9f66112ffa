//! Pausing, waking, points, forks and rollbacks.

use axum::{
    Json,
    extract::{FromRequest, Request, State},
};
use http::{StatusCode, request::Parts};
use sandkeep_keeper::{ForkWish, PauseWish, Place, PointUse, PointWish, Timeline};
use sandkeep_model::{
    Isolation, Pause, PauseMode, Point, PointId, Result, SandboxId, State as BoxState,
    TemplateName, Timestamp,
};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::auto_points::ReasonView;
use super::types::{SandboxView, TimeoutWish, yes};
use crate::{
    error::{ErrorBody, ErrorDetail, NativeError},
    extract::{NativeId, NativeJson, NativeJsonOrNothing, path_part},
    query::NativeQuery,
    state::Shared,
};

/// How a sandbox rests.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PauseView {
    /// `disk`: processes and memory are on the disk. `ram`: processes are frozen and keep
    /// their memory. `filesystem`: processes ended, files are there.
    #[schema(value_type = String, example = "disk")]
    pub mode: PauseMode,
    /// Why it is not the mode that was asked for.
    #[schema(required)]
    pub why: Option<String>,
    #[schema(value_type = String, format = DateTime)]
    pub at: Timestamp,
}

impl From<Pause> for PauseView {
    fn from(pause: Pause) -> Self {
        Self {
            mode: pause.mode,
            why: pause.why,
            at: pause.at,
        }
    }
}

/// What a sandbox was at one moment.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PointView {
    #[schema(value_type = String, example = "p4f2k8s0qwertyuiop123")]
    pub id: PointId,
    /// The sandbox it was made of, which may be gone.
    #[schema(value_type = String)]
    pub sandbox_id: SandboxId,
    /// The point before it in the life of that sandbox.
    #[schema(value_type = Option<String>, required)]
    pub parent: Option<PointId>,
    #[schema(required)]
    pub name: Option<String>,
    pub tags: Vec<String>,
    /// `snapshot`: somebody asked for it. `auto`: the rule of its sandbox did.
    #[schema(example = "auto")]
    pub kind: &'static str,
    /// Why it was made, when nobody asked for it.
    #[schema(required)]
    pub reason: Option<ReasonView>,
    /// Whether processes and memory are in it.
    pub memory: bool,
    /// What wrote the memory, and only can read it again.
    #[schema(required)]
    pub engine: Option<String>,
    /// Why memory that was wished for is not in it.
    #[schema(required)]
    pub why_disk_only: Option<String>,
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    /// What the sandbox had written beyond what it was made from, and the memory.
    pub bytes: u64,
    /// The part of that which is not in its parent.
    pub added_bytes: u64,
    #[schema(value_type = String, example = "container")]
    pub isolation: Isolation,
    #[schema(value_type = String)]
    pub template: TemplateName,
}

impl From<Point> for PointView {
    fn from(point: Point) -> Self {
        Self {
            memory: point.has_memory(),
            engine: point.engine.as_ref().map(ToString::to_string),
            id: point.id,
            sandbox_id: point.sandbox_id,
            parent: point.parent,
            name: point.name,
            tags: point.tags,
            kind: point.kind.name(),
            reason: point.reason.map(Into::into),
            why_disk_only: point.why_disk_only,
            created_at: point.created_at,
            bytes: point.bytes,
            added_bytes: point.added_bytes,
            isolation: point.isolation,
            template: point.template,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PointList {
    /// Oldest first.
    pub points: Vec<PointView>,
}

impl From<Vec<Point>> for PointList {
    fn from(points: Vec<Point>) -> Self {
        Self {
            points: points.into_iter().map(PointView::from).collect(),
        }
    }
}

/// What a sandbox was, as a tree.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TimelineView {
    /// Of the sandbox, and of those it came from; oldest first. `parent` makes them a tree; one
    /// that is not listed is gone.
    pub points: Vec<PointView>,
    /// Where the sandbox is, and living ones that came from one of these points.
    pub boxes: Vec<PlaceView>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PlaceView {
    #[schema(value_type = String)]
    pub sandbox_id: SandboxId,
    #[schema(value_type = String, example = "running")]
    pub state: BoxState,
    /// The point it came from or went through last.
    #[schema(value_type = Option<String>, required)]
    pub at: Option<PointId>,
}

impl From<Timeline> for TimelineView {
    fn from(timeline: Timeline) -> Self {
        let place = |place: Place| PlaceView {
            sandbox_id: place.sandbox_id,
            state: place.state,
            at: place.at,
        };
        Self {
            points: timeline.points.into_iter().map(PointView::from).collect(),
            boxes: timeline.boxes.into_iter().map(place).collect(),
        }
    }
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PauseRequest {
    /// `false`: processes end and only the files stay.
    #[serde(default = "yes")]
    #[schema(default = true)]
    memory: bool,
}

impl Default for PauseRequest {
    fn default() -> Self {
        Self { memory: true }
    }
}

/// Puts a running sandbox to rest. `pause.mode` of the answer tells how deep that went.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/pause", tag = "time",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = PauseRequest,
    responses((status = 200, body = SandboxView)))]
pub(crate) async fn pause(
    State(state): State<Shared>,
    id: NativeId,
    NativeJsonOrNothing(request): NativeJsonOrNothing<PauseRequest>,
) -> Result<Json<SandboxView>, NativeError> {
    let wish = if request.memory {
        PauseWish::Memory
    } else {
        PauseWish::Files
    };
    Ok(Json(state.keeper.pause(&id, wish).await?.into()))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResumeRequest {
    /// Seconds until it ends, or `"never"`; the time it was given last when left out.
    #[serde(default)]
    #[schema(value_type = Option<u64>)]
    timeout_seconds: Option<TimeoutWish>,
    /// `false`: a cold start from its files.
    #[serde(default = "yes")]
    #[schema(default = true)]
    memory: bool,
}

impl Default for ResumeRequest {
    fn default() -> Self {
        Self {
            timeout_seconds: None,
            memory: true,
        }
    }
}

/// Wakes a paused sandbox; answers when it is ready for commands.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/resume", tag = "time",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = ResumeRequest,
    responses((status = 200, body = SandboxView)))]
pub(crate) async fn resume(
    State(state): State<Shared>,
    id: NativeId,
    NativeJsonOrNothing(request): NativeJsonOrNothing<ResumeRequest>,
) -> Result<Json<SandboxView>, NativeError> {
    let expiry = request
        .timeout_seconds
        .map(TimeoutWish::expiry)
        .transpose()?;
    let sandbox = state.keeper.resume(&id, expiry, request.memory).await?;
    Ok(Json(SandboxView::with_token(sandbox)))
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PointRequest {
    /// Your own name for it. It belongs to this sandbox; the newest of a name is meant by it.
    name: Option<String>,
    tags: Vec<String>,
    /// `true`: refused when processes and memory can not be in it; `false`: files alone;
    /// left out: as much as this level can.
    memory: Option<bool>,
}

/// Keeps what a sandbox is now; it goes on.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/points", tag = "time", operation_id = "snapshot",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = PointRequest,
    responses((status = 201, body = PointView)))]
pub(crate) async fn snapshot(
    State(state): State<Shared>,
    id: NativeId,
    NativeJsonOrNothing(request): NativeJsonOrNothing<PointRequest>,
) -> Result<(StatusCode, Json<PointView>), NativeError> {
    let wish = PointWish {
        name: request.name,
        tags: request.tags,
        memory: request.memory,
    };
    let point = state.keeper.snapshot(&id, wish).await?;
    Ok((StatusCode::CREATED, Json(point.into())))
}

/// The points of a sandbox, what it came from, and what came from it.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/points", tag = "time", operation_id = "timeline",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, body = TimelineView)))]
pub(crate) async fn timeline(
    State(state): State<Shared>,
    id: NativeId,
) -> Result<Json<TimelineView>, NativeError> {
    state.keeper.get_any(&id).await?;
    Ok(Json(state.keeper.timeline(&id).await?.into()))
}

/// All points there are.
#[utoipa::path(get, path = "/v1/points", tag = "time", operation_id = "list_points",
    responses((status = 200, body = PointList)))]
pub(crate) async fn points(State(state): State<Shared>) -> Result<Json<PointList>, NativeError> {
    Ok(Json(state.keeper.points(None).await?.into()))
}

/// One point.
#[utoipa::path(get, path = "/v1/points/{id}", tag = "time", operation_id = "get_point",
    params(("id" = String, Path, description = "The snapshot: its id, SANDBOX:NAME, or a name that only one sandbox has")),
    responses((status = 200, body = PointView)))]
pub(crate) async fn point(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<Json<PointView>, NativeError> {
    let id = path_part(&mut parts, &state, "id").await?;
    let id = meant(&state, "id", &id, None, PointUse::Read).await?;
    Ok(Json(state.keeper.point(&id).await?.into()))
}

/// What may be changed of a point.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LabelRequest {
    /// Another name; `null` takes it away.
    #[serde(default, deserialize_with = "given")]
    #[schema(value_type = Option<String>)]
    name: Option<Option<String>>,
    /// Other tags, as a whole.
    tags: Option<Vec<String>>,
}

/// Tells `null` from nothing at all.
fn given<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    T::deserialize(deserializer).map(Some)
}

/// Names or tags a point. One with a name or the tag `keep` is never removed by a rule.
#[utoipa::path(patch, path = "/v1/points/{id}", tag = "time", operation_id = "label_point",
    params(("id" = String, Path, description = "The snapshot: its id, or a name or SANDBOX:NAME that no other has")),
    request_body = LabelRequest,
    responses((status = 200, body = PointView)))]
pub(crate) async fn label(
    State(state): State<Shared>,
    request: Request,
) -> Result<Json<PointView>, NativeError> {
    let (mut parts, body) = request.into_parts();
    let id = path_part(&mut parts, &state, "id").await?;
    let id = meant(&state, "id", &id, None, PointUse::Change).await?;
    let request = Request::from_parts(parts, body);
    let NativeJson(wish) = NativeJson::<LabelRequest>::from_request(request, &state).await?;
    let point = state.keeper.label_point(&id, wish.name, wish.tags).await?;
    Ok(Json(point.into()))
}

/// Deletes a point; what was made from it stays whole.
#[utoipa::path(delete, path = "/v1/points/{id}", tag = "time", operation_id = "delete_point",
    params(("id" = String, Path, description = "The snapshot: its id, or a name or SANDBOX:NAME that no other has")),
    responses((status = 204, description = "It is gone")))]
pub(crate) async fn delete(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<StatusCode, NativeError> {
    let id = path_part(&mut parts, &state, "id").await?;
    let id = meant(&state, "id", &id, None, PointUse::Change).await?;
    state.keeper.delete_point(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DiffView {
    changes: Vec<ChangeView>,
    /// There are more than are listed.
    cut: bool,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChangeView {
    path: String,
    /// `added`, `removed` or `changed`.
    kind: &'static str,
    #[schema(required)]
    bytes_before: Option<u64>,
    #[schema(required)]
    bytes_after: Option<u64>,
    /// A unified diff, if it was asked for and both sides are text.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

/// The files that are different at one point from what they were at another.
#[utoipa::path(get, path = "/v1/points/{id}/diff/{other}", tag = "time", operation_id = "diff_points",
    params(
        ("id" = String, Path, description = "The snapshot before: its id, SANDBOX:NAME, or a name that only one sandbox has"),
        ("other" = String, Path, description = "The snapshot after: the same; a name is first looked up in the sandbox of the one before"),
        ("text" = Option<bool>, Query, description = "With unified diffs of text files"),
    ),
    responses((status = 200, body = DiffView)))]
pub(crate) async fn diff(
    State(state): State<Shared>,
    NativeQuery(mut query): NativeQuery,
    mut parts: Parts,
) -> Result<Json<DiffView>, NativeError> {
    let with_text = query.parsed::<bool>("text")?.unwrap_or(false);
    query.finish("text")?;
    let before = path_part(&mut parts, &state, "id").await?;
    let before = found(&state, "id", &before, None, PointUse::Read).await?;
    let after = path_part(&mut parts, &state, "other").await?;
    // A name is one of the same sandbox, where that has one.
    let of = Some(&before.sandbox_id);
    let after = found(&state, "other", &after, of, PointUse::Read).await?;
    let (before, after) = (before.id, after.id);
    let diff = state.keeper.diff(&before, &after, with_text).await?;
    let changes = diff
        .changes
        .into_iter()
        .map(|change| ChangeView {
            path: change.path,
            kind: change.kind.name(),
            bytes_before: change.bytes_before,
            bytes_after: change.bytes_after,
            text: change.text,
        })
        .collect();
    Ok(Json(DiffView {
        changes,
        cut: diff.cut,
    }))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ForkRequest {
    #[serde(default = "one")]
    #[schema(default = 1, minimum = 1, maximum = 20)]
    count: u32,
    /// A snapshot by its id, its name (of this sandbox, or else one it descends from) or
    /// `SANDBOX:NAME`; what the sandbox is now when left out.
    #[serde(default)]
    at: Option<String>,
    /// Seconds until the forks end, or `"never"`; as long as the source was given when left out.
    #[serde(default)]
    #[schema(value_type = Option<u64>)]
    timeout_seconds: Option<TimeoutWish>,
    /// `true`: refused when they can not go on with processes and memory; `false`: from the files alone;
    /// left out: as much as this level can.
    #[serde(default)]
    memory: Option<bool>,
}

const fn one() -> u32 {
    1
}

impl Default for ForkRequest {
    fn default() -> Self {
        Self {
            count: 1,
            at: None,
            timeout_seconds: None,
            memory: None,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ForkList {
    /// One for each that was asked for.
    forks: Vec<ForkView>,
}

/// A fork that was made, or why it was not.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ForkView {
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<SandboxView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorDetail>,
    /// Whether it goes on with the processes and memory of its source.
    memory: bool,
    /// Why memory that was wished for is not there.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

/// Makes sandboxes that begin as copies, with ids, names and tokens of their own.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fork", tag = "time",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = ForkRequest,
    responses((status = 201, body = ForkList)))]
pub(crate) async fn fork(
    State(state): State<Shared>,
    id: NativeId,
    NativeJsonOrNothing(request): NativeJsonOrNothing<ForkRequest>,
) -> Result<(StatusCode, Json<ForkList>), NativeError> {
    let at = match &request.at {
        Some(at) => Some(meant(&state, "at", at, Some(&id), PointUse::Copy).await?),
        None => None,
    };
    let wish = ForkWish {
        count: request.count,
        at,
        expiry: request
            .timeout_seconds
            .map(TimeoutWish::expiry)
            .transpose()?,
        memory: request.memory,
    };
    let forked = state.keeper.fork(&id, wish).await?;
    let (memory, why) = (forked.memory, forked.why);
    let forks = forked
        .made
        .into_iter()
        .map(|made| match made {
            Ok(sandbox) => ForkView {
                sandbox: Some(SandboxView::with_token(sandbox)),
                error: None,
                memory,
                why: why.clone(),
            },
            Err(error) => ForkView {
                sandbox: None,
                error: Some(ErrorBody::from(error).error),
                memory: false,
                why: None,
            },
        })
        .collect();
    Ok((StatusCode::CREATED, Json(ForkList { forks })))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RollbackRequest {
    /// A snapshot by its id, its name, or `SANDBOX:NAME`. A name is one of this sandbox, or else
    /// one it descends from.
    to: String,
    /// `true`: a snapshot of any other sandbox, too; this one then becomes what that one was.
    #[serde(default)]
    foreign: bool,
}

/// Makes a sandbox what it was at a point: the same id, URLs and token. What it is now is
/// given up.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/rollback", tag = "time",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = RollbackRequest,
    responses((status = 200, body = SandboxView)))]
pub(crate) async fn rollback(
    State(state): State<Shared>,
    id: NativeId,
    NativeJson(request): NativeJson<RollbackRequest>,
) -> Result<Json<SandboxView>, NativeError> {
    let to = PointUse::Become {
        foreign: request.foreign,
    };
    let to = meant(&state, "to", &request.to, Some(&id), to).await?;
    let sandbox = state.keeper.rollback(&id, &to).await?;
    Ok(Json(SandboxView::with_token(sandbox)))
}

/// The snapshot meant by a field; see [`PointUse`].
pub(crate) async fn meant(
    state: &Shared,
    field: &str,
    text: &str,
    of: Option<&SandboxId>,
    to: PointUse,
) -> Result<PointId> {
    Ok(found(state, field, text, of, to).await?.id)
}

async fn found(
    state: &Shared,
    field: &str,
    text: &str,
    of: Option<&SandboxId>,
    to: PointUse,
) -> Result<Point> {
    let point = state.keeper.named_point(text, of, to).await;
    point.map_err(|error| error.field(field))
}
