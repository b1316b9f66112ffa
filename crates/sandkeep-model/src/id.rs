//! Ids of boxes, and random tokens.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

use crate::Error;

const ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";

/// Bytes nobody can guess.
pub fn random_bytes<const COUNT: usize>() -> [u8; COUNT] {
    let mut bytes = [0_u8; COUNT];
    if getrandom::fill(&mut bytes).is_err() {
        // Without randomness no token is a secret; going on would be worse than ending.
        std::process::abort();
    }
    bytes
}

/// `count` random characters of `[a-z0-9]`, from the kernel's generator.
pub fn random_token(count: usize) -> String {
    let mut out = String::with_capacity(count);
    while out.len() < count {
        for byte in random_bytes::<64>() {
            // 252 = 7 * 36: the rest would make some letters likelier than others.
            if byte < 252 && out.len() < count {
                out.push(char::from(ALPHABET[usize::from(byte % 36)]));
            }
        }
    }
    out
}

/// The name of a box: `i` and twenty characters of `[a-z0-9]`, as E2B clients expect it.
///
/// It is safe in a path, a DNS label, a cgroup name and a header.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SandboxId(String);

impl SandboxId {
    pub const LENGTH: usize = 21;
    /// What one looks like, as a regular expression.
    pub const PATTERN: &str = "^i[a-z0-9]{20}$";

    pub fn random() -> Self {
        Self(format!("i{}", random_token(Self::LENGTH - 1)))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SandboxId {
    type Err = Error;

    /// E2B paths may carry `<id>-<anything>`; the part before the dash is the id.
    fn from_str(text: &str) -> Result<Self, Error> {
        let id = text.split_once('-').map_or(text, |(id, _)| id);
        let good = id.len() == Self::LENGTH
            && id.starts_with('i')
            && id
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        if good {
            return Ok(Self(id.to_owned()));
        }
        let shown: String = text.chars().filter(|c| !c.is_control()).take(64).collect();
        Err(Error::sandbox_not_found(&shown))
    }
}

impl TryFrom<String> for SandboxId {
    type Error = Error;
    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<SandboxId> for String {
    fn from(id: SandboxId) -> Self {
        id.0
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<str> for SandboxId {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_ids_parse_and_differ() {
        let (a, b) = (SandboxId::random(), SandboxId::random());
        assert_ne!(a, b);
        assert_eq!(a.as_str().parse::<SandboxId>().unwrap(), a);
    }

    #[test]
    fn a_client_suffix_is_ignored() {
        let id = SandboxId::random();
        assert_eq!(format!("{id}-0badc0de").parse::<SandboxId>().unwrap(), id);
    }

    #[test]
    fn path_tricks_are_no_ids() {
        for bad in [
            "",
            "i",
            "../../etc/passwd",
            "iABCDEFGHIJ0123456789",
            "i0123456789012345678\0",
            "x01234567890123456789",
        ] {
            assert!(bad.parse::<SandboxId>().is_err(), "{bad:?}");
        }
    }
}
