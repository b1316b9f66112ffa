//! What a box may reach, what it was refused, and what it moved.

use axum::{Json, extract::State};
use sandkeep_moat::{
    Denial, Traffic,
    policy::{AddressGuard, Explanation, explain},
};
use sandkeep_model::{Error, Result, SandboxId, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::{
    caller::Caller,
    error::NativeError,
    extract::{NativeId, NativeJson},
    network::{egress, policy},
    state::Shared,
};

/// What a sandbox may reach.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/network", tag = "network", operation_id = "get_policy",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, body = Object, description = "The policy document")))]
pub(crate) async fn get(
    State(state): State<Shared>,
    id: NativeId,
) -> Result<Json<Value>, NativeError> {
    Ok(Json(state.keeper.network(&id).await?.to_json()))
}

/// Changes what a sandbox may reach, as a whole. Holds within a second; open connections that
/// no longer fit are cut. `credentials` that are left out stay, an empty list removes them;
/// alone, they leave the policy as it is.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/network", tag = "network", operation_id = "set_policy",
    params(("id" = String, Path, description = "The sandbox")),
    request_body(content = Object, description = "A policy document, or `{\"profile\": NAME}`; and `credentials`"),
    responses((status = 200, body = Object, description = "The policy document as it holds now")))]
pub(crate) async fn put(
    State(state): State<Shared>,
    caller: Caller,
    id: NativeId,
    NativeJson(wish): NativeJson<Value>,
) -> Result<Json<Value>, NativeError> {
    let now = state.keeper.network(&id).await?;
    let wish = egress(&state, &wish, &now.policy)?;
    let held = state.keeper.set_network(&id, wish, Some(caller.0)).await?;
    Ok(Json(held.to_json()))
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DenialsView {
    /// Newest first; of very many different ones the oldest are forgotten.
    pub denials: Vec<DenialView>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DenialView {
    /// `dns`, `tcp`, `tls` or `http`: how it was tried.
    #[schema(value_type = String, example = "dns")]
    pub via: sandkeep_moat::Via,
    /// A name or an address, as far as it was known.
    pub host: String,
    /// 0 for a lookup.
    pub port: u16,
    /// The kind of it, for programs.
    #[schema(value_type = String, example = "no_rule")]
    pub reason: sandkeep_moat::policy::Reason,
    /// Where its address is the reason: the range it lies in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<String>,
    /// The request, where the connection was let through and the request was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<AskedView>,
    pub why: String,
    pub hint: String,
    #[schema(value_type = String, format = DateTime)]
    pub first: Timestamp,
    #[schema(value_type = String, format = DateTime)]
    pub last: Timestamp,
    pub count: u64,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AskedView {
    pub method: String,
    /// Without the query.
    pub path: String,
}

impl From<Denial> for DenialView {
    fn from(denial: Denial) -> Self {
        Self {
            via: denial.via,
            host: denial.host,
            port: denial.port,
            reason: denial.reason,
            range: denial.range.map(|range| range.to_string()),
            request: denial.request.map(|asked| AskedView {
                method: asked.method,
                path: asked.path,
            }),
            why: denial.why,
            hint: denial.hint,
            first: denial.first,
            last: denial.last,
            count: denial.count,
        }
    }
}

/// What a sandbox was refused, why, and what to do about it.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/network/denials", tag = "network",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, body = DenialsView)))]
pub(crate) async fn denials(
    State(state): State<Shared>,
    id: NativeId,
) -> Result<Json<DenialsView>, NativeError> {
    let found = state.keeper.denials(&id).await?;
    Ok(Json(DenialsView {
        denials: found.into_iter().map(Into::into).collect(),
    }))
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DeadRulesView {
    pub rules: Vec<DeadRuleView>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DeadRuleView {
    /// As it stands in the policy.
    pub rule: String,
    #[schema(value_type = String, example = "closed_range")]
    pub reason: sandkeep_moat::policy::Reason,
    pub why: String,
    pub hint: String,
}

/// The rules of a sandbox that can never let anything through, because every address they name
/// is closed here.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/network/dead-rules", tag = "network",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, body = DeadRulesView)))]
pub(crate) async fn dead_rules(
    State(state): State<Shared>,
    id: NativeId,
) -> Result<Json<DeadRulesView>, NativeError> {
    let held = state.keeper.network(&id).await?;
    let found = match state.keeper.moat() {
        Some(moat) => held.policy.dead_rules(moat.guard()),
        None => held.policy.dead_rules(&AddressGuard::default()),
    };
    let rules = found.into_iter().map(|(rule, refusal)| DeadRuleView {
        rule,
        reason: refusal.reason,
        why: refusal.why,
        hint: refusal.hint,
    });
    Ok(Json(DeadRulesView {
        rules: rules.collect(),
    }))
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TrafficView {
    /// From the sandbox to the outside, since the server attached it.
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub connections: u64,
    pub open_connections: u64,
    pub denied: u64,
    pub dns_queries: u64,
    pub dns_blocked: u64,
}

impl From<Traffic> for TrafficView {
    fn from(traffic: Traffic) -> Self {
        Self {
            bytes_sent: traffic.bytes_sent,
            bytes_received: traffic.bytes_received,
            connections: traffic.connections,
            open_connections: traffic.open_connections,
            denied: traffic.denied,
            dns_queries: traffic.dns_queries,
            dns_blocked: traffic.dns_blocked,
        }
    }
}

/// What a sandbox moved over the network.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/network/traffic", tag = "network",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, body = TrafficView)))]
pub(crate) async fn traffic(
    State(state): State<Shared>,
    id: NativeId,
) -> Result<Json<TrafficView>, NativeError> {
    Ok(Json(state.keeper.traffic(&id).await?.into()))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PolicyTest {
    /// A policy document or `{"profile": NAME}`; this or `sandbox_id`.
    #[schema(value_type = Option<Object>)]
    pub policy: Option<Value>,
    /// Test the policy of this sandbox.
    #[schema(value_type = Option<String>)]
    pub sandbox_id: Option<String>,
    /// `https://host/path` or `host:port`.
    pub url: String,
    /// `GET` when left out.
    pub method: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PolicyAnswer {
    pub allowed: bool,
    pub host: String,
    pub port: u16,
    /// The rule that lets it through.
    pub rule: Option<String>,
    /// The kind of a refusal, or of a lookup that failed.
    #[schema(value_type = Option<String>, example = "closed_range")]
    pub reason: Option<sandkeep_moat::policy::Reason>,
    pub why: Option<String>,
    pub hint: Option<String>,
}

impl From<Explanation> for PolicyAnswer {
    fn from(found: Explanation) -> Self {
        Self {
            allowed: found.allowed,
            host: found.host.to_string(),
            port: found.port,
            rule: found.rule,
            reason: found.reason,
            why: found.why,
            hint: found.hint,
        }
    }
}

/// Whether a URL would pass, and by which rule. Nothing is dialled.
///
/// A name that the rules allow is looked up: what it resolves to may lie in a closed range.
#[utoipa::path(post, path = "/v1/policy/test", tag = "network", operation_id = "test",
    request_body = PolicyTest,
    responses((status = 200, body = PolicyAnswer)))]
pub(crate) async fn test(
    State(state): State<Shared>,
    NativeJson(request): NativeJson<PolicyTest>,
) -> Result<Json<PolicyAnswer>, NativeError> {
    let tested = match (&request.policy, &request.sandbox_id) {
        (Some(wish), None) => policy(&state.profiles, wish)?,
        (None, Some(id)) => {
            let id: SandboxId = id
                .parse()
                .map_err(|_| Error::sandbox_not_found(&id.escape_debug()))?;
            state.keeper.network(&id).await?.policy.clone()
        }
        _ => {
            return Err(Error::invalid("policy", "give either policy or sandbox_id").into());
        }
    };
    let method = request.method.as_deref().unwrap_or("GET");
    let found = match state.keeper.moat() {
        Some(moat) => moat.explain(&tested, method, &request.url).await?,
        None => explain(&tested, &AddressGuard::default(), method, &request.url)?,
    };
    Ok(Json(found.into()))
}
