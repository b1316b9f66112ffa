//! Directories of boxes, which are the host's alone.

use crate::failure::Doing;
use sandkeep_model::{Error, Result, SandboxId, random_token};
use std::{
    fs::{self, DirBuilder},
    io,
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt as _, PermissionsExt as _},
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

/// Copies the agent to where boxes get it from. With mode 0111, run it but do not read it,
/// the kernel keeps everybody in the box from tracing it or looking into it.
pub fn install_agent(source: &Path, state_dir: &Path, mode: u32) -> Result<PathBuf> {
    let target = state_dir.join("agent");
    let fresh = state_dir.join(format!("agent.{}", random_token(8)));
    fs::copy(source, &fresh)
        .and_then(|_| fs::set_permissions(&fresh, fs::Permissions::from_mode(mode)))
        .and_then(|()| fs::rename(&fresh, &target))
        .doing(format_args!(
            "copying the agent {} into the state directory",
            source.display()
        ))?;
    Ok(target)
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
