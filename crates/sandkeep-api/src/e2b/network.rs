//! E2B's `network` object and `allow_internet_access`, as a policy.
//!
//! What opens or closes ways out is fulfilled, and headers are set. Everything that rewrites or
//! protects something else is refused: a security setting is never dropped.

use axum::extract::State;
use http::StatusCode;
use sandkeep_keeper::EgressWish;
use sandkeep_moat::policy::{E2bNetwork, Policy, Standing};
use sandkeep_model::{Error, HostMask, NamedTokens, PortAccess, Result, Sandbox};
use serde_json::{Map, Value, json};

use super::{
    absent::not_yet,
    transform::{self, HostHeader},
};
use crate::{
    caller::Caller,
    error::E2bError,
    extract::{E2bId, E2bJson},
    state::Shared,
};

/// What a request says of the network of a box.
pub(crate) struct Asked {
    /// `None`: the request says nothing, the operator decides.
    pub policy: Option<Policy>,
    headers: Vec<HostHeader>,
    /// Who may reach its ports.
    pub ports: PortAccess,
    /// The host that its programs are asked by.
    pub mask: Option<HostMask>,
}

/// What E2B's clients get who say nothing: their `get_host` knows no token.
const E2B_PORTS: PortAccess = PortAccess::Public;

impl Asked {
    /// With the values of the headers stored. `tokens` are those the box may name in headers.
    pub(crate) async fn wish(self, state: &Shared, tokens: &NamedTokens) -> Result<EgressWish> {
        let credentials = transform::credentials(state, self.headers, tokens).await?;
        Ok(EgressWish {
            policy: self.policy,
            credentials: Some(credentials),
        })
    }
}

/// For a create. SDKs up to 2.45 send `allow_internet_access: true` with every one, later ones leave
/// it out: it says nothing here, so that a plain create reaches the same with each of them.
pub(crate) fn asked_of_create(
    network: Option<&Map<String, Value>>,
    allow_internet_access: Option<bool>,
) -> Result<Asked> {
    asked(network, allow_internet_access.filter(|access| !access))
}

pub(crate) fn asked(
    network: Option<&Map<String, Value>>,
    allow_internet_access: Option<bool>,
) -> Result<Asked> {
    let Some(network) = network else {
        return Ok(Asked {
            policy: Policy::from_e2b(None, allow_internet_access)?,
            headers: Vec::new(),
            ports: E2B_PORTS,
            mask: None,
        });
    };
    let (mut ports, mut mask) = (E2B_PORTS, None);
    let mut egress = E2bNetwork::default();
    for (name, value) in network {
        let field = format!("network.{name}");
        match name.as_str() {
            _ if value.is_null() => {}
            "denyOut" => egress.deny_out = Some(texts(&field, value)?),
            "allowOut" => egress.allow_out = Some(texts(&field, value)?),
            "rules" => {
                egress.rules = Some(serde_json::from_value(value.clone()).map_err(|error| {
                    Error::invalid(&field, format!("{field} can not be read: {error}"))
                })?);
            }
            "dnsServers" | "httpsPorts" | "egressProxy" if is_empty(value) => {}
            "allowPublicTraffic" => {
                ports = match value {
                    Value::Bool(true) => PortAccess::Public,
                    Value::Bool(false) => PortAccess::Private,
                    _ => {
                        return Err(Error::invalid(
                            &field,
                            format!("{field} must be true or false"),
                        ));
                    }
                }
            }
            "maskRequestHost" => {
                let host = serde_json::from_value(value.clone());
                mask = Some(host.map_err(|error| {
                    Error::invalid(&field, format!("{field} can not be read: {error}"))
                        .hint("write a host with or without a port, e.g. localhost:${PORT}")
                })?);
            }
            _ => {
                return Err(not_yet(&format!("the network setting `{name}`"))
                    .field(field)
                    .hint(
                        "leave it out; allowOut, denyOut, rules and allow_internet_access can be used",
                    ));
            }
        }
    }
    Ok(Asked {
        policy: Policy::from_e2b(Some(&egress), allow_internet_access)?,
        headers: transform::headers(egress.rules.unwrap_or_default())?,
        ports,
        mask,
    })
}

fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty)
}

fn texts(field: &str, value: &Value) -> Result<Vec<String>> {
    serde_json::from_value(value.clone()).map_err(|_| {
        Error::invalid(field, format!("{field} must be a list of texts"))
            .hint("e.g. [\"0.0.0.0/0\"]")
    })
}

/// What the SDKs show of a sandbox's network. Ports and HTTP rules of its policy have no words there.
pub(crate) fn of(sandbox: &Sandbox, policy: &Policy) -> Value {
    let mut shown = shown(policy);
    shown["allowPublicTraffic"] = (sandbox.ports == PortAccess::Public).into();
    if let Some(mask) = &sandbox.e2b.mask_request_host {
        shown["maskRequestHost"] = mask.as_str().into();
    }
    shown
}

fn shown(policy: &Policy) -> Value {
    let allow: Vec<String> = policy
        .allow
        .iter()
        .map(|rule| rule.to.to_string())
        .collect();
    let mut deny: Vec<String> = policy.deny.iter().map(ToString::to_string).collect();
    if policy.standing == Standing::Deny {
        deny.insert(0, "0.0.0.0/0".to_owned());
    }
    json!({"allowOut": allow, "denyOut": deny})
}

/// Whether there is a way out; in between has no answer.
pub(crate) fn internet_access(policy: &Policy) -> Option<bool> {
    match policy.standing {
        Standing::Open => Some(true),
        Standing::Deny => policy.allow.is_empty().then_some(false),
    }
}

/// Replaces the whole egress configuration; what is left out is the operator's default.
pub(crate) async fn put(
    State(state): State<Shared>,
    caller: Caller,
    id: E2bId,
    E2bJson(mut body): E2bJson<Map<String, Value>>,
) -> Result<StatusCode, E2bError> {
    let sandbox = state.keeper.get(&id).await?;
    let access = match body.remove("allow_internet_access") {
        None | Some(Value::Null) => None,
        Some(Value::Bool(access)) => Some(access),
        Some(_) => {
            return Err(Error::invalid(
                "allow_internet_access",
                "allow_internet_access must be true or false",
            )
            .into());
        }
    };
    let mut asked = asked(Some(&body), access)?;
    // What a request leaves out it does not mean to change here.
    for (field, is_asked, is_so) in [
        (
            "allowPublicTraffic",
            body.get("allowPublicTraffic")
                .is_some_and(Value::is_boolean),
            asked.ports == sandbox.ports,
        ),
        (
            "maskRequestHost",
            asked.mask.is_some(),
            asked.mask == sandbox.e2b.mask_request_host,
        ),
    ] {
        if is_asked && !is_so {
            let what =
                format!("{field} is set when a sandbox is made, and cannot be changed later");
            return Err(Error::invalid(field, what)
                .hint("leave it out, or make a new sandbox with it")
                .into());
        }
    }
    asked
        .policy
        .get_or_insert_with(|| state.keeper.standing_policy().clone());
    let wish = asked.wish(&state, &sandbox.identity.tokens).await?;
    state.keeper.set_network(&id, wish, Some(caller.0)).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandkeep_model::Code;
    use serde_json::json;

    fn read(network: &Value) -> Result<Option<Policy>> {
        Ok(asked(network.as_object(), None)?.policy)
    }

    #[test]
    fn ways_out_are_opened_and_closed() {
        let closed = read(&json!({"denyOut": ["0.0.0.0/0"]})).unwrap().unwrap();
        assert_eq!(closed, Policy::air_gapped());
        assert_eq!(internet_access(&closed), Some(false));
        let some = json!({"allowOut": ["*.example.org", "192.0.2.1"], "denyOut": ["0.0.0.0/0"]});
        let some = read(&some).unwrap().unwrap();
        assert_eq!(internet_access(&some), None);
        assert_eq!(
            shown(&some),
            json!({"allowOut": ["*.example.org", "192.0.2.1"], "denyOut": ["0.0.0.0/0"]})
        );
        assert_eq!(
            asked(None, Some(true)).unwrap().policy,
            Some(Policy::open())
        );
        assert_eq!(internet_access(&Policy::open()), Some(true));
        for nothing in [
            json!({}),
            json!({"allowOut": [], "rules": {}, "allowPublicTraffic": true}),
            json!({"egressProxy": null, "maskRequestHost": null}),
        ] {
            assert_eq!(read(&nothing).unwrap(), None, "{nothing}");
        }
    }

    #[test]
    fn ports_are_public_unless_the_request_closes_them() {
        let of = |network: Value| asked(network.as_object(), None).map(|asked| asked.ports);
        assert_eq!(asked(None, None).unwrap().ports, PortAccess::Public);
        assert_eq!(of(json!({})).unwrap(), PortAccess::Public);
        let closed = of(json!({"allowPublicTraffic": false})).unwrap();
        assert_eq!(closed, PortAccess::Private);
        assert!(of(json!({"allowPublicTraffic": "no"})).is_err());
    }

    #[test]
    fn no_security_setting_is_dropped() {
        for (name, value) in [
            ("httpsPorts", json!([443])),
            ("egressProxy", json!({"address": "p:1"})),
            ("dnsServers", json!(["1.1.1.1"])),
            ("somethingNew", json!(true)),
        ] {
            let error = read(&json!({ name: value })).unwrap_err();
            assert_eq!(error.code, Code::NotImplemented, "{name}");
            assert_eq!(error.field, Some(format!("network.{name}")));
            assert!(error.message.contains(name));
        }
    }

    #[test]
    fn a_malformed_list_is_an_error_not_a_pass() {
        for bad in [
            json!({"denyOut": "0.0.0.0/0"}),
            json!({"denyOut": ["example.test"]}),
            json!({"denyOut": ["1.1.1.1/33"]}),
            json!({"denyOut": [1]}),
            json!({"allowOut": ["example.test"]}),
            json!({"rules": []}),
        ] {
            let error = read(&bad).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument, "{bad}");
        }
    }
}
