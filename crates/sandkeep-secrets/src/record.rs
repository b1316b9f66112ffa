//! One secret as a file.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use sandkeep_model::{Error, Result, Secret, SecretName, Timestamp};
use serde::{Deserialize, Serialize};

use crate::cipher::{Cipher, Sealed};

/// What may be known of a secret: everything but its value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecretInfo {
    pub id: String,
    pub name: SecretName,
    /// One, and one more with each change of the value.
    pub version: u64,
    pub metadata: BTreeMap<String, String>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

/// A secret as it is stored. Everything in `info` and the id of the key are bound to the value: a
/// record put together from two others does not open.
pub(crate) struct StoredSecret {
    pub info: SecretInfo,
    key_id: String,
    sealed: Sealed,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    info: SecretInfo,
    key_id: String,
    nonce: String,
    ciphertext: String,
}

impl StoredSecret {
    pub fn seal(info: SecretInfo, secret: &Secret, cipher: &Cipher) -> Result<Self> {
        let key_id = cipher.key_id.clone();
        let sealed = cipher.seal(secret, &beside(&info, &key_id)?)?;
        Ok(Self {
            info,
            key_id,
            sealed,
        })
    }

    pub fn open(&self, cipher: &Cipher) -> Result<Secret> {
        if self.key_id != cipher.key_id {
            return Err(Error::host_not_ready(format!(
                "the secret {} was encrypted with another key",
                self.info.name
            ))
            .hint("give the server the key it had, or set the secret again")
            .retryable(false));
        }
        cipher
            .open(&self.sealed, &beside(&self.info, &self.key_id)?)
            .ok_or_else(|| {
                Error::internal(format!("the stored secret {} was changed", self.info.name))
                    .hint("set it again, and find out who changed the state directory")
            })
    }

    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(&Document {
            info: self.info.clone(),
            key_id: self.key_id.clone(),
            nonce: STANDARD.encode(&self.sealed.nonce),
            ciphertext: STANDARD.encode(&self.sealed.ciphertext),
        })
        .map_err(|error| Error::internal(format!("writing a secret: {error}")))
    }

    /// Only the very bytes [`StoredSecret::to_bytes`] makes are taken.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let document: Document = serde_json::from_slice(bytes).ok()?;
        let stored = Self {
            info: document.info,
            key_id: document.key_id,
            sealed: Sealed {
                nonce: STANDARD.decode(document.nonce).ok()?,
                ciphertext: STANDARD.decode(document.ciphertext).ok()?,
            },
        };
        (stored.to_bytes().ok()? == bytes).then_some(stored)
    }
}

impl std::fmt::Debug for StoredSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoredSecret")
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}

/// What the value is bound to.
fn beside(info: &SecretInfo, key_id: &str) -> Result<Vec<u8>> {
    serde_json::to_vec(&(info, key_id))
        .map_err(|error| Error::internal(format!("binding a secret: {error}")))
}
