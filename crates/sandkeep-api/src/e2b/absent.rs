//! Calls that are known but not built yet. Each says so; none pretends.

use axum::extract::State;
use sandkeep_model::{Code, Error, State as BoxState};

use crate::{error::E2bError, extract::E2bId, state::Shared};

pub(super) fn not_yet(what: &str) -> Error {
    Error::new(
        Code::NotImplemented,
        format!("{what} can not be done by this version of Sandkeep"),
    )
}

/// Refused for a box that exists; another id is simply not found.
async fn of_box(state: &Shared, id: &E2bId, what: &str) -> E2bError {
    match state.keeper.get(id).await {
        Ok(_) => not_yet(what)
            .hint("the sandbox was not touched and keeps running")
            .into(),
        Err(error) => error.into(),
    }
}

pub(crate) async fn pause(State(state): State<Shared>, id: E2bId) -> E2bError {
    of_box(&state, &id, "pausing a sandbox").await
}

pub(crate) async fn resume(State(state): State<Shared>, id: E2bId) -> E2bError {
    match state.keeper.get(&id).await {
        Ok(sandbox) if sandbox.state == BoxState::Running => {
            Error::conflict(format!("sandbox \"{}\" is already running", sandbox.id)).into()
        }
        Ok(_) => not_yet("resuming a sandbox").into(),
        Err(error) => error.into(),
    }
}

pub(crate) async fn fork(State(state): State<Shared>, id: E2bId) -> E2bError {
    of_box(&state, &id, "forking a sandbox").await
}

pub(crate) async fn snapshot(State(state): State<Shared>, id: E2bId) -> E2bError {
    of_box(&state, &id, "making a snapshot of a sandbox").await
}

pub(crate) async fn snapshots() -> E2bError {
    not_yet("listing snapshots").into()
}

pub(crate) async fn builds() -> E2bError {
    not_yet("building and changing templates over the API")
        .hint("templates are made on the server with `sandkeep template`")
        .into()
}

pub(crate) async fn volumes() -> E2bError {
    not_yet("using volumes").into()
}
