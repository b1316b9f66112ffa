//! What a request says about the network, as a policy.

use sandkeep_keeper::EgressWish;
use sandkeep_moat::{
    Profiles,
    policy::{AddressGuard, Binding, Decision, Policy, Source, Target},
};
use sandkeep_model::{Error, Result};
use serde_json::Value;

use crate::{secrets, state::Shared};

const CREDENTIALS: &str = "network.credentials";

/// A policy with credentials beside it, each of which may be left out. `now` is the policy that
/// holds when none is given.
pub(crate) fn egress(state: &Shared, wish: &Value, now: &Policy) -> Result<EgressWish> {
    let (policy, credentials) = parts(&state.profiles, wish)?;
    if let Some(list) = &credentials {
        let guard = state.keeper.moat().map(|moat| moat.guard().clone());
        let reach = policy.as_ref().unwrap_or(now);
        for (at, binding) in list.iter().enumerate() {
            check(state, binding, reach, &guard.clone().unwrap_or_default())
                .map_err(|error| named(error, at))?;
        }
    }
    Ok(EgressWish {
        policy,
        credentials,
    })
}

fn named(error: Error, at: usize) -> Error {
    let inner = error.field.clone().unwrap_or_default();
    error.field(format!("{CREDENTIALS}[{at}].{inner}"))
}

/// A credential that could never be used is a mistake somebody wants to know of.
fn check(state: &Shared, binding: &Binding, reach: &Policy, guard: &AddressGuard) -> Result<()> {
    if let Source::Secret(name) = &binding.source
        && secrets::store(state)?.get_info(name).is_err()
    {
        return Err(
            Error::invalid("secret", format!("there is no secret {name}")).hint(format!(
                "store it with `sandkeep secret set {name}` or POST /v1/secrets"
            )),
        );
    }
    let target = Target {
        host: &binding.host,
        port: binding.port,
        http: None,
    };
    match reach.decide(&target, guard) {
        Decision::Allow { .. } => Ok(()),
        Decision::Deny(refusal) => {
            let why = refusal.why;
            Err(
                Error::invalid("host", format!("a credential opens nothing, and {why}")).hint(
                    format!("add \"{}:{}\" to network.allow", binding.host, binding.port),
                ),
            )
        }
    }
}

/// What stands there, not yet checked against anything.
fn parts(profiles: &Profiles, wish: &Value) -> Result<(Option<Policy>, Option<Vec<Binding>>)> {
    let mut wish = wish.clone();
    let credentials = wish
        .as_object_mut()
        .and_then(|wish| wish.remove("credentials"));
    let credentials = match credentials {
        None => return Ok((Some(whole_policy(profiles, &wish)?), None)),
        Some(Value::Array(list)) => Binding::list_from_json(&list)?,
        Some(_) => {
            return Err(Error::invalid(CREDENTIALS, "credentials are a list")
                .hint("[{\"secret\": NAME, \"host\": HOST}]"));
        }
    };
    let alone = wish.as_object().is_some_and(serde_json::Map::is_empty);
    let policy = (!alone)
        .then(|| whole_policy(profiles, &wish))
        .transpose()?;
    Ok((policy, Some(credentials)))
}

/// A policy document, or `{"profile": NAME}` or `NAME@VERSION`. Credentials beside it are read, and left aside.
pub(crate) fn policy(profiles: &Profiles, wish: &Value) -> Result<Policy> {
    Ok(parts(profiles, wish)?.0.unwrap_or_default())
}

fn whole_policy(profiles: &Profiles, wish: &Value) -> Result<Policy> {
    let Some(named) = wish.get("profile") else {
        return Policy::from_json(wish);
    };
    if wish.as_object().is_some_and(|wish| wish.len() > 1) {
        return Err(Error::invalid(
            "network.profile",
            "a profile stands alone: it is a whole policy",
        )
        .hint("take the policy of the profile from GET /v1/profiles and add to it"));
    }
    let name = named
        .as_str()
        .ok_or_else(|| Error::invalid("network.profile", "the profile must be a text"))?;
    profiles.policy(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_document_or_a_name() {
        assert_eq!(
            policy(&Profiles::default(), &json!({"profile": "open"})).unwrap(),
            Policy::open()
        );
        assert_eq!(
            policy(&Profiles::default(), &json!({})).unwrap(),
            Policy::air_gapped()
        );
        let policy = policy(&Profiles::default(), &json!({"allow": ["example.org"]})).unwrap();
        assert_eq!(policy.allow.len(), 1);
    }

    #[test]
    fn credentials_stand_beside_a_policy_or_alone() {
        let one = json!([{"secret": "github", "host": "api.example.org"}]);
        let (policy, found) = parts(
            &Profiles::default(),
            &json!({"profile": "open", "credentials": one}),
        )
        .unwrap();
        assert_eq!(policy, Some(Policy::open()));
        assert_eq!(found.unwrap().len(), 1);
        let (policy, found) = parts(&Profiles::default(), &json!({"credentials": []})).unwrap();
        assert_eq!((policy, found), (None, Some(Vec::new())));
        assert_eq!(
            parts(&Profiles::default(), &json!({})).unwrap(),
            (Some(Policy::air_gapped()), None)
        );
    }

    #[test]
    fn mistakes_name_the_field() {
        for (wish, field) in [
            (json!({"profile": "closed"}), "network.profile"),
            (json!({"profile": 1}), "network.profile"),
            (json!({"profile": "open", "deny": []}), "network.profile"),
            (json!("open"), "network"),
            (json!({"allow": ["*.org"]}), "network.allow[0].to"),
            (json!({"credentials": {}}), "network.credentials"),
            (
                json!({"credentials": [{"secret": "a", "host": "*.example.org"}]}),
                "network.credentials[0].host",
            ),
        ] {
            let error = policy(&Profiles::default(), &wish).unwrap_err();
            assert_eq!(error.field.as_deref(), Some(field), "{wish}");
        }
    }
}
