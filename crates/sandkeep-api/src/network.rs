//! What a request says about the network, as a policy.

use sandkeep_moat::policy::{Policy, Profile, Registries};
use sandkeep_model::{Error, Result};
use serde_json::Value;

/// A policy document, or `{"profile": NAME}`.
pub(crate) fn policy(wish: &Value) -> Result<Policy> {
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
    Ok(of_profile(name.parse()?))
}

/// Read anew each time: the operator may have changed a mirror.
pub(crate) fn of_profile(profile: Profile) -> Policy {
    match profile {
        Profile::PackageRegistries => Policy::of(profile, &Registries::of_this_host()),
        other => Policy::of(other, &Registries::default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_document_or_a_name() {
        assert_eq!(policy(&json!({"profile": "open"})).unwrap(), Policy::open());
        assert_eq!(policy(&json!({})).unwrap(), Policy::air_gapped());
        let policy = policy(&json!({"allow": ["example.org"]})).unwrap();
        assert_eq!(policy.allow.len(), 1);
    }

    #[test]
    fn mistakes_name_the_field() {
        for (wish, field) in [
            (json!({"profile": "closed"}), "network.profile"),
            (json!({"profile": 1}), "network.profile"),
            (json!({"profile": "open", "deny": []}), "network.profile"),
            (json!("open"), "network"),
            (json!({"allow": ["*.org"]}), "network.allow[0].to"),
        ] {
            let error = policy(&wish).unwrap_err();
            assert_eq!(error.field.as_deref(), Some(field), "{wish}");
        }
    }
}
