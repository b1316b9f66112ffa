//! E2B's secrets, which are the native ones.

use std::collections::BTreeMap;

use axum::{Json, extract::State};
use http::{StatusCode, request::Parts};
use sandkeep_model::{Error, Result, Secret, SecretName, Timestamp};
use sandkeep_secrets::SecretInfo;
use serde::{Deserialize, Serialize};

use crate::{
    caller::Caller,
    error::E2bError,
    extract::{E2bJson, path_part},
    secrets::{remove, set, store, work},
    state::Shared,
};

/// The value is in no `Debug`.
#[derive(Deserialize)]
pub(crate) struct NewSecret {
    name: String,
    value: String,
    metadata: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
pub(crate) struct SecretChange {
    value: String,
    metadata: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SecretBody {
    #[serde(rename = "secretID")]
    secret_id: String,
    name: SecretName,
    current_version: u64,
    metadata: BTreeMap<String, String>,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl From<SecretInfo> for SecretBody {
    fn from(info: SecretInfo) -> Self {
        Self {
            secret_id: info.id,
            name: info.name,
            current_version: info.version,
            metadata: info.metadata,
            created_at: info.created_at,
            updated_at: info.updated_at,
        }
    }
}

/// By its id or its name.
async fn named(state: &Shared, parts: &mut Parts) -> Result<SecretInfo> {
    let wanted = path_part(parts, state, "id").await?;
    store(state)?
        .infos()
        .into_iter()
        .find(|info| info.id == wanted || info.name.as_str() == wanted)
        .ok_or_else(|| Error::not_found("there is no such secret"))
}

pub(crate) async fn list(State(state): State<Shared>) -> Result<Json<Vec<SecretBody>>, E2bError> {
    let infos = store(&state)?.infos();
    Ok(Json(infos.into_iter().map(SecretBody::from).collect()))
}

pub(crate) async fn create(
    State(state): State<Shared>,
    caller: Caller,
    E2bJson(request): E2bJson<NewSecret>,
) -> Result<(StatusCode, Json<SecretBody>), E2bError> {
    let value = Secret::new(request.value);
    let name: SecretName = request.name.parse()?;
    let store = store(&state)?;
    let metadata = request.metadata.unwrap_or_default();
    let made = work(move || store.create(name, &value, metadata)).await?;
    caller.set_secret(&state, &made).await;
    Ok((StatusCode::CREATED, Json(made.into())))
}

pub(crate) async fn get(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<Json<SecretBody>, E2bError> {
    Ok(Json(named(&state, &mut parts).await?.into()))
}

pub(crate) async fn change(
    State(state): State<Shared>,
    caller: Caller,
    mut parts: Parts,
    E2bJson(request): E2bJson<SecretChange>,
) -> Result<Json<SecretBody>, E2bError> {
    let value = Secret::new(request.value);
    let name = named(&state, &mut parts).await?.name;
    let changed = set(&state, name, value, request.metadata).await?;
    caller.set_secret(&state, &changed).await;
    Ok(Json(changed.into()))
}

pub(crate) async fn delete(
    State(state): State<Shared>,
    caller: Caller,
    mut parts: Parts,
) -> Result<StatusCode, E2bError> {
    let name = named(&state, &mut parts).await?.name;
    let gone = remove(&state, name, false).await?;
    caller.removed_secret(&state, &gone.name).await;
    Ok(StatusCode::NO_CONTENT)
}
