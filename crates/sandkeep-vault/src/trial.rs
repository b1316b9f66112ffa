//! A copy of a disk on which it is tried whether an image of memory comes back.

use sandkeep_model::Result;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    disk, image,
    quota::QuotaKind,
    vault::{Inner, Vault, off_thread},
};

/// Taken away when it is dropped; by the next start if the server ends before.
#[derive(Debug)]
pub struct TrialDisk {
    vault: Arc<Inner>,
    path: PathBuf,
}

impl TrialDisk {
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What cannot be removed now goes at the next start.
    pub async fn remove(self) {
        let removed = off_thread(move || {
            drop(self);
            Ok(())
        });
        if let Err(error) = removed.await {
            tracing::warn!(%error, "removing the disk of a trial");
        }
    }
}

impl Drop for TrialDisk {
    fn drop(&mut self) {
        if let Err(error) = self.vault.layout.remove(&self.path, &self.vault.quota) {
            tracing::warn!(%error, path = %self.path.display(), "left for the next sweep");
        }
    }
}

impl Vault {
    /// A writable copy of `disk`, which takes what it takes to bring back the deleted files in
    /// `image`, and no more.
    pub async fn trial_disk(&self, disk: &Path, image: &Path) -> Result<TrialDisk> {
        let (disk, image) = (disk.to_owned(), image.to_owned());
        let vault = Arc::clone(&self.inner);
        off_thread(move || {
            let most = match vault.quota.kind {
                // Then nothing limits the sandbox either.
                QuotaKind::None => 0,
                _ => image::to_bring_back(&image)?,
            };
            let path = disk::stage_from(&vault, &disk, most)?.keep();
            let trial = TrialDisk { vault, path };
            if trial.vault.quota.kind != QuotaKind::None {
                image::count_as_image(&trial.vault, &trial.path)?;
            }
            Ok(trial)
        })
        .await
    }
}
