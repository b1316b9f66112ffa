//! The certificate the server shows, read anew when its files change.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use rustls::{
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use sandkeep_model::{Error, Result};
use tokio::time::sleep;

/// Programs that renew certificates write two files, and links are switched: looking costs little
/// and misses none of it.
const LOOKED_AT_EVERY: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Certificate {
    now: RwLock<Arc<CertifiedKey>>,
    files: Option<Files>,
}

#[derive(Debug)]
struct Files {
    cert: PathBuf,
    key: PathBuf,
    provider: Arc<CryptoProvider>,
}

/// What tells one version of both files from the next.
type Version = [Option<(u64, i64, i64, u64)>; 2];

impl Certificate {
    pub fn fixed(key: CertifiedKey) -> Arc<Self> {
        Arc::new(Self {
            now: RwLock::new(Arc::new(key)),
            files: None,
        })
    }

    pub fn read(cert: &Path, key: &Path, provider: Arc<CryptoProvider>) -> Result<Arc<Self>> {
        let files = Files {
            cert: cert.to_owned(),
            key: key.to_owned(),
            provider,
        };
        Ok(Arc::new(Self {
            now: RwLock::new(Arc::new(files.load()?)),
            files: Some(files),
        }))
    }

    /// For ever. Files that cannot be used change nothing: the certificate of before stays.
    pub async fn follow(self: Arc<Self>) {
        let Some(files) = &self.files else { return };
        let mut known = files.version();
        loop {
            sleep(LOOKED_AT_EVERY).await;
            let found = files.version();
            if found == known {
                continue;
            }
            match files.load() {
                Ok(key) => {
                    known = found;
                    *self.now.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(key);
                    tracing::info!(file = %files.cert.display(), "the TLS certificate was read again");
                }
                // One of the two is written, the other not yet: said once for each change.
                Err(error) => {
                    known = found;
                    tracing::warn!(%error, "the changed TLS certificate cannot be used; the one of before stays");
                }
            }
        }
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(
            &self.now.read().unwrap_or_else(PoisonError::into_inner),
        ))
    }
}

impl Files {
    fn version(&self) -> Version {
        [&self.cert, &self.key].map(|path| {
            let found = fs::metadata(path).ok()?;
            Some((found.ino(), found.mtime(), found.mtime_nsec(), found.size()))
        })
    }

    fn load(&self) -> Result<CertifiedKey> {
        let bad = |path: &Path, what: String, hint: &str| {
            Error::invalid("tls_cert", format!("{}: {what}", path.display())).hint(hint)
        };
        let read = |path: &Path| {
            fs::read(path).map_err(|error: io::Error| {
                bad(
                    path,
                    error.to_string(),
                    "name PEM files with --tls-cert and --tls-key",
                )
            })
        };
        let chain = CertificateDer::pem_slice_iter(&read(&self.cert)?)
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(|error| bad(&self.cert, error.to_string(), "it must be a PEM file"))?;
        if chain.is_empty() {
            let what = "there is no certificate in it".to_owned();
            return Err(bad(
                &self.cert,
                what,
                "name the file with the whole chain, the server's certificate first",
            ));
        }
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key)?).map_err(|error| {
            let what = format!("there is no private key in it: {error}");
            bad(&self.key, what, "name the key of the certificate, as PEM")
        })?;
        CertifiedKey::from_der(chain, key, &self.provider).map_err(|error| {
            let what = format!("the key in {} does not fit: {error}", self.key.display());
            bad(
                &self.cert,
                what,
                "name the key that belongs to the first certificate of the file",
            )
        })
    }
}
