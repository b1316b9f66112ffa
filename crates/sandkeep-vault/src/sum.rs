//! The sums by which the files of a memory are known.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// What must come out, and by which function; in JSON `"blake3": "…"`. Everything new is summed
/// with BLAKE3, which is several times as fast; points and parcels from before it have SHA-256.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sum {
    Blake3(String),
    Sha256(String),
}

impl Sum {
    /// Adds up what is to be compared with this.
    pub fn again(&self) -> Adding {
        match self {
            Self::Blake3(_) => Adding::new(),
            Self::Sha256(_) => Adding::Sha256(Sha256::new()),
        }
    }
}

/// A sum that is not finished.
#[derive(Debug, Clone)]
pub enum Adding {
    // Two kilobytes; the other one is small.
    Blake3(Box<blake3::Hasher>),
    Sha256(Sha256),
}

impl Adding {
    /// For what is written down for the first time.
    pub fn new() -> Self {
        Self::Blake3(Box::default())
    }

    pub fn add(&mut self, bytes: &[u8]) {
        match self {
            Self::Blake3(sum) => {
                sum.update(bytes);
            }
            Self::Sha256(sum) => sum.update(bytes),
        }
    }

    pub fn finish(self) -> Sum {
        match self {
            Self::Blake3(sum) => Sum::Blake3(sum.finalize().to_hex().to_string()),
            Self::Sha256(sum) => Sum::Sha256(hex(sum)),
        }
    }
}

pub fn hex(sum: Sha256) -> String {
    sum.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `printf abc | b3sum` and `printf abc | sha256sum`.
    #[test]
    fn both_are_read_and_only_the_newer_is_made() {
        for text in [
            r#"{"blake3":"6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"}"#,
            r#"{"sha256":"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}"#,
        ] {
            let sum: Sum = serde_json::from_str(text).unwrap();
            let mut again = sum.again();
            again.add(b"a");
            again.add(b"bc");
            assert_eq!(again.finish(), sum);
            assert_eq!(serde_json::to_string(&sum).unwrap(), text);
            let mut other = sum.again();
            other.add(b"abd");
            assert_ne!(other.finish(), sum);
        }
        assert!(matches!(Adding::new().finish(), Sum::Blake3(_)));
    }
}
