//! One vault per directory: a second one would sweep away what the first is making.

use sandkeep_model::{Error, Result};
use std::{
    fs::{File, TryLockError},
    path::Path,
};

use crate::doing::Doing as _;

/// Held as long as the vault lives; the kernel lets go of it when the process ends.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    pub fn take(path: &Path) -> Result<Self> {
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path)
            .doing_to("opening the lock", path)?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => Err(Error::conflict(format!(
                "another sandkeep already uses {}",
                path.parent().unwrap_or(path).display()
            ))
            .hint("stop the other server, or give this one its own state directory")),
            Err(TryLockError::Error(error)) => Err(error).doing_to("locking", path),
        }
    }
}
