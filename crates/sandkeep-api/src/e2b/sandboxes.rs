//! Making, finding and ending boxes.

use std::collections::BTreeMap;

use axum::{Json, extract::State};
use http::{HeaderMap, StatusCode};
use sandkeep_model::{
    Code, CreateSandbox, E2bSettings, Error, Expiry, GoneReason, Identity, IsolationWish,
    LimitsWish, OnTimeout, PortAccess, Result, SandboxId, State as BoxState, TimeWish, check_env,
    check_metadata,
};
use serde_json::{Value, json};

use super::{
    absent::not_yet,
    iam, network,
    types::{
        ConnectBody, DetailBody, NewSandbox, RefreshBody, SandboxBody, TemplateRef, TimeoutBody,
    },
};
use crate::{
    caller::Caller,
    create::{create, expiry_after, idempotency_key},
    error::E2bError,
    extract::{E2bId, E2bJson, E2bJsonOrNothing},
    query::shown,
    state::Shared,
};

/// What a create without a timeout gets, by generation.
/// The key of the metadata that asks for an isolation level.
const ISOLATION_KEY: &str = "sandkeep.isolation";
const DEFAULT_TIMEOUT_V1: i64 = 15;
const DEFAULT_TIMEOUT_V2: i64 = 300;
/// A refresh never asks for less.
const LEAST_REFRESH: i64 = 15;

pub(crate) async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

pub(super) type Created = (StatusCode, Json<SandboxBody>);

pub(crate) async fn create_v1(
    state: State<Shared>,
    caller: Caller,
    headers: HeaderMap,
    E2bJson(request): E2bJson<NewSandbox>,
) -> Result<Created, E2bError> {
    create_any(&state, caller, &headers, request, DEFAULT_TIMEOUT_V1).await
}

pub(crate) async fn create_v2(
    state: State<Shared>,
    caller: Caller,
    headers: HeaderMap,
    E2bJson(request): E2bJson<NewSandbox>,
) -> Result<Created, E2bError> {
    create_any(&state, caller, &headers, request, DEFAULT_TIMEOUT_V2).await
}

async fn create_any(
    state: &Shared,
    caller: Caller,
    headers: &HeaderMap,
    mut request: NewSandbox,
    default_timeout: i64,
) -> Result<Created, E2bError> {
    let asked = network::asked_of_create(request.network.as_ref(), request.allow_internet_access)?;
    let template = request.template_id.clone();
    let mut request = CreateSandbox {
        by: Some(caller.0),
        ports: asked.ports,
        e2b: E2bSettings {
            mcp: request.mcp.take().filter(|mcp| !mcp.is_null()),
            mask_request_host: asked.mask.clone(),
        },
        ..checked(request, headers, default_timeout)?
    };
    let wanted = TemplateRef::parse(&template)?;
    let point = wanted.snapshot(state).await?;
    match point {
        Some(point) => request.time.from_point = Some(point.id),
        None => drop(wanted.existing(state).await?),
    }
    let wish = asked.wish(state, &request.identity.tokens).await?;
    let sandbox = create(&state.keeper, request, wish).await?;
    Ok((StatusCode::CREATED, Json(SandboxBody::new(&sandbox, state))))
}

fn checked(
    request: NewSandbox,
    headers: &HeaderMap,
    default_timeout: i64,
) -> Result<CreateSandbox> {
    refuse_what_is_missing(&request)?;
    let identity = Identity {
        tokens: iam::tokens(request.iam.as_ref())?,
        ..Identity::default()
    };
    let timeout = request.timeout.unwrap_or(default_timeout);
    if timeout <= 0 {
        return Err(Error::invalid("timeout", "Timeout must be greater than 0"));
    }
    let env = request.env_vars.unwrap_or_default();
    let metadata = request.metadata.unwrap_or_default();
    check_env(&env).map_err(|error| error.field("envVars"))?;
    check_metadata(&metadata)?;
    Ok(CreateSandbox {
        template: TemplateRef::parse(&request.template_id)?.local()?,
        isolation: isolation(&metadata)?,
        limits: LimitsWish::default(),
        expiry: expiry_after("timeout", timeout.unsigned_abs())?,
        on_timeout: if request.auto_pause == Some(true) {
            OnTimeout::Pause
        } else {
            OnTimeout::Kill
        },
        env,
        metadata,
        ports: PortAccess::default(),
        e2b: E2bSettings::default(),
        identity,
        time: TimeWish {
            from_point: None,
            auto_resume: request.auto_resume.is_some_and(|wish| wish.enabled),
            pause_files_only: request.auto_pause_memory == Some(false),
            idle_seconds: None,
            paused_limit_seconds: None,
            points: None,
        },
        idempotency_key: idempotency_key(headers)?,
        by: None,
    })
}

/// E2B's SDKs have no word for it, so the metadata does.
fn isolation(metadata: &BTreeMap<String, String>) -> Result<IsolationWish> {
    let Some(level) = metadata.get(ISOLATION_KEY) else {
        return Ok(IsolationWish::Auto);
    };
    level
        .parse()
        .map_err(|error: Error| error.context(format!("metadata \"{ISOLATION_KEY}\"")))
}

/// What can not be fulfilled is refused, not forgotten.
fn refuse_what_is_missing(request: &NewSandbox) -> Result<()> {
    let refused = |field: &str, what: &str| Err(not_yet(what).field(field));
    if request.auto_pause_memory.is_some() && request.auto_pause != Some(true) {
        return Err(Error::invalid(
            "autoPauseMemory",
            "autoPauseMemory needs autoPause",
        ));
    }
    let wakes = request
        .auto_resume
        .as_ref()
        .is_some_and(|wish| wish.enabled);
    if request.auto_pause_memory == Some(false) && wakes {
        return Err(Error::invalid(
            "autoPauseMemory",
            "a sandbox that pauses without its memory can not resume by itself",
        ));
    }
    if request
        .volume_mounts
        .as_ref()
        .is_some_and(|mounts| !mounts.is_empty())
    {
        return refused("volumeMounts", "mounting volumes");
    }
    match request.unknown.iter().find(|(_, value)| !value.is_null()) {
        None => Ok(()),
        Some((name, _)) => {
            let field: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
            Err(not_yet(&format!("the setting {}", shown(&field)))
                .field(field)
                .hint("what is not understood is not ignored; leave it out"))
        }
    }
}

pub(crate) async fn get(
    State(state): State<Shared>,
    id: E2bId,
) -> Result<Json<DetailBody>, E2bError> {
    let sandbox = state.keeper.get(&id).await?;
    if matches!(sandbox.state, BoxState::Stopping | BoxState::Gone) {
        return Err(Error::sandbox_not_found(&sandbox.id).into());
    }
    let network = state.keeper.network(&id).await?;
    Ok(Json(DetailBody::new(&sandbox, &network.policy, &state)))
}

pub(crate) async fn kill(
    State(state): State<Shared>,
    caller: Caller,
    id: E2bId,
) -> Result<StatusCode, E2bError> {
    let by = Some(caller.0);
    state.keeper.kill_for(&id, GoneReason::Killed, by).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// May shorten; a negative time is over at once.
pub(crate) async fn set_timeout(
    State(state): State<Shared>,
    id: E2bId,
    E2bJson(request): E2bJson<TimeoutBody>,
) -> Result<StatusCode, E2bError> {
    let expiry = seconds(request.timeout)?;
    state.keeper.set_expiry(&id, expiry).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Never shortens.
pub(crate) async fn refresh(
    State(state): State<Shared>,
    id: E2bId,
    E2bJsonOrNothing(request): E2bJsonOrNothing<RefreshBody>,
) -> Result<StatusCode, E2bError> {
    let expiry = seconds(request.duration.unwrap_or(LEAST_REFRESH).max(LEAST_REFRESH))?;
    state.keeper.extend(&id, expiry).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(crate) async fn connect_v1(
    State(state): State<Shared>,
    id: E2bId,
    E2bJsonOrNothing(request): E2bJsonOrNothing<ConnectBody>,
) -> Result<Created, E2bError> {
    let timeout = request
        .timeout
        .ok_or_else(|| Error::invalid("timeout", "timeout is missing"))?;
    connect_any(&state, &id, timeout, request.memory).await
}

pub(crate) async fn connect_v2(
    State(state): State<Shared>,
    id: E2bId,
    E2bJsonOrNothing(request): E2bJsonOrNothing<ConnectBody>,
) -> Result<Created, E2bError> {
    let timeout = request.timeout.unwrap_or(DEFAULT_TIMEOUT_V2);
    connect_any(&state, &id, timeout, request.memory).await
}

/// A running box answers 200, and its end only ever moves later. A paused one is woken and
/// answers 201.
async fn connect_any(
    state: &Shared,
    id: &SandboxId,
    timeout: i64,
    memory: Option<bool>,
) -> Result<Created, E2bError> {
    let expiry = seconds(timeout)?;
    let found = state.keeper.get(id).await?;
    match found.state {
        BoxState::Running => {}
        BoxState::Paused => {
            match state
                .keeper
                .resume(id, Some(expiry), memory != Some(false))
                .await
            {
                Ok(sandbox) => {
                    return Ok((StatusCode::CREATED, Json(SandboxBody::new(&sandbox, state))));
                }
                // Somebody else woke it meanwhile.
                Err(error) if error.code == Code::Conflict => {
                    if state.keeper.get(id).await?.state != BoxState::Running {
                        return Err(error.into());
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        BoxState::Stopping | BoxState::Gone => return Err(Error::sandbox_not_found(id).into()),
        other => {
            return Err(
                Error::conflict(format!("sandbox \"{id}\" is {other}, try again soon")).into(),
            );
        }
    }
    let sandbox = state.keeper.extend(id, expiry).await?;
    Ok((StatusCode::OK, Json(SandboxBody::new(&sandbox, state))))
}

pub(super) fn seconds(given: i64) -> Result<Expiry> {
    expiry_after("timeout", u64::try_from(given).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extract::parse_json;
    use std::time::Duration;

    fn read(json: &str) -> Result<CreateSandbox> {
        let request = parse_json::<NewSandbox>(json.as_bytes())?;
        checked(request, &HeaderMap::new(), DEFAULT_TIMEOUT_V2)
    }

    #[test]
    fn what_the_sdks_send_is_taken() {
        let old = r#"{"templateID":"base","timeout":120,"secure":true,
            "allow_internet_access":true,"metadata":{},"envVars":{}}"#;
        let request = read(old).unwrap();
        assert_eq!(request.expiry, Expiry::After(Duration::from_secs(120)));
        let new = r#"{"templateID":"team/Base:default","autoPause":false,
            "autoResume":{"enabled":false},"network":{"denyOut":["0.0.0.0/0"]},
            "metadata":{"k":"v"},"envVars":{"A":"1"},"mcp":null,"volumeMounts":[]}"#;
        let request = read(new).unwrap();
        assert_eq!(request.template.as_str(), "base");
        assert_eq!(request.expiry, Expiry::After(Duration::from_secs(300)));
        assert_eq!(request.env["A"], "1");
    }

    #[test]
    fn what_can_not_be_fulfilled_is_refused_in_words() {
        for (setting, field) in [
            (
                r#""volumeMounts":[{"name":"v","path":"/m"}]"#,
                "volumeMounts",
            ),
            (r#""firewall":"strict""#, "firewall"),
        ] {
            let error = read(&format!("{{\"templateID\":\"base\",{setting}}}")).unwrap_err();
            assert_eq!(error.code, Code::NotImplemented, "{setting}");
            assert_eq!(error.field.as_deref(), Some(field), "{setting}");
        }
    }

    #[test]
    fn pausing_and_waking_are_understood() {
        let plain = read(r#"{"templateID":"base","autoPause":false}"#).unwrap();
        assert_eq!(plain.on_timeout, OnTimeout::Kill);
        let wish = r#"{"templateID":"base","autoPause":true,"autoResume":{"enabled":true}}"#;
        let request = read(wish).unwrap();
        assert_eq!(request.on_timeout, OnTimeout::Pause);
        assert!(request.time.auto_resume && !request.time.pause_files_only);
        let both = r#"{"templateID":"base","autoPause":true,"autoPauseMemory":false,
            "autoResume":{"enabled":true}}"#;
        assert_eq!(read(both).unwrap_err().code, Code::InvalidArgument);
    }

    #[test]
    fn wrong_values_are_named() {
        for (json, field) in [
            ("{}", "templateID"),
            (r#"{"templateID":"base","timeout":0}"#, "timeout"),
            (r#"{"templateID":"base","timeout":-5}"#, "timeout"),
            (
                r#"{"templateID":"base","autoPauseMemory":false}"#,
                "autoPauseMemory",
            ),
            (r#"{"templateID":"base","envVars":{"A=":"x"}}"#, "envVars"),
        ] {
            let error = read(json).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument, "{json}");
            assert_eq!(error.field.as_deref(), Some(field), "{json}");
        }
        let error = read(r#"{"templateID":"base","timeout":99999999999}"#).unwrap_err();
        assert!(error.message.contains("limit"), "{error}");
    }

    #[test]
    fn a_negative_time_is_over_at_once() {
        assert_eq!(seconds(-7).unwrap(), Expiry::After(Duration::ZERO));
    }
}
