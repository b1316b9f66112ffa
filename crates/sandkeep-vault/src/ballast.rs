//! A file on the disk that holds the state directory, with nothing in it but room. When that disk
//! is full it goes, and the server's own small files can still be written.

use sandkeep_model::{Code, Error, Result};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use crate::{backing::allocate, doing::Doing as _, sizing::Below};

const SIZE: u64 = 32 << 20;
/// With less than this the server could not even write down its number.
const TOO_LITTLE: u64 = 4 << 20;
/// With more than this it is taken again.
const ENOUGH: u64 = 512 << 20;

fn place(state: &Path) -> PathBuf {
    state.join("ballast")
}

/// Lets go of it if the disk is full. Before anything else is written there.
pub fn release_if_full(state: &Path) -> Result<()> {
    let Ok(below) = Below::of(state) else {
        // There is no such directory yet.
        return Ok(());
    };
    if below.free >= TOO_LITTLE {
        return Ok(());
    }
    let path = place(state);
    match fs::remove_file(&path) {
        Ok(()) => {
            tracing::warn!(
                "the disk of the state directory is full: the room kept for that was let go"
            );
            Ok(())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).doing_to("removing", &path),
    }
}

/// Takes the room again once there is plenty.
pub fn take(state: &Path) -> Result<()> {
    let path = place(state);
    if path.exists() || Below::of(state)?.free < ENOUGH {
        return Ok(());
    }
    let file = File::create(&path).doing_to("making", &path)?;
    if let Err(error) = allocate(&file, 0, SIZE) {
        let _gone = fs::remove_file(&path);
        return Err(error).doing_to("setting room aside in", &path);
    }
    Ok(())
}

/// Whether the disk of the state directory has next to nothing left.
pub fn is_full(below: Below) -> bool {
    below.free < 4 * SIZE
}

/// What is told then.
pub fn full() -> Error {
    Error::new(
        Code::DiskFull,
        "the disk that holds the state directory is full",
    )
    .hint("free space on it; the ledger and the audit log go on in room set aside for them")
}
