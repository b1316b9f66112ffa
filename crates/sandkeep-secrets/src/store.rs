//! The secrets of this server.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Mutex, PoisonError, RwLock, RwLockReadGuard},
};

use sandkeep_files::{DirLock, PrivateDir};
use sandkeep_model::{
    Code, Error, Result, Secret, SecretName, Timestamp, check_metadata, random_token,
};

use crate::{
    KeySource, SecretInfo,
    cipher::Cipher,
    inline::{is_inline, refuse_inline},
    record::StoredSecret,
};

const SUFFIX: &str = ".json";
pub(crate) const MAX_VALUE_BYTES: usize = 64 * 1024;
/// A value at its bound in base64, and metadata at its bound with every byte escaped.
const MAX_FILE_BYTES: u64 = 1024 * 1024;
const MAX_SECRETS: usize = 10_000;

/// Values go in and are only ever revealed to the proxy.
///
/// What is stored is held in memory too, still encrypted, so that the proxy does not wait for a
/// disk.
#[derive(Debug)]
pub struct SecretStore {
    dir: PrivateDir,
    _lock: DirLock,
    cipher: Cipher,
    secrets: RwLock<BTreeMap<SecretName, StoredSecret>>,
    /// One change at a time; readers do not wait for it.
    changing: Mutex<()>,
    damaged: Vec<Error>,
}

impl SecretStore {
    /// `dir` is `secrets/` in the state directory.
    pub fn open(dir: &Path, source: &KeySource) -> Result<Self> {
        let dir = PrivateDir::open(dir)?;
        let lock = dir.lock()?;
        let mut files: Vec<String> = dir
            .entries()?
            .into_iter()
            .filter(|name| name.ends_with(SUFFIX))
            .collect();
        files.sort_unstable();
        let cipher = Cipher::new(&source.load(files.is_empty())?)?;
        let mut secrets = BTreeMap::new();
        let mut damaged = Vec::new();
        for file in files {
            match load(&dir, &file, &cipher) {
                Ok(stored) => {
                    secrets.insert(stored.info.name.clone(), stored);
                }
                Err(error) => {
                    let error = error.context(dir.path().join(&file).display());
                    tracing::error!(error = %error, "a stored secret can not be used");
                    damaged.push(error);
                }
            }
        }
        Ok(Self {
            dir,
            _lock: lock,
            cipher,
            secrets: RwLock::new(secrets),
            changing: Mutex::new(()),
            damaged,
        })
    }

    /// Records that could not be read when the store was opened, each named. They are left as
    /// they are.
    pub fn damaged(&self) -> &[Error] {
        &self.damaged
    }

    pub fn create(
        &self,
        name: SecretName,
        secret: &Secret,
        metadata: BTreeMap<String, String>,
    ) -> Result<SecretInfo> {
        refuse_inline(&name)?;
        self.create_any(name, secret, metadata)
    }

    pub(crate) fn create_any(
        &self,
        name: SecretName,
        secret: &Secret,
        metadata: BTreeMap<String, String>,
    ) -> Result<SecretInfo> {
        check_value(secret)?;
        check_metadata(&metadata)?;
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let secrets = self.read();
            if secrets.contains_key(&name) {
                return Err(Error::conflict(format!("the secret {name} exists already"))
                    .field("name")
                    .hint("change its value instead, or choose another name"));
            }
            if secrets.len() >= MAX_SECRETS {
                return Err(Error::new(
                    Code::ResourceExhausted,
                    format!("there are {MAX_SECRETS} secrets already"),
                )
                .hint("delete those nobody uses")
                .retryable(false));
            }
        }
        let now = Timestamp::now();
        let info = SecretInfo {
            id: format!("sec{}", random_token(20)),
            name,
            version: 1,
            metadata,
            created_at: now,
            updated_at: now,
        };
        self.put(info, secret)
    }

    /// A new value, and new metadata if given.
    pub fn update(
        &self,
        name: &SecretName,
        secret: &Secret,
        metadata: Option<BTreeMap<String, String>>,
    ) -> Result<SecretInfo> {
        check_value(secret)?;
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut info = self.get_info(name)?;
        if let Some(metadata) = metadata {
            check_metadata(&metadata)?;
            info.metadata = metadata;
        }
        info.version += 1;
        info.updated_at = Timestamp::now();
        self.put(info, secret)
    }

    pub fn delete(&self, name: &SecretName) -> Result<SecretInfo> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let info = self.get_info(name)?;
        self.dir.remove(&file_name(&info))?;
        self.write().remove(name);
        Ok(info)
    }

    pub fn get_info(&self, name: &SecretName) -> Result<SecretInfo> {
        self.read()
            .get(name)
            .map(|stored| stored.info.clone())
            .ok_or_else(|| unknown(name))
    }

    /// All that somebody named, by name.
    pub fn infos(&self) -> Vec<SecretInfo> {
        self.infos_of(|info| !is_inline(&info.name))
    }

    pub(crate) fn infos_of(&self, wanted: impl Fn(&SecretInfo) -> bool) -> Vec<SecretInfo> {
        self.read()
            .values()
            .map(|stored| &stored.info)
            .filter(|info| wanted(info))
            .cloned()
            .collect()
    }

    /// A secret for another purpose that lives and dies with the key of this store.
    pub fn subkey(&self, purpose: &str) -> Result<Secret> {
        self.cipher.subkey(purpose)
    }

    /// The value. Only for the proxy at the edge: nothing that answers a client may call it.
    pub fn reveal(&self, name: &SecretName) -> Result<Secret> {
        self.read()
            .get(name)
            .ok_or_else(|| unknown(name))?
            .open(&self.cipher)
    }

    fn put(&self, info: SecretInfo, secret: &Secret) -> Result<SecretInfo> {
        let stored = StoredSecret::seal(info.clone(), secret, &self.cipher)?;
        self.dir.write(&file_name(&info), &stored.to_bytes()?)?;
        self.write().insert(info.name.clone(), stored);
        Ok(info)
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<SecretName, StoredSecret>> {
        self.secrets.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<SecretName, StoredSecret>> {
        self.secrets.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn file_name(info: &SecretInfo) -> String {
    format!("{}{SUFFIX}", info.id)
}

/// Reads a record and opens it once, so that what is shown of it later is known to be genuine.
fn load(dir: &PrivateDir, file: &str, cipher: &Cipher) -> Result<StoredSecret> {
    let bytes = dir
        .read(file, MAX_FILE_BYTES)?
        .ok_or_else(|| Error::not_found("the file is gone"))?;
    let stored = StoredSecret::from_bytes(&bytes)
        .ok_or_else(|| Error::internal("this is no stored secret, or it was changed"))?;
    if file_name(&stored.info) != file {
        return Err(Error::internal(format!(
            "the file holds the secret {} under another id",
            stored.info.name
        )));
    }
    stored.open(cipher)?;
    Ok(stored)
}

fn check_value(secret: &Secret) -> Result<()> {
    let length = secret.expose().len();
    if length == 0 {
        return Err(Error::invalid("value", "the value of a secret is empty"));
    }
    if length > MAX_VALUE_BYTES {
        return Err(Error::new(
            Code::TooLarge,
            format!("the value of a secret is larger than {MAX_VALUE_BYTES} bytes"),
        )
        .field("value"));
    }
    Ok(())
}

fn unknown(name: &SecretName) -> Error {
    Error::not_found(format!("there is no secret {name}"))
        .hint("list the secrets that exist with GET /v1/secrets")
}

#[cfg(test)]
mod tests;
