//! The words that go into a token of a box, bounded once and safe from then on.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

use crate::{Error, Result};

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
    fn scopes_go_through_their_claim() {
        let scopes = Scopes::new(vec!["repo:a/b:read".into(), "ci".into()]).unwrap();
        assert_eq!(scopes.to_claim(), "repo:a/b:read ci");
        assert_eq!(Scopes::from_claim(&scopes.to_claim()).unwrap(), scopes);
        assert!(Scopes::from_claim("").unwrap().is_empty());
        assert!(Scopes::new(vec!["s".into(); 33]).is_err());
    }
}
