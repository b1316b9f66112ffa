//! Pauses, forks and snapshots as the SDKs ask for them.

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode};
use sandkeep_keeper::{ForkWish, PauseWish, PointWish};
use sandkeep_model::{Error, Point, PointId, Result, SandboxId};
use serde::{Deserialize, Serialize};

use super::{
    absent::not_yet,
    sandboxes::{Created, seconds},
    types::{SandboxBody, TemplateRef},
};
use crate::{
    error::E2bError,
    extract::{E2bId, E2bJsonOrNothing},
    query::E2bQuery,
    state::Shared,
};

/// What forks without a timeout get.
const DEFAULT_FORK: i64 = 300;
/// What a resume without a timeout gets.
const DEFAULT_RESUME: i64 = 15;

#[derive(Debug, Default, Deserialize)]
pub(crate) struct PauseBody {
    memory: Option<bool>,
}

pub(crate) async fn pause(
    State(state): State<Shared>,
    id: E2bId,
    E2bJsonOrNothing(request): E2bJsonOrNothing<PauseBody>,
) -> Result<StatusCode, E2bError> {
    let wish = match request.memory {
        Some(false) => PauseWish::Files,
        _ => PauseWish::Memory,
    };
    state.keeper.pause(&id, wish).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct ResumeBody {
    timeout: Option<i64>,
    #[serde(rename = "autoPause")]
    auto_pause: Option<bool>,
    memory: Option<bool>,
}

/// For old clients; newer ones connect.
pub(crate) async fn resume(
    State(state): State<Shared>,
    id: E2bId,
    E2bJsonOrNothing(request): E2bJsonOrNothing<ResumeBody>,
) -> Result<Created, E2bError> {
    let now = state.keeper.get(&id).await?;
    let pauses = now.on_timeout == sandkeep_model::OnTimeout::Pause;
    if request.auto_pause.is_some_and(|wish| wish != pauses) {
        return Err(not_yet("changing what happens at the timeout")
            .field("autoPause")
            .into());
    }
    let expiry = seconds(request.timeout.unwrap_or(DEFAULT_RESUME))?;
    let memory = request.memory != Some(false);
    let sandbox = state.keeper.resume(&id, Some(expiry), memory).await?;
    Ok((
        StatusCode::CREATED,
        Json(SandboxBody::new(&sandbox, &state)),
    ))
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct ForkBody {
    timeout: Option<i64>,
    count: Option<u32>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Fork {
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<SandboxBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ForkError>,
}

#[derive(Debug, Serialize)]
struct ForkError {
    code: u16,
    message: String,
}

pub(crate) async fn fork(
    State(state): State<Shared>,
    id: E2bId,
    E2bJsonOrNothing(request): E2bJsonOrNothing<ForkBody>,
) -> Result<(StatusCode, Json<Vec<Fork>>), E2bError> {
    let wish = ForkWish {
        count: request.count.unwrap_or(1),
        at: None,
        expiry: Some(seconds(request.timeout.unwrap_or(DEFAULT_FORK))?),
        memory: None,
    };
    let forks = state.keeper.fork(&id, wish).await?;
    let forks = forks
        .made
        .into_iter()
        .map(|made| match made {
            Ok(sandbox) => Fork {
                sandbox: Some(SandboxBody::new(&sandbox, &state)),
                error: None,
            },
            Err(error) => Fork {
                sandbox: None,
                error: Some(ForkError {
                    code: error.code.status(),
                    message: error.message,
                }),
            },
        })
        .collect();
    Ok((StatusCode::CREATED, Json(forks)))
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct SnapshotBody {
    name: Option<String>,
    memory: Option<bool>,
}

/// `SnapshotInfo`. The id can be given as the template of a create.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SnapshotInfo {
    #[serde(rename = "snapshotID")]
    snapshot_id: String,
    names: Vec<String>,
}

impl From<Point> for SnapshotInfo {
    fn from(point: Point) -> Self {
        Self {
            snapshot_id: format!("{}:default", point.id),
            names: point.name.into_iter().collect(),
        }
    }
}

pub(crate) async fn snapshot(
    State(state): State<Shared>,
    id: E2bId,
    E2bJsonOrNothing(request): E2bJsonOrNothing<SnapshotBody>,
) -> Result<(StatusCode, Json<SnapshotInfo>), E2bError> {
    let name = match request.name.as_deref().filter(|name| !name.is_empty()) {
        Some(name) => Some(TemplateRef::parse(name)?.default_only()?.to_string()),
        None => None,
    };
    let wish = PointWish {
        name,
        tags: Vec::new(),
        // With memory where this level can have it; files alone else.
        memory: request.memory.filter(|memory| !memory),
    };
    let point = state.keeper.snapshot(&id, wish).await?;
    Ok((StatusCode::CREATED, Json(point.into())))
}

/// Newest first, in pages.
pub(crate) async fn snapshots(
    State(state): State<Shared>,
    E2bQuery(mut query): E2bQuery,
) -> Result<Response, E2bError> {
    let of = query.take("sandboxID")?.filter(|id| !id.is_empty());
    let of = of.map(|id| id.parse::<SandboxId>()).transpose();
    let name = query.take("name")?.filter(|name| !name.is_empty());
    let limit = usize::try_from(crate::v1::limit(&mut query)?).unwrap_or(usize::MAX);
    let after = query.take("nextToken")?.filter(|token| !token.is_empty());
    let after = after.map(|token| token.parse::<PointId>()).transpose();
    let after =
        after.map_err(|_| Error::invalid("nextToken", "nextToken is not one this server gave"))?;
    // What can not be the id of a sandbox has no snapshots.
    let mut points = match &of {
        Ok(of) => state.keeper.points(of.as_ref()).await?,
        Err(_) => Vec::new(),
    };
    // Points that come and go by a rule are not what somebody took.
    points.retain(|point| !point.may_go());
    if let Some(name) = name {
        let wanted = TemplateRef::parse(&name).map(|name| name.name.to_string());
        points.retain(|point| {
            wanted
                .as_ref()
                .is_ok_and(|name| point.name.as_ref() == Some(name))
        });
    }
    points.reverse();
    if let Some(after) = after {
        let start = points.iter().position(|point| point.id == after);
        points.drain(..start.map_or(points.len(), |at| at + 1));
    }
    let more = points.len() > limit;
    points.truncate(limit);
    let next = more
        .then(|| points.last().map(|point| point.id.clone()))
        .flatten();
    let listed: Vec<SnapshotInfo> = points.into_iter().map(SnapshotInfo::from).collect();
    let mut response = Json(listed).into_response();
    if let Some(next) = next
        && let Ok(token) = HeaderValue::from_str(next.as_str())
    {
        response.headers_mut().insert("x-next-token", token);
    }
    Ok(response)
}
