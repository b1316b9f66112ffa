//! The keys of the issuer: one signs, the ones before it still verify.

use std::path::Path;

use sandkeep_files::{DirLock, PrivateDir};
use sandkeep_model::{Code, Error, Result, Timestamp};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::{
    Lifetime, SigningAlgorithm,
    key::{SigningKey, StoredKey},
};

const FILE: &str = "keys.json";
/// 64 RSA keys fit.
const MAX_FILE_BYTES: u64 = 256 * 1024;
/// Each rotation keeps a key for a quarter of an hour; more than this many is a runaway.
const MAX_KEYS: usize = 32;
/// Verifiers may run behind us by this much.
pub(crate) const LEEWAY_SECONDS: u64 = 30;

/// All keys stand in one file, so that a rotation is one rename.
pub(crate) struct KeyRing {
    dir: PrivateDir,
    _lock: DirLock,
    /// Oldest first; the last one signs.
    keys: Vec<SigningKey>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyFile {
    keys: Vec<StoredKey>,
}

impl KeyRing {
    /// Loads the keys, or makes the first one. A change of algorithm is a rotation.
    pub fn open(dir: &Path, algorithm: SigningAlgorithm, now: Timestamp) -> Result<Self> {
        let dir = PrivateDir::open(dir)?;
        let lock = dir.lock()?;
        let keys = match dir.read(FILE, MAX_FILE_BYTES)? {
            None => Vec::new(),
            Some(bytes) => load(&bytes).map_err(|error| {
                error
                    .context(format!("reading {}", dir.path().join(FILE).display()))
                    .hint("restore the file from a backup, or remove it: a new key is made, and tokens given so far are no longer good")
            })?,
        };
        let mut ring = Self {
            dir,
            _lock: lock,
            keys,
        };
        if ring.keys.last().map(|key| key.algorithm) == Some(algorithm) {
            ring.forget_ended(now);
        } else {
            ring.rotate(algorithm, now)?;
        }
        Ok(ring)
    }

    pub fn signing(&self) -> Result<&SigningKey> {
        self.keys
            .last()
            .ok_or_else(|| Error::internal("there is no signing key"))
    }

    /// The key with this id, if a token signed by it can still be good.
    pub fn find(&self, kid: &str, now: Timestamp) -> Option<&SigningKey> {
        self.live(now).find(|key| key.kid == kid)
    }

    /// Keys a verifier must know, the signing one last.
    pub fn live(&self, now: Timestamp) -> impl Iterator<Item = &SigningKey> {
        self.keys.iter().filter(move |key| !has_ended(key, now))
    }

    /// A new key signs from now on. Returns its id.
    pub fn rotate(&mut self, algorithm: SigningAlgorithm, now: Timestamp) -> Result<String> {
        self.forget_ended(now);
        if self.keys.len() >= MAX_KEYS {
            return Err(Error::new(
                Code::ResourceExhausted,
                "the signing key was rotated too often",
            )
            .hint("old keys are kept for a quarter of an hour; wait, then rotate again"));
        }
        let new = SigningKey::generate(algorithm, now)?;
        let kid = new.kid.clone();
        let mut stored: Vec<StoredKey> =
            self.keys.iter().map(|key| key.store_retired(now)).collect();
        stored.push(new.store());
        let text = serde_json::to_vec(&KeyFile { keys: stored })
            .map(Zeroizing::new)
            .map_err(|error| Error::internal(format!("writing the keys: {error}")))?;
        // On disk first: a key that signed and is then lost would leave tokens nobody can check.
        self.dir.write(FILE, &text)?;
        for key in &mut self.keys {
            key.retired.get_or_insert(now);
        }
        self.keys.push(new);
        Ok(kid)
    }

    fn forget_ended(&mut self, now: Timestamp) {
        self.keys.retain(|key| !has_ended(key, now));
    }
}

fn load(bytes: &[u8]) -> Result<Vec<SigningKey>> {
    // The message of serde could quote the file, and the file holds keys.
    let file: KeyFile = serde_json::from_slice(bytes).map_err(|error| {
        Error::internal(format!("the key file is damaged in line {}", error.line()))
    })?;
    file.keys.iter().map(SigningKey::load).collect()
}

/// Whether every token this key signed has ended.
fn has_ended(key: &SigningKey, now: Timestamp) -> bool {
    key.retired.is_some_and(|retired| {
        retired
            .plus(Lifetime::LONGEST.duration())
            .plus(std::time::Duration::from_secs(2 * LEEWAY_SECONDS))
            <= now
    })
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::MetadataExt as _, time::Duration};

    use super::*;

    const ES: SigningAlgorithm = SigningAlgorithm::Es256;

    fn kids(ring: &KeyRing, now: Timestamp) -> Vec<String> {
        ring.live(now).map(|key| key.kid.clone()).collect()
    }

    #[test]
    fn keys_are_made_once_and_private() {
        let room = tempfile::tempdir().unwrap();
        let dir = room.path().join("identity");
        let now = Timestamp::now();
        let first = kids(&KeyRing::open(&dir, ES, now).unwrap(), now);
        assert_eq!(kids(&KeyRing::open(&dir, ES, now).unwrap(), now), first);
        let mode = std::fs::metadata(dir.join(FILE)).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn an_old_key_stays_until_its_last_token_has_ended() {
        let room = tempfile::tempdir().unwrap();
        let dir = room.path().join("identity");
        let start = Timestamp::now();
        let mut ring = KeyRing::open(&dir, ES, start).unwrap();
        let old = ring.signing().unwrap().kid.clone();
        let new = ring.rotate(ES, start).unwrap();
        assert_ne!(old, new);
        assert_eq!(ring.signing().unwrap().kid, new);
        let while_tokens_live = start.plus(Duration::from_secs(900));
        assert_eq!(kids(&ring, while_tokens_live), [old.clone(), new.clone()]);
        let after = start.plus(Duration::from_secs(900 + 61));
        assert_eq!(kids(&ring, after), std::slice::from_ref(&new));
        assert!(ring.find(&old, after).is_none());
        drop(ring);
        // And the same after a restart.
        assert_eq!(
            kids(&KeyRing::open(&dir, ES, start).unwrap(), start),
            [old, new.clone()]
        );
        assert_eq!(kids(&KeyRing::open(&dir, ES, after).unwrap(), after), [new]);
    }

    #[test]
    fn another_algorithm_is_a_rotation() {
        let room = tempfile::tempdir().unwrap();
        let now = Timestamp::now();
        let dir = room.path().join("identity");
        drop(KeyRing::open(&dir, ES, now).unwrap());
        let ring = KeyRing::open(&dir, SigningAlgorithm::EdDsa, now).unwrap();
        assert_eq!(ring.signing().unwrap().algorithm, SigningAlgorithm::EdDsa);
        assert_eq!(ring.live(now).count(), 2);
    }

    #[test]
    fn rotation_is_bounded() {
        let room = tempfile::tempdir().unwrap();
        let now = Timestamp::now();
        let mut ring = KeyRing::open(&room.path().join("identity"), ES, now).unwrap();
        let refused = (0..=MAX_KEYS)
            .find_map(|_| ring.rotate(ES, now).err())
            .unwrap();
        assert_eq!(refused.code, Code::ResourceExhausted);
        assert!(ring.rotate(ES, now.plus(Duration::from_secs(3600))).is_ok());
    }

    #[test]
    fn a_damaged_file_is_named_and_its_content_is_not() {
        let room = tempfile::tempdir().unwrap();
        let dir = room.path().join("identity");
        let now = Timestamp::now();
        drop(KeyRing::open(&dir, ES, now).unwrap());
        let text = std::fs::read_to_string(dir.join(FILE)).unwrap();
        std::fs::write(
            dir.join(FILE),
            text.replace("\"private_key\":\"", "\"private_key\":1,\""),
        )
        .unwrap();
        let error = KeyRing::open(&dir, ES, now).err().unwrap();
        assert!(error.message.contains(FILE), "{error}");
        assert!(!error.to_string().contains("MIG"), "{error}");
    }
}
