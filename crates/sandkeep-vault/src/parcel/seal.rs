//! The end of a parcel: what was in it, and who says so.

use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use sandkeep_files::PrivateDir;
use sandkeep_model::{Error, Result, ServerKey};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use std::path::Path;
use zeroize::Zeroizing;

use super::no_parcel;
use crate::sum::hex;

/// Beside the other keys of the server: PKCS#8, with the public half.
const DIR: &str = "keys";
const FILE: &str = "parcels.key";
const MAX_FILE_BYTES: u64 = 1024;
/// Begins what is signed, so that a signature is good for nothing but a parcel.
const SIGNED: &str = "sandkeep parcel sha256";
const SIGNATURE_BYTES: usize = 64;

/// The key with which this server signs what it packs. The private half is never printed.
pub struct ParcelKey {
    pair: Ed25519KeyPair,
    public: ServerKey,
}

impl ParcelKey {
    /// Made on first use and kept for good: others trust this server by it.
    pub fn open(state: &Path) -> Result<Self> {
        let dir = PrivateDir::open(&state.join(DIR))?;
        let text = dir.read_or_make(FILE, MAX_FILE_BYTES, make)?;
        Self::load(&text).ok_or_else(|| {
            let path = dir.path().join(FILE);
            Error::host_not_ready(format!("{} holds no key", path.display()))
                .hint("restore it from a backup, or remove it: a new one is made, which servers that trust this one must be told")
                .retryable(false)
        })
    }

    fn load(pkcs8: &[u8]) -> Option<Self> {
        let pair = Ed25519KeyPair::from_pkcs8(pkcs8).ok()?;
        let public = pair.public_key().as_ref().try_into().ok()?;
        Some(Self {
            pair,
            public: ServerKey::new(public),
        })
    }

    pub const fn public(&self) -> ServerKey {
        self.public
    }
}

impl std::fmt::Debug for ParcelKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ParcelKey({})", self.public)
    }
}

fn make() -> Result<Zeroizing<Vec<u8>>> {
    let made = Ed25519KeyPair::generate().and_then(|pair| pair.to_pkcs8());
    made.map(|pkcs8| Zeroizing::new(pkcs8.as_ref().to_vec()))
        .map_err(|_| Error::internal("making the key for exported points failed"))
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Seal {
    sha256: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signature: Option<Signature>,
}

impl Seal {
    /// Of everything that came before it.
    pub fn new(before: Sha256, key: &ParcelKey) -> Self {
        let sha256 = hex(before);
        let signature = key.pair.sign(signed(&sha256).as_bytes());
        Self {
            signature: signature.as_ref().try_into().ok().map(Signature),
            sha256,
        }
    }

    /// Refuses a parcel that is not what was sealed, or not by the server its label names.
    pub fn check(&self, before: Sha256, signer: Option<&ServerKey>) -> Result<()> {
        let found = hex(before);
        if self.sha256 != found {
            return Err(no_parcel("it is not what was sealed"));
        }
        let by = |key: &ServerKey, signature: &Signature| {
            UnparsedPublicKey::new(&ED25519, key.as_bytes())
                .verify(signed(&found).as_bytes(), &signature.0)
                .is_ok()
        };
        match (signer, &self.signature) {
            // From before servers signed.
            (None, None) => Ok(()),
            (Some(key), Some(signature)) if by(key, signature) => Ok(()),
            (Some(key), _) => Err(no_parcel(&format!(
                "it says that {key} signed it, and that is not so"
            ))),
            (None, Some(_)) => Err(no_parcel("it is signed, and does not say by whom")),
        }
    }
}

fn signed(sha256: &str) -> String {
    format!("{SIGNED} {sha256}")
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct Signature([u8; SIGNATURE_BYTES]);

impl TryFrom<String> for Signature {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, &'static str> {
        STANDARD_NO_PAD
            .decode(text)
            .ok()
            .and_then(|bytes| bytes.try_into().ok())
            .map(Self)
            .ok_or("no signature")
    }
}

impl From<Signature> for String {
    fn from(signature: Signature) -> Self {
        STANDARD_NO_PAD.encode(signature.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::Digest as _;
    use std::{fs, os::unix::fs::MetadataExt as _};

    fn key() -> ParcelKey {
        ParcelKey::load(&make().unwrap()).unwrap()
    }

    fn of(content: &str) -> Sha256 {
        Sha256::new_with_prefix(content)
    }

    #[test]
    fn a_server_keeps_its_key_and_shows_half_of_it() {
        let state = tempfile::tempdir().unwrap();
        let path = state.path().join(DIR).join(FILE);
        let first = ParcelKey::open(state.path()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(
            ParcelKey::open(state.path()).unwrap().public(),
            first.public()
        );
        assert_eq!(
            format!("{first:?}"),
            format!("ParcelKey({})", first.public())
        );
        let whole = fs::read(&path).unwrap();
        for place in [3, 20, whole.len() - 1] {
            let mut wrong = whole.clone();
            wrong[place] ^= 1;
            fs::write(&path, &wrong).unwrap();
            let error = ParcelKey::open(state.path()).unwrap_err();
            assert!(
                error.message.ends_with("parcels.key holds no key"),
                "{error}"
            );
        }
        fs::remove_file(&path).unwrap();
        let second = ParcelKey::open(state.path()).unwrap();
        assert_ne!(second.public(), first.public());
    }

    #[test]
    fn a_signature_is_for_one_content_by_one_server() {
        let (key, other) = (key(), key());
        let seal = Seal::new(of("this"), &key);
        let text = serde_json::to_vec(&seal).unwrap();
        let seal: Seal = serde_json::from_slice(&text).unwrap();
        seal.check(of("this"), Some(&key.public())).unwrap();
        assert!(seal.check(of("that"), Some(&key.public())).is_err());
        assert!(seal.check(of("this"), Some(&other.public())).is_err());
        assert!(seal.check(of("this"), None).is_err());

        let unsigned = Seal {
            signature: None,
            ..Seal::new(of("this"), &key)
        };
        unsigned.check(of("this"), None).unwrap();
        assert!(unsigned.check(of("that"), None).is_err());
        let error = unsigned.check(of("this"), Some(&key.public())).unwrap_err();
        assert!(error.message.contains(&key.public().to_string()), "{error}");

        let replayed = Seal {
            signature: seal.signature,
            ..Seal::new(of("that"), &other)
        };
        assert!(replayed.check(of("that"), Some(&key.public())).is_err());
        for wrong in ["", "AAAA", "*"] {
            let text = format!(r#"{{"sha256":"","signature":"{wrong}"}}"#);
            assert!(serde_json::from_str::<Seal>(&text).is_err());
        }
    }
}
