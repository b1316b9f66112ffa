//! Secrets: values go in and never come out again. Only the edge of a box's network adds them to
//! requests.

use std::collections::BTreeMap;

use axum::{Json, extract::State};
use http::{StatusCode, request::Parts};
use sandkeep_keeper::BoundTo;
use sandkeep_model::{SandboxId, Secret, SecretName, Timestamp};
use sandkeep_secrets::SecretInfo;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    caller::Caller,
    error::NativeError,
    extract::{NativeJson, path_part},
    query::NativeQuery,
    secrets,
    state::Shared,
};

/// A value under a name. It can not be printed.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SecretRequest {
    /// 1 to 64 of A-Z, a-z, 0-9, - and _
    #[schema(example = "github")]
    name: String,
    /// Up to 64 KiB of text. It is never shown again.
    #[schema(write_only)]
    value: String,
    /// Your own words about it; left out, those there are stay.
    metadata: Option<BTreeMap<String, String>>,
}

/// Everything about a secret but its value.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SecretView {
    #[schema(value_type = String, example = "github")]
    name: SecretName,
    /// One more with each change of the value.
    version: u64,
    metadata: BTreeMap<String, String>,
    #[schema(value_type = String, format = DateTime)]
    created_at: Timestamp,
    #[schema(value_type = String, format = DateTime)]
    updated_at: Timestamp,
    /// The sandboxes whose requests it is added to.
    bound_to: Vec<BoundView>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct BoundView {
    #[schema(value_type = String)]
    sandbox_id: SandboxId,
    host: String,
    port: u16,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SecretList {
    secrets: Vec<SecretView>,
}

fn view(info: SecretInfo, bound: &[BoundTo]) -> SecretView {
    let bound_to = bound
        .iter()
        .filter(|bound| bound.secret == info.name)
        .map(|bound| BoundView {
            sandbox_id: bound.sandbox_id.clone(),
            host: bound.host.clone(),
            port: bound.port,
        })
        .collect();
    SecretView {
        name: info.name,
        version: info.version,
        metadata: info.metadata,
        created_at: info.created_at,
        updated_at: info.updated_at,
        bound_to,
    }
}

/// Stores a secret, or a new value of one. It holds for the next request of every sandbox it is
/// bound to.
#[utoipa::path(post, path = "/v1/secrets", tag = "secrets",
    request_body = SecretRequest,
    responses((status = 201, body = SecretView), (status = 200, body = SecretView, description = "It has a new value")))]
pub(crate) async fn set(
    State(state): State<Shared>,
    caller: Caller,
    NativeJson(request): NativeJson<SecretRequest>,
) -> Result<(StatusCode, Json<SecretView>), NativeError> {
    let value = Secret::new(request.value);
    let name: SecretName = request.name.parse()?;
    let info = secrets::set(&state, name, value, request.metadata).await?;
    caller.set_secret(&state, &info).await;
    let status = if info.version == 1 {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok((status, Json(view(info, &state.keeper.bound()))))
}

/// All secrets by name, and where they are bound. Values are never shown.
#[utoipa::path(get, path = "/v1/secrets", tag = "secrets",
    responses((status = 200, body = SecretList)))]
pub(crate) async fn list(State(state): State<Shared>) -> Result<Json<SecretList>, NativeError> {
    let bound = state.keeper.bound();
    let infos = secrets::store(&state)?.infos();
    Ok(Json(SecretList {
        secrets: infos.into_iter().map(|info| view(info, &bound)).collect(),
    }))
}

/// Deletes a secret. Refused while it is bound to a sandbox, unless `force` is said: requests that
/// need it are then answered with an error instead of being sent without it.
#[utoipa::path(delete, path = "/v1/secrets/{name}", tag = "secrets",
    params(("name" = String, Path, description = "Its name"),
        ("force" = Option<bool>, Query, description = "Although it is bound")),
    responses((status = 204, description = "It is gone")))]
pub(crate) async fn remove(
    State(state): State<Shared>,
    caller: Caller,
    NativeQuery(mut query): NativeQuery,
    mut parts: Parts,
) -> Result<StatusCode, NativeError> {
    let name: SecretName = path_part(&mut parts, &state, "name").await?.parse()?;
    let force = query.parsed::<bool>("force")?.unwrap_or(false);
    query.finish("force")?;
    let gone = secrets::remove(&state, name, force).await?;
    caller.removed_secret(&state, &gone.name).await;
    Ok(StatusCode::NO_CONTENT)
}
