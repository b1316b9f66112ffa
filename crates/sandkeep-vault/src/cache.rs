//! A built base kept as one file, so that tests need not build it each time.

use sandkeep_model::{Error, Result, random_token};
use sha2::{Digest as _, Sha256};
use std::{
    fs::{self, File},
    io::{self, Read, Seek as _, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::doing::Doing as _;

/// A directory named by this variable holds `base-<recipe>.tar.zst` and its checksum.
pub const VARIABLE: &str = "SANDKEEP_BASE_CACHE";

#[derive(Debug)]
pub struct Cache {
    archive: PathBuf,
    checksum: PathBuf,
}

impl Cache {
    pub fn from_env(recipe: &str) -> Option<Self> {
        let dir = PathBuf::from(std::env::var_os(VARIABLE).filter(|dir| !dir.is_empty())?);
        Some(Self::in_dir(&dir, recipe))
    }

    fn in_dir(dir: &Path, recipe: &str) -> Self {
        Self {
            archive: dir.join(format!("base-{recipe}.tar.zst")),
            checksum: dir.join(format!("base-{recipe}.tar.zst.sha256")),
        }
    }

    /// The kept archive and its size, if it is there and whole.
    pub fn open(&self) -> Result<Option<(File, u64)>> {
        let (Ok(mut file), Ok(expected)) = (
            File::open(&self.archive),
            fs::read_to_string(&self.checksum),
        ) else {
            return Ok(None);
        };
        let mut hasher = Hashing::new(io::sink());
        let size = io::copy(&mut file, &mut hasher).doing_to("reading", &self.archive)?;
        if hasher.finish() != expected.trim() {
            tracing::warn!(file = %self.archive.display(), "the kept base is damaged, building anew");
            return Ok(None);
        }
        file.rewind().doing_to("reading", &self.archive)?;
        Ok(Some((file, size)))
    }

    pub fn save(&self, root: &Path) -> Result<()> {
        if let Some(dir) = self.archive.parent() {
            fs::create_dir_all(dir).doing_to("making", dir)?;
        }
        let staged = self.archive.with_extension(random_token(8));
        let saved = pack(root, &staged).and_then(|sum| {
            fs::rename(&staged, &self.archive).doing_to("saving", &self.archive)?;
            // Last: without it the archive does not count.
            fs::write(&self.checksum, sum).doing_to("saving", &self.checksum)
        });
        if saved.is_err()
            && let Err(error) = fs::remove_file(&staged)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, file = %staged.display(), "could not be removed");
        }
        saved
    }
}

/// GNU tar knows about hard links, holes and file capabilities; we pack and count.
fn pack(root: &Path, target: &Path) -> Result<String> {
    let mut tar = Command::new("tar")
        .args(["--create", "--file=-", "--numeric-owner", "--xattrs"])
        .args(["--xattrs-include=*", "--sort=name", "--one-file-system"])
        .arg("--directory")
        .arg(root)
        .arg(".")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .doing("running tar")?;
    let packed = tar
        .stdout
        .take()
        .ok_or_else(|| Error::internal("tar has no output"))
        .and_then(|mut out| compress(&mut out, target));
    let status = tar.wait().doing("waiting for tar")?;
    let sum = packed?;
    if !status.success() {
        return Err(Error::internal("tar could not read the whole base"));
    }
    Ok(sum)
}

fn compress(from: &mut impl Read, target: &Path) -> Result<String> {
    let file = File::create(target).doing_to("making", target)?;
    let mut encoder =
        zstd::stream::write::Encoder::new(Hashing::new(file), 3).doing_to("writing", target)?;
    io::copy(from, &mut encoder).doing_to("writing", target)?;
    let hashing = encoder.finish().doing_to("writing", target)?;
    hashing.inner.sync_all().doing_to("writing", target)?;
    Ok(hashing.finish())
}

struct Hashing<W> {
    inner: W,
    hash: Sha256,
}

impl<W> Hashing<W> {
    fn new(inner: W) -> Self {
        Self {
            inner,
            hash: Sha256::new(),
        }
    }

    fn finish(self) -> String {
        let digest = self.hash.finalize();
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(buf)?;
        self.hash.update(&buf[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        fs::write(root.join("file"), "hello").unwrap();
        let cache = Cache::in_dir(&dir.path().join("cache"), "abc");
        assert!(cache.open().unwrap().is_none());
        cache.save(&root).unwrap();
        let (_, size) = cache.open().unwrap().unwrap();
        assert!(size > 0);

        let mut bytes = fs::read(&cache.archive).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&cache.archive, bytes).unwrap();
        assert!(
            cache.open().unwrap().is_none(),
            "a damaged archive is not used"
        );
    }
}
