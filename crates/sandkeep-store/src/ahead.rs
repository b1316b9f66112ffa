//! Room on the disk that the ledger has before it needs it, so that the end of a sandbox can be
//! written down when something else has filled the disk.

use rustix::fs::{FallocateFlags, fallocate, fstatvfs};
use std::{
    fs::File,
    path::{Path, PathBuf},
};

/// As large as the log becomes before it is folded into the file, and a little.
const LOG: u64 = 40 << 20;
/// What one folding can add to the file.
const GROWTH: u64 = 40 << 20;
/// The index of such a log.
const INDEX: u64 = 256 << 10;
/// On a disk that has not so many times more than is wanted it is left to others.
const PLENTY: u64 = 4;

/// The files of the ledger. They stay open as long as the ledger does: to close one would take
/// away the locks that SQLite holds on it in this process.
pub struct Ahead {
    files: Vec<(File, u64, bool)>,
}

impl Ahead {
    pub fn of(path: &Path) -> Self {
        let beside = |suffix: &str| -> PathBuf {
            let mut name = path.as_os_str().to_owned();
            name.push(suffix);
            name.into()
        };
        let wanted = [
            (path.to_owned(), GROWTH, true),
            (beside("-wal"), LOG, false),
            (beside("-shm"), INDEX, false),
        ];
        let open = |(path, bytes, beyond): (PathBuf, u64, bool)| {
            let file = File::options().read(true).write(true).open(&path);
            file.inspect_err(|error| {
                tracing::debug!(%error, path = %path.display(), "no room is set aside");
            })
            .ok()
            .map(|file| (file, bytes, beyond))
        };
        Self {
            files: wanted.into_iter().filter_map(open).collect(),
        }
    }

    /// Sets aside what is missing. Where that fails the ledger works as long as the disk has room.
    pub fn keep(&self) {
        for (file, bytes, beyond) in &self.files {
            if let Err(error) = keep(file, *bytes, *beyond) {
                tracing::debug!(%error, "no room is set aside for the ledger");
            }
        }
    }
}

/// `beyond`: so many bytes after the end of the file, else from its beginning.
fn keep(file: &File, bytes: u64, beyond: bool) -> std::io::Result<()> {
    let disk = fstatvfs(file)?;
    if disk.f_bavail.saturating_mul(disk.f_frsize) < PLENTY * bytes {
        return Ok(());
    }
    let from = if beyond { file.metadata()?.len() } else { 0 };
    fallocate(file, FallocateFlags::KEEP_SIZE, from, bytes)?;
    Ok(())
}
