//! What servers are known by to each other.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

use crate::{Error, Result};

const PREFIX: &str = "ed25519:";

/// The public half of the key with which a server signs the points it exports:
/// `ed25519:` and 43 characters. It is no secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ServerKey([u8; Self::BYTES]);

impl ServerKey {
    pub const BYTES: usize = 32;

    pub const fn new(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    pub const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl FromStr for ServerKey {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        text.strip_prefix(PREFIX)
            .and_then(|text| URL_SAFE_NO_PAD.decode(text).ok())
            .and_then(|bytes| bytes.try_into().ok())
            .map(Self)
            .ok_or_else(|| {
                Error::invalid("key", "this is no public key of a server").hint(format!(
                    "`sandkeep points key` prints that of a server: \"{PREFIX}\" and 43 characters"
                ))
            })
    }
}

impl TryFrom<String> for ServerKey {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<ServerKey> for String {
    fn from(key: ServerKey) -> Self {
        key.to_string()
    }
}

impl fmt::Display for ServerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl fmt::Debug for ServerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_one_spelling() {
        let key = ServerKey::new(std::array::from_fn(|n| n as u8 * 8));
        let text = key.to_string();
        assert_eq!(text.len(), PREFIX.len() + 43);
        assert_eq!(text.parse::<ServerKey>().unwrap(), key);
        let json = serde_json::to_string(&key).unwrap();
        assert_eq!(json, format!("\"{text}\""));
        assert_eq!(serde_json::from_str::<ServerKey>(&json).unwrap(), key);
        for wrong in [
            "",
            PREFIX,
            &text[PREFIX.len()..],
            &text[..text.len() - 1],
            &format!("{text}A"),
            &format!("{text}="),
            &format!(" {text}"),
            &text.to_uppercase(),
            // The last character stands for four bits only.
            &format!("{}5", &text[..text.len() - 1]),
        ] {
            let error = wrong.parse::<ServerKey>().unwrap_err();
            assert!(error.to_string().contains("sandkeep points key"), "{wrong}");
        }
    }
}
