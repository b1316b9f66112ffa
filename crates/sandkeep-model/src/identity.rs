//! The words that go into a token of a box, bounded once and safe from then on.

use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, str::FromStr};

use crate::{Error, Result, SandboxId};

/// A text of bounded length whose characters are all visible ASCII.
fn check(field: &str, text: &str, longest: usize, allowed: impl Fn(char) -> bool) -> Result<()> {
    if !text.is_empty() && text.len() <= longest && text.chars().all(allowed) {
        return Ok(());
    }
    let shown: String = text.chars().filter(|c| !c.is_control()).take(64).collect();
    Err(Error::invalid(
        field,
        format!("\"{shown}\" can not be the {field} of a token"),
    )
    .hint(format!(
        "write 1 to {longest} visible ASCII characters without quotes and backslashes"
    )))
}

/// Texts of [`is_plain`] characters, as a regular expression.
pub const PLAIN_PATTERN: &str = "^[!#-\\[\\]-~]+$";

fn is_plain(c: char) -> bool {
    c.is_ascii_graphic() && c != '"' && c != '\\'
}

macro_rules! text_type {
    ($name:ident) => {
        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = Error;
            fn try_from(text: String) -> Result<Self> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(text: $name) -> Self {
                text.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

/// Whom a token is for. A token without one would be good everywhere.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Audience(String);

impl Audience {
    pub const LONGEST: usize = 512;
}

impl FromStr for Audience {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        check("audience", text, Self::LONGEST, is_plain)?;
        Ok(Self(text.to_owned()))
    }
}

text_type!(Audience);

/// The name of an organisation or a task.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Label(String);

impl Label {
    pub const LONGEST: usize = 128;
}

impl FromStr for Label {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        check("label", text, Self::LONGEST, is_plain)?;
        Ok(Self(text.to_owned()))
    }
}

text_type!(Label);

/// What the box was given at create, e.g. `repo:acme/web:read`. In a token they stand in one
/// claim with spaces between, so no scope holds a space.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct Scopes(Vec<String>);

impl Scopes {
    pub const MOST: usize = 32;
    pub const LONGEST: usize = 128;

    pub fn new(scopes: Vec<String>) -> Result<Self> {
        if scopes.len() > Self::MOST {
            return Err(Error::invalid(
                "scopes",
                format!(
                    "{} scopes are more than the {} a box may have",
                    scopes.len(),
                    Self::MOST
                ),
            ));
        }
        for scope in &scopes {
            check("scopes", scope, Self::LONGEST, is_plain)?;
        }
        Ok(Self(scopes))
    }

    /// As the `scope` claim has them.
    pub fn from_claim(claim: &str) -> Result<Self> {
        Self::new(
            claim
                .split(' ')
                .filter(|s| !s.is_empty())
                .map(str::to_owned)
                .collect(),
        )
    }

    pub fn to_claim(&self) -> String {
        self.0.join(" ")
    }

    pub fn as_slice(&self) -> &[String] {
        &self.0
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl TryFrom<Vec<String>> for Scopes {
    type Error = Error;
    fn try_from(scopes: Vec<String>) -> Result<Self> {
        Self::new(scopes)
    }
}

impl From<Scopes> for Vec<String> {
    fn from(scopes: Scopes) -> Self {
        scopes.0
    }
}

/// What a token is called by who asked for it, e.g. in a header of E2B's network rules.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TokenName(String);

impl TokenName {
    pub const LONGEST: usize = 64;
    /// What is taken for one, as a regular expression.
    pub const PATTERN: &str = "^[A-Za-z0-9_-]{1,64}$";
}

impl FromStr for TokenName {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let good = (1..=Self::LONGEST).contains(&text.len())
            && text
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
        if good {
            return Ok(Self(text.to_owned()));
        }
        Err(
            Error::invalid("tokens", "this can not be the name of a token").hint(format!(
                "use 1 to {} of a-z, A-Z, 0-9, - and _",
                Self::LONGEST
            )),
        )
    }
}

text_type!(TokenName);

/// Tokens of a box that have a name, each with whom it is for.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(
    try_from = "BTreeMap<TokenName, Audience>",
    into = "BTreeMap<TokenName, Audience>"
)]
pub struct NamedTokens(BTreeMap<TokenName, Audience>);

impl NamedTokens {
    pub const MOST: usize = 5;

    pub fn audience(&self, name: &str) -> Option<&Audience> {
        self.0.get(&name.parse().ok()?)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl TryFrom<BTreeMap<TokenName, Audience>> for NamedTokens {
    type Error = Error;
    fn try_from(tokens: BTreeMap<TokenName, Audience>) -> Result<Self> {
        if tokens.len() > Self::MOST {
            return Err(Error::invalid(
                "tokens",
                format!(
                    "{} tokens are more than the {} a box may have",
                    tokens.len(),
                    Self::MOST
                ),
            ));
        }
        Ok(Self(tokens))
    }
}

impl From<NamedTokens> for BTreeMap<TokenName, Audience> {
    fn from(tokens: NamedTokens) -> Self {
        tokens.0
    }
}

/// Who a box is beyond its id: fixed when it is made, part of every token of it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Identity {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub org: Option<Label>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<Label>,
    #[serde(skip_serializing_if = "Scopes::is_empty")]
    pub scopes: Scopes,
    #[serde(skip_serializing_if = "NamedTokens::is_empty")]
    pub tokens: NamedTokens,
    /// The box this one was forked from. Never taken from a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<SandboxId>,
}

impl Identity {
    /// Whether nobody said anything.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_empty_long_or_odd_is_refused() {
        assert!("https://vault.test/x?y=z#1".parse::<Audience>().is_ok());
        for bad in [
            "",
            " ",
            "a b",
            "a\"b",
            "a\\b",
            "a\n",
            "a\0",
            "é",
            &"x".repeat(513),
        ] {
            assert!(bad.parse::<Audience>().is_err(), "{bad:?}");
            assert!(bad.parse::<Label>().is_err(), "{bad:?}");
            assert!(Scopes::new(vec![bad.to_owned()]).is_err(), "{bad:?}");
        }
        assert!(serde_json::from_str::<Audience>("\"\"").is_err());
    }

    #[test]
    fn an_identity_is_bounded_and_short_when_empty() {
        assert_eq!(serde_json::to_string(&Identity::default()).unwrap(), "{}");
        let read: Identity = serde_json::from_str(
            r#"{"org": "acme", "scopes": ["a"], "tokens": {"vault": "https://v.test"}}"#,
        )
        .unwrap();
        assert!(!read.is_empty());
        assert_eq!(
            read.tokens.audience("vault").unwrap().as_str(),
            "https://v.test"
        );
        assert!(read.tokens.audience("other").is_none());
        assert!(read.tokens.audience("a b").is_none());
        for bad in [
            r#"{"org": ""}"#,
            r#"{"tokens": {"a b": "x"}}"#,
            r#"{"tokens": {"a": ""}}"#,
            r#"{"tokens": {"1":"x","2":"x","3":"x","4":"x","5":"x","6":"x"}}"#,
        ] {
            assert!(serde_json::from_str::<Identity>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn scopes_go_through_their_claim() {
        let scopes = Scopes::new(vec!["repo:a/b:read".into(), "ci".into()]).unwrap();
        assert_eq!(scopes.to_claim(), "repo:a/b:read ci");
        assert_eq!(Scopes::from_claim(&scopes.to_claim()).unwrap(), scopes);
        assert!(Scopes::from_claim("").unwrap().is_empty());
        assert!(Scopes::new(vec!["s".into(); 33]).is_err());
    }
}
