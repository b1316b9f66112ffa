//! Opening regular files, and only those: a pipe, a device or a socket must
//! never make the agent wait.

use super::entry::kind_in_words;
use super::error::FileError;
use crate::users::User;
use rustix::fs::{Gid, Mode, OFlags, Uid, fchown};
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What new files and directories get.
const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;

/// Opens a file to be read.
pub(crate) fn regular_for_reading(path: &Path) -> Result<(File, Metadata), FileError> {
    // Looked at before it is opened, since opening a device can already have
    // an effect, and after, since it may have been swapped.
    let failed = |error: &io::Error| FileError::from_io("read", path, error);
    let meta = std::fs::metadata(path).map_err(|error| failed(&error))?;
    only_regular(path, &meta, "read")?;
    let flags = OFlags::RDONLY | open_flags();
    let fd = rustix::fs::open(path, flags, Mode::empty())
        .map_err(|error| FileError::from_os("read", path, error))?;
    let file = File::from(fd);
    let meta = file.metadata().map_err(|error| failed(&error))?;
    only_regular(path, &meta, "read")?;
    Ok((file, meta))
}

/// Opens a file to be written from its start: made if it is not there, its
/// parents too, emptied if it is, and owned by `user` in the end.
pub(crate) fn regular_for_writing(path: &Path, user: &User) -> Result<File, FileError> {
    if let Ok(meta) = std::fs::metadata(path) {
        only_regular(path, &meta, "write")?;
    } else if let Some(parent) = path.parent() {
        make_directories(parent, user)
            .map_err(|error| FileError::from_io("create parent directories of", path, &error))?;
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | open_flags();
    let fd = rustix::fs::open(path, flags, Mode::from(FILE_MODE))
        .map_err(|error| FileError::from_os("write", path, error))?;
    let file = File::from(fd);
    let meta = file
        .metadata()
        .map_err(|error| FileError::from_io("write", path, &error))?;
    only_regular(path, &meta, "write")?;
    let (uid, gid) = ids(user);
    fchown(&file, uid, gid)
        .map_err(|error| FileError::from_os("change the owner of", path, error))?;
    Ok(file)
}

/// Makes a directory and those above it that are missing, each owned by
/// `user`. Says whether the last one is new.
pub(crate) fn make_directories(path: &Path, user: &User) -> io::Result<bool> {
    let mut missing = Vec::new();
    for dir in path.ancestors() {
        match std::fs::metadata(dir) {
            Ok(meta) if meta.is_dir() => break,
            Ok(_) => return Err(rustix::io::Errno::NOTDIR.into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => missing.push(dir),
            Err(error) => return Err(error),
        }
    }
    let mut created = false;
    for dir in missing.into_iter().rev() {
        match rustix::fs::mkdir(dir, Mode::from(DIRECTORY_MODE)) {
            Ok(()) => created = true,
            // Somebody else was faster; whose it is is then theirs to say.
            Err(rustix::io::Errno::EXIST) if dir.is_dir() => {
                created = false;
                continue;
            }
            Err(error) => return Err(error.into()),
        }
        std::os::unix::fs::lchown(dir, Some(user.uid), Some(user.gid))?;
    }
    Ok(created)
}

fn ids(user: &User) -> (Option<Uid>, Option<Gid>) {
    (Some(Uid::from_raw(user.uid)), Some(Gid::from_raw(user.gid)))
}

fn open_flags() -> OFlags {
    OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY
}

fn only_regular(path: &Path, meta: &Metadata, action: &str) -> Result<(), FileError> {
    if meta.is_file() {
        return Ok(());
    }
    let shown = path.display();
    let kind = kind_in_words(meta.mode());
    Err(FileError::bad_request(if meta.is_dir() {
        format!("path '{shown}' is a directory")
    } else {
        format!(
            "path '{shown}' is a {kind}: only regular files can be {}",
            participle(action)
        )
    }))
}

fn participle(action: &str) -> &'static str {
    if action == "write" { "written" } else { "read" }
}
