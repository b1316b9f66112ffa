//! Directories of boxes, which are the host's alone.

use crate::failure::Doing;
use sandkeep_model::{Error, Result, SandboxId, Secret, random_token};
use std::{
    fs::{self, DirBuilder},
    io::{self, Write as _},
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
};

/// Every directory of a box below the state directory.
pub fn box_dirs(state_dir: &Path) -> Vec<(SandboxId, PathBuf)> {
    let Ok(entries) = fs::read_dir(state_dir) else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok())
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let id: SandboxId = name.parse().ok()?;
            // The parser forgives a suffix; a directory of ours has none.
            (id.as_str() == name).then(|| (id, entry.path()))
        })
        .collect()
}

pub fn open_dir(path: &Path) -> Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags, open};
    open(
        path,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .doing(format_args!("opening {}", path.display()))
    .map_err(Error::from)
}

pub fn remove_dir(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other
            .doing(format_args!("removing {}", path.display()))
            .map_err(Error::from),
    }
}

pub fn make_private_dir(path: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o700)))
        .doing(format_args!("making {}", path.display()))
        .map_err(Error::from)
}

const TOKEN: &str = "token";

/// The token by which the agent knows us, in the directory of its box. It stays out of the
/// ledger.
pub fn write_token(box_dir: &Path, token: &Secret) -> Result<()> {
    replace(&box_dir.join(TOKEN), token.expose().as_bytes())
}

pub fn read_token(box_dir: &Path) -> Result<Secret> {
    fs::read_to_string(box_dir.join(TOKEN))
        .map(Secret::new)
        .doing("reading the token of the agent")
        .map_err(Error::from)
}

/// Renamed into place: a reader sees the old file or the new one, never half of it.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let fresh = path.with_extension("new");
    fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&fresh)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| fs::rename(&fresh, path))
        .doing(format_args!("writing {}", path.display()))
        .map_err(Error::from)
}

/// Copies the agent to where boxes get it from. With mode 0111, run it but do not read it,
/// the kernel keeps everybody in the box from tracing it or looking into it.
pub fn install_agent(source: &Path, state_dir: &Path, mode: u32) -> Result<PathBuf> {
    let target = state_dir.join("agent");
    let same = fs::read(&target).is_ok_and(|there| fs::read(source).is_ok_and(|new| new == there));
    if same {
        // On a full disk there is no room for another copy.
        fs::set_permissions(&target, fs::Permissions::from_mode(mode))
            .doing("closing the agent")?;
        return Ok(target);
    }
    let fresh = state_dir.join(format!("agent.{}", random_token(8)));
    fs::copy(source, &fresh)
        .and_then(|_| fs::set_permissions(&fresh, fs::Permissions::from_mode(mode)))
        .and_then(|()| fs::rename(&fresh, &target))
        .inspect_err(|_| {
            let _gone = fs::remove_file(&fresh);
        })
        .doing(format_args!(
            "copying the agent {} into the state directory",
            source.display()
        ))?;
    Ok(target)
}

/// Every file below the directory and itself are on disk when this returns.
pub fn sync_dir(dir: &Path) -> Result<()> {
    let sync = |path: &Path| {
        fs::File::open(path)
            .and_then(|file| file.sync_all())
            .doing(format_args!("writing {} to disk", path.display()))
    };
    for entry in fs::read_dir(dir).doing("reading the image")? {
        let path = entry.doing("reading the image")?.path();
        if path.is_dir() {
            sync_dir(&path)?;
        } else {
            sync(&path)?;
        }
    }
    sync(dir)?;
    Ok(())
}

/// Tells one build of the program from another that took its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamp {
    path: PathBuf,
    changed: (i64, i64),
    inode: u64,
}

impl Stamp {
    pub fn of(program: &Path) -> Result<Self> {
        use std::os::unix::fs::MetadataExt as _;
        let found =
            fs::metadata(program).doing(format_args!("looking at {}", program.display()))?;
        Ok(Self {
            path: program.to_owned(),
            changed: (found.ctime(), found.ctime_nsec()),
            inode: found.ino(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_named_like_a_box_count() {
        let dir = tempfile::tempdir().unwrap();
        let id = SandboxId::random();
        for name in [id.as_str(), "mnt", "agent", &format!("{id}-x")] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let found = box_dirs(dir.path());
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].0, id);
    }
}
