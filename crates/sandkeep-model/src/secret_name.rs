//! Names of secrets.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

use crate::{Error, Result};

/// The name of a secret: `[A-Za-z0-9_-]`, one to 64 characters. It is no secret itself.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SecretName(String);

impl SecretName {
    /// What is taken for one, as a regular expression.
    pub const PATTERN: &str = "^[A-Za-z0-9_-]{1,64}$";

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SecretName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        if (1..=64).contains(&text.len()) && text.bytes().all(allowed) {
            return Ok(Self(text.to_owned()));
        }
        // Not shown: people mix up the name and the value.
        Err(
            Error::invalid("name", "this can not be the name of a secret")
                .hint("a name is 1 to 64 of A-Z, a-z, 0-9, - and _"),
        )
    }
}

impl TryFrom<String> for SecretName {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<SecretName> for String {
    fn from(name: SecretName) -> Self {
        name.0
    }
}

impl fmt::Display for SecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for SecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_and_a_wrong_one_is_not_repeated() {
        assert_eq!(
            "GitHub_api-2".parse::<SecretName>().unwrap().as_str(),
            "GitHub_api-2"
        );
        for bad in ["", "a b", "a/b", "a.b", "é", "a\n", &"x".repeat(65)] {
            assert!(bad.parse::<SecretName>().is_err(), "{bad:?}");
        }
        let error = "ghp_token=value".parse::<SecretName>().unwrap_err();
        assert!(!error.to_string().contains("ghp_token"));
    }
}
