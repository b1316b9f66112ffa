//! E2B's `iam.tokens`: tokens of the box that have a name. The box asks its metadata service for
//! them, and headers in `network.rules` may hold them.

use std::collections::BTreeMap;

use sandkeep_model::{Audience, Error, NamedTokens, Result, TokenName};
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Iam {
    #[serde(default)]
    tokens: BTreeMap<TokenName, Token>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Token {
    audience: Audience,
    #[serde(rename = "tokenType")]
    kind: Option<String>,
}

/// Ours are what that standard describes: signed, for one audience, with a SPIFFE id.
const KIND: &str = "JWT-SVID";

pub(crate) fn tokens(iam: Option<&Value>) -> Result<NamedTokens> {
    let Some(value) = iam.filter(|iam| !iam.is_null()) else {
        return Ok(NamedTokens::default());
    };
    if !value.is_object() {
        return Err(Error::invalid("iam", "iam must be an object"));
    }
    let iam = Iam::deserialize(value)
        .map_err(|error| Error::invalid("iam", format!("iam can not be read: {error}")))?;
    let other = iam
        .tokens
        .values()
        .any(|token| token.kind.as_deref().is_some_and(|kind| kind != KIND));
    if other {
        return Err(
            Error::invalid("iam.tokens", "this kind of token can not be made")
                .hint(format!("leave tokenType out, or write {KIND}")),
        );
    }
    let audiences = iam
        .tokens
        .into_iter()
        .map(|(name, token)| (name, token.audience));
    NamedTokens::try_from(audiences.collect::<BTreeMap<_, _>>())
        .map_err(|error| error.field("iam.tokens"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tokens_are_read() {
        assert!(tokens(None).unwrap().is_empty());
        assert!(tokens(Some(&json!({}))).unwrap().is_empty());
        let read = tokens(Some(&json!({"tokens": {
            "vault": {"audience": "https://vault.test", "tokenType": "JWT-SVID"},
            "git": {"audience": "git"},
        }})))
        .unwrap();
        assert_eq!(read.audience("git").unwrap().as_str(), "git");
        assert!(read.audience("vault").is_some());
    }

    #[test]
    fn what_can_not_be_given_is_refused() {
        let many: serde_json::Map<_, _> = (0..6)
            .map(|n| (n.to_string(), json!({"audience": "a"})))
            .collect();
        for bad in [
            json!({"tokens": many}),
            json!({"tokens": {"a": {"audience": "x", "tokenType": "X509-SVID"}}}),
            json!({"tokens": {"a": {"audience": ""}}}),
            json!({"tokens": {"a": {}}}),
            json!({"tokens": {"a b": {"audience": "x"}}}),
            json!({"roles": []}),
            json!([]),
        ] {
            let error = tokens(Some(&bad)).unwrap_err();
            assert!(error.field.unwrap().starts_with("iam"), "{bad}");
        }
    }
}
