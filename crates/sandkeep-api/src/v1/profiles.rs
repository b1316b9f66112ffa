//! Policies with a name: those that are built in, and those of the operator, in versions.

use std::sync::Arc;

use axum::{Json, extract::State};
use http::{StatusCode, request::Parts};
use sandkeep_audit::Action;
use sandkeep_moat::{NamedProfile, ProfileVersion};
use sandkeep_model::{Error, Result, Timestamp};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::{
    caller::Caller,
    error::NativeError,
    extract::{NativeJson, path_part},
    network::policy,
    secrets::work,
    state::Shared,
};

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ProfilesView {
    /// The built-in ones first.
    pub profiles: Vec<ProfileView>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ProfileView {
    #[schema(example = "air-gapped")]
    pub name: String,
    /// Absent for a built-in one. `NAME@VERSION` stands for this one for ever.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// When this version was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub at: Option<Timestamp>,
    /// What a built-in one opens, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opens: Option<&'static str>,
    /// The policy it stands for; of a built-in one, on this host, today.
    #[schema(value_type = Object)]
    pub policy: Value,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ProfileVersionsView {
    pub name: String,
    /// Newest first; of very many the oldest are forgotten.
    pub versions: Vec<ProfileView>,
}

impl From<NamedProfile> for ProfileView {
    fn from(profile: NamedProfile) -> Self {
        Self {
            name: profile.name,
            version: profile.version,
            at: profile.at,
            opens: profile.words,
            policy: profile.policy.to_json(),
        }
    }
}

fn view(name: &str, one: &ProfileVersion) -> ProfileView {
    ProfileView {
        name: name.to_owned(),
        version: Some(one.version),
        at: Some(one.at),
        opens: None,
        policy: one.policy.to_json(),
    }
}

fn not_found(name: &str) -> Error {
    let shown: String = name.chars().take(64).collect();
    Error::not_found(format!("there is no profile \"{}\"", shown.escape_debug()))
        .field("name")
        .hint("GET /v1/profiles lists them")
}

/// The policies that have a name.
#[utoipa::path(get, path = "/v1/profiles", tag = "network", operation_id = "list_profiles",
    responses((status = 200, body = ProfilesView)))]
pub(crate) async fn list(State(state): State<Shared>) -> Result<Json<ProfilesView>, NativeError> {
    let known = Arc::clone(&state.profiles);
    // Those of package registries are read from files of this host.
    let all = work(move || Ok(known.all())).await?;
    Ok(Json(ProfilesView {
        profiles: all.into_iter().map(Into::into).collect(),
    }))
}

/// All versions of a profile of one's own.
#[utoipa::path(get, path = "/v1/profiles/{name}", tag = "network", operation_id = "get_profile",
    params(("name" = String, Path, description = "Its name")),
    responses((status = 200, body = ProfileVersionsView)))]
pub(crate) async fn get(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<Json<ProfileVersionsView>, NativeError> {
    let name = path_part(&mut parts, &state, "name").await?;
    let versions = state.profiles.versions(&name);
    if versions.is_empty() {
        return Err(not_found(&name).into());
    }
    let versions = versions.iter().rev().map(|one| view(&name, one)).collect();
    Ok(Json(ProfileVersionsView { name, versions }))
}

/// Makes a profile, or its next version. Sandboxes made with an older one keep it; the same
/// policy again changes nothing.
#[utoipa::path(put, path = "/v1/profiles/{name}", tag = "network", operation_id = "set_profile",
    params(("name" = String, Path, description = "1 to 64 of a-z, 0-9 and -")),
    request_body(content = Object, description = "A policy document, or `{\"profile\": NAME}` to begin with"),
    responses((status = 200, body = ProfileView)))]
pub(crate) async fn put(
    State(state): State<Shared>,
    caller: Caller,
    mut parts: Parts,
    NativeJson(wish): NativeJson<Value>,
) -> Result<Json<ProfileView>, NativeError> {
    let name = path_part(&mut parts, &state, "name").await?;
    if wish.get("credentials").is_some() {
        return Err(Error::invalid(
            "credentials",
            "a profile says what is reached, not with which credentials",
        )
        .hint("give credentials when a sandbox is made")
        .into());
    }
    let policy = policy(&state.profiles, &wish)?;
    let (profiles, own) = (Arc::clone(&state.profiles), name.clone());
    let before = profiles.versions(&name).last().map(|one| one.version);
    let made = work(move || profiles.put(&own, policy)).await?;
    if before != Some(made.version) {
        let action = Action::ProfileChanged {
            name: name.as_str().into(),
            version: made.version,
        };
        caller.did(&state, action).await;
    }
    Ok(Json(view(&name, &made)))
}

/// Forgets a profile with all its versions. Sandboxes made with it keep what they may reach.
#[utoipa::path(delete, path = "/v1/profiles/{name}", tag = "network", operation_id = "remove_profile",
    params(("name" = String, Path, description = "Its name")),
    responses((status = 204, description = "It is gone")))]
pub(crate) async fn remove(
    State(state): State<Shared>,
    caller: Caller,
    mut parts: Parts,
) -> Result<StatusCode, NativeError> {
    let name = path_part(&mut parts, &state, "name").await?;
    let (profiles, own) = (Arc::clone(&state.profiles), name.clone());
    if !work(move || profiles.remove(&own)).await? {
        return Err(not_found(&name).into());
    }
    let action = Action::ProfileRemoved {
        name: name.as_str().into(),
    };
    caller.did(&state, action).await;
    Ok(StatusCode::NO_CONTENT)
}
