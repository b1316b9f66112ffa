//! `rules[].transform.headers`: headers that are set at the edge. Their values are credentials
//! more often than not, so they are kept as secrets are, and the box never sees them.

use std::collections::BTreeMap;

use sandkeep_moat::policy::{Binding, E2bRule, Place};
use sandkeep_model::{Audience, Error, NamedTokens, Result, Secret, SecretName};
use serde_json::json;

use crate::{secrets, state::Shared};

const FIELD: &str = "network.rules";
/// `${e2b.identity.tokens.NAME}` in a value stands for a token of the box.
const TOKEN: &str = "${e2b.identity.tokens.";
const ANY_PLACEHOLDER: &str = "${e2b.";

/// A header for one host.
#[derive(Debug)]
pub(crate) struct HostHeader {
    host: String,
    name: String,
    value: Secret,
}

/// What the rules say, checked as far as it can be without storing anything.
pub(crate) fn headers(rules: BTreeMap<String, Vec<E2bRule>>) -> Result<Vec<HostHeader>> {
    let mut found = Vec::new();
    for (host, list) in rules {
        let transforms = list.into_iter().filter_map(|rule| rule.transform?.headers);
        for (name, value) in transforms.flatten() {
            // Any name will do to see whether host and header can be meant.
            binding(json!({"secret": "any"}), &host, &name, "", "")?;
            found.push(HostHeader {
                host: host.clone(),
                name,
                value: Secret::new(value),
            });
        }
    }
    Ok(found)
}

/// Stores the values and says where they go.
pub(crate) async fn credentials(
    state: &Shared,
    headers: Vec<HostHeader>,
    tokens: &NamedTokens,
) -> Result<Vec<Binding>> {
    let mut bindings = Vec::with_capacity(headers.len());
    for HostHeader { host, name, value } in headers {
        let made = match token_in(&value, tokens)? {
            Some((audience, before, after)) => {
                let source = json!({"token": {"audience": audience}});
                binding(source, &host, &name, before, after)?
            }
            None => {
                let stored = keep(state, value).await?;
                binding(json!({"secret": stored}), &host, &name, "", "")?
            }
        };
        bindings.push(made);
    }
    Ok(bindings)
}

async fn keep(state: &Shared, value: Secret) -> Result<SecretName> {
    let store = secrets::store(state)?;
    secrets::work(move || store.keep_inline(&value)).await
}

/// The token a value names, and what stands before and after it.
fn token_in<'a>(
    value: &'a Secret,
    tokens: &NamedTokens,
) -> Result<Option<(Audience, &'a str, &'a str)>> {
    let text = value.expose();
    if !text.contains(ANY_PLACEHOLDER) {
        return Ok(None);
    }
    let bad = |why: &str| {
        Error::invalid(FIELD, why.to_owned())
            .hint("write ${e2b.identity.tokens.NAME} once, with a NAME that iam.tokens has")
    };
    let (before, rest) = text
        .split_once(TOKEN)
        .ok_or_else(|| bad("a header names something of the sandbox that is not known"))?;
    let (name, after) = rest
        .split_once('}')
        .ok_or_else(|| bad("the placeholder of a token is not closed"))?;
    if [before, after].iter().any(|part| part.contains("${")) {
        return Err(bad("a header holds one placeholder at most"));
    }
    let audience = tokens
        .audience(name)
        .ok_or_else(|| bad("a header names a token the sandbox does not have"))?;
    Ok(Some((audience.clone(), before, after)))
}

fn binding(
    mut source: serde_json::Value,
    host: &str,
    name: &str,
    before: &str,
    after: &str,
) -> Result<Binding> {
    source["host"] = host.into();
    source["header"] = json!({"name": name, "format": format!("{before}{{}}{after}")});
    let made = Binding::from_json(&source).map_err(|error| error.field(FIELD))?;
    debug_assert!(matches!(made.place, Place::Header { .. }));
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(host: &str, name: &str, value: &str) -> BTreeMap<String, Vec<E2bRule>> {
        let rule = json!([{"transform": {"headers": {name: value}}}]);
        [(host.to_owned(), serde_json::from_value(rule).unwrap())].into()
    }

    #[test]
    fn headers_are_read_and_their_values_not_shown() {
        let found = headers(rules("api.example.org", "X-Key", "canary")).unwrap();
        assert_eq!(found.len(), 1);
        assert!(!format!("{found:?}").contains("canary"));
        assert!(headers(BTreeMap::new()).unwrap().is_empty());
    }

    #[test]
    fn what_can_not_be_meant_is_refused() {
        for (host, name) in [
            ("*.example.org", "X-Key"),
            ("192.0.2.1", "X-Key"),
            ("api.example.org", "Host"),
            ("api.example.org", "Content-Length"),
            ("api.example.org", "a b"),
        ] {
            let error = headers(rules(host, name, "canary")).unwrap_err();
            assert_eq!(error.field.as_deref(), Some(FIELD), "{host} {name}");
            assert!(!error.to_string().contains("canary"));
        }
    }

    #[test]
    fn a_value_may_name_a_token() {
        let tokens: NamedTokens =
            serde_json::from_value(json!({"vault": "https://vault.test"})).unwrap();
        let read = |text: &str| {
            token_in(&Secret::new(text), &tokens).map(|found| {
                found.map(|(audience, before, after)| {
                    (audience.to_string(), before.to_owned(), after.to_owned())
                })
            })
        };
        assert_eq!(read("Bearer x").unwrap(), None);
        let vault = "https://vault.test".to_owned();
        assert_eq!(
            read("Bearer ${e2b.identity.tokens.vault}").unwrap(),
            Some((vault, "Bearer ".to_owned(), String::new()))
        );
        for bad in [
            "${e2b.identity.tokens.other}",
            "${e2b.identity.tokens.vault",
            "${e2b.sandbox.id}",
            "${e2b.identity.tokens.vault}${e2b.identity.tokens.vault}",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
