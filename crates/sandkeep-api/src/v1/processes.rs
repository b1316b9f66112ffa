//! The commands that run in a sandbox.

use axum::{Json, extract::State};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{agent, error::NativeError, extract::NativeId, state::Shared};

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ProcessList {
    /// Started over an API, by whichever client; not what they started themselves.
    processes: Vec<ProcessView>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ProcessView {
    /// To attach to it.
    pid: u32,
    cmd: String,
    args: Vec<String>,
    #[schema(required)]
    cwd: Option<String>,
    /// The name its client gave it.
    #[schema(required)]
    tag: Option<String>,
}

/// The commands that run in a sandbox. Those of a server that was restarted are among them.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/processes", tag = "exec", operation_id = "list_processes",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, body = ProcessList)))]
pub(crate) async fn list(
    State(state): State<Shared>,
    id: NativeId,
) -> Result<Json<ProcessList>, NativeError> {
    let mut agent = agent::open(&state, &id).await?;
    let processes = agent.list_processes().await?;
    let processes = processes.into_iter().map(|process| ProcessView {
        pid: process.pid,
        cmd: process.config.cmd,
        args: process.config.args,
        cwd: process.config.cwd,
        tag: process.tag,
    });
    Ok(Json(ProcessList {
        processes: processes.collect(),
    }))
}
