//! One line of the log: an entry, its place in the chain, and the hash over both.

use std::fmt::{self, Write as _};

use sandkeep_model::{Error, Result, SandboxId, Timestamp};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{Action, Actor, Entry};

/// Every text at its bound and every character escaped stays far below.
pub(crate) const MAX_LINE_BYTES: usize = 32 * 1024;

/// Stands between the hashed part of a line and its hash.
const HASH_KEY: &str = ",\"hash\":\"";
const HEX_LENGTH: usize = 64;

/// SHA-256, written as 64 small hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Hash([u8; 32]);

impl Hash {
    /// What the first line of a log has before it.
    pub const START: Self = Self([0; 32]);

    fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Hash> for String {
    fn from(hash: Hash) -> Self {
        hash.to_string()
    }
}

impl TryFrom<String> for Hash {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        let bad = || Error::invalid("hash", "a hash is 64 hexadecimal digits");
        if text.len() != HEX_LENGTH || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(bad());
        }
        let mut bytes = [0; 32];
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| bad())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| bad())?;
        }
        Ok(Self(bytes))
    }
}

/// The end of a log at some moment. Kept elsewhere, it proves later that nothing before it was
/// changed or cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    pub seq: u64,
    pub hash: Hash,
}

impl Head {
    pub(crate) const EMPTY: Self = Self {
        seq: 0,
        hash: Hash::START,
    };
}

/// A line read back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub seq: u64,
    pub at: Timestamp,
    pub actor: Actor,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxId>,
    #[serde(flatten)]
    pub action: Action,
    pub prev: Hash,
    pub hash: Hash,
}

/// The part of a line the hash is over.
#[derive(Serialize)]
struct Hashed<'a> {
    seq: u64,
    at: Timestamp,
    actor: &'a Actor,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<&'a SandboxId>,
    #[serde(flatten)]
    action: &'a Action,
    prev: Hash,
}

/// Writes the line that follows `head`, newline included, and returns the new head.
pub(crate) fn seal(entry: &Entry, head: Head, out: &mut String) -> Result<Head> {
    let seq = head.seq + 1;
    let hashed = serde_json::to_string(&Hashed {
        seq,
        at: entry.at,
        actor: &entry.actor,
        sandbox: entry.sandbox.as_ref(),
        action: &entry.action,
        prev: head.hash,
    })
    .map_err(|error| Error::internal(format!("writing an audit line: {error}")))?;
    let hash = Hash::of(hashed.as_bytes());
    out.push_str(hashed.strip_suffix('}').unwrap_or(&hashed));
    // Writing to a String can not fail.
    let _ = writeln!(out, "{HASH_KEY}{hash}\"}}");
    Ok(Head { seq, hash })
}

/// Checks a line (without its newline) against the bytes it is made of. The hash is over the bytes
/// as they stand, so no spelling of the same JSON slips through.
pub(crate) fn unseal(line: &[u8]) -> Result<Record, &'static str> {
    let end = HASH_KEY.len() + HEX_LENGTH + 2;
    let (start, tail) = line
        .len()
        .checked_sub(end)
        .map(|at| line.split_at(at))
        .ok_or("the line is too short")?;
    let mut hashed = Vec::with_capacity(start.len() + 1);
    hashed.extend_from_slice(start);
    hashed.push(b'}');
    let hash = Hash::of(&hashed);
    if tail != format!("{HASH_KEY}{hash}\"}}").as_bytes() {
        return Err("the line does not fit its hash");
    }
    let record = parse(line)?;
    if record.hash != hash {
        return Err("the line names its hash twice");
    }
    Ok(record)
}

/// Reads a line without checking it.
pub(crate) fn parse(line: &[u8]) -> Result<Record, &'static str> {
    serde_json::from_slice(line).map_err(|_| "the line is no audit entry")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> Entry {
        Entry::now(
            Actor::key("ci"),
            Some(SandboxId::random()),
            Action::ConnectionAllowed {
                host: "a\"\\ü.test".into(),
                port: 443,
                rule: "*.test".into(),
                bytes_out: 1,
                bytes_in: u64::MAX,
                duration_ms: 7,
            },
        )
    }

    #[test]
    fn sealed_and_read_back() {
        let (entry, mut text) = (entry(), String::new());
        let head = seal(&entry, Head::EMPTY, &mut text).unwrap();
        let record = unseal(text.trim_end().as_bytes()).unwrap();
        assert_eq!((record.seq, record.hash), (1, head.hash));
        assert_eq!(record.prev, Hash::START);
        assert_eq!(record.action, entry.action);
        assert_eq!(record.sandbox, entry.sandbox);
        assert!(text.len() < MAX_LINE_BYTES);
        // What the API shows is the line itself.
        assert_eq!(serde_json::to_string(&record).unwrap(), text.trim_end());
    }

    #[test]
    fn a_change_of_any_byte_of_a_line_is_noticed() {
        let mut text = String::new();
        seal(&entry(), Head::EMPTY, &mut text).unwrap();
        let line = text.trim_end().as_bytes();
        for at in 0..line.len() {
            for change in 1..=255_u8 {
                let mut tampered = line.to_vec();
                tampered[at] ^= change;
                assert!(unseal(&tampered).is_err(), "byte {at} changed by {change}");
            }
            assert!(unseal(&line[..at]).is_err());
            assert!(unseal(&line[at + 1..]).is_err());
        }
    }

    #[test]
    fn the_longest_line_fits() {
        let worst = "\"".repeat(600);
        let mut text = String::new();
        let entry = Entry::now(
            Actor::key(&worst),
            Some(SandboxId::random()),
            Action::ConnectionAllowed {
                host: worst.as_str().into(),
                port: 1,
                rule: worst.as_str().into(),
                bytes_out: u64::MAX,
                bytes_in: u64::MAX,
                duration_ms: u64::MAX,
            },
        );
        seal(&entry, Head::EMPTY, &mut text).unwrap();
        assert!(text.len() < MAX_LINE_BYTES / 2, "{}", text.len());
    }
}
