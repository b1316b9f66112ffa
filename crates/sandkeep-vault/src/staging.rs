//! Names under which things are made, and how anything in the pool is taken apart again.
//!
//! Removing a subvolume leaves its quota group behind until the kernel has freed the
//! space. A small file in `graves/` remembers it, so that a later round finishes the work
//! and never touches groups that are not ours.

use rustix::fs::RenameFlags;
use sandkeep_model::{Error, Result, random_token};
use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
};

use crate::{
    btrfs,
    doing::Doing as _,
    form, point,
    quota::{Quota, Tidied},
};

/// Nested subvolumes a box may have left; more than this is an attack on our patience.
const MAX_NESTED: usize = 100_000;
/// What removing their names may write while all disks together are at their limit.
const FOR_NAMES: u64 = 16 << 20;

/// The directories of a pool. All are closed to everyone but root: whoever could walk
/// into a box's root would find its set-uid programs.
#[derive(Debug, Clone)]
pub struct Layout {
    pub root: PathBuf,
    pub templates: PathBuf,
    pub disks: PathBuf,
    pub points: PathBuf,
    /// Archives that clients sent for builds.
    pub contexts: PathBuf,
    staging: PathBuf,
    graves: PathBuf,
}

fn is_form(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with(form::PREFIX))
}

impl Layout {
    /// Where everything is, or will be.
    pub fn at(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            templates: root.join("templates"),
            disks: root.join("disks"),
            points: root.join("points"),
            contexts: root.join("contexts"),
            staging: root.join("staging"),
            graves: root.join("graves"),
        }
    }

    pub fn prepare(root: &Path) -> Result<Self> {
        let layout = Self::at(root);
        for dir in [
            &layout.templates,
            &layout.disks,
            &layout.points,
            &layout.contexts,
            &layout.staging,
            &layout.graves,
        ] {
            make_private_dir(dir)?;
        }
        Ok(layout)
    }

    /// A place nobody else uses, removed with all in it if the guard is dropped.
    pub fn stage<'a>(&'a self, quota: &'a Quota) -> Staged<'a> {
        self.staged(self.staged_path(), quota)
    }

    /// The guard of something that was made before and [kept](Staged::keep).
    pub fn staged<'a>(&'a self, path: PathBuf, quota: &'a Quota) -> Staged<'a> {
        Staged {
            path,
            layout: self,
            quota,
        }
    }

    /// A name for something half-made, swept at the next start if it is still there.
    pub fn staged_path(&self) -> PathBuf {
        self.staging.join(random_token(16))
    }

    /// What is there; right after a start, all that a crash left half-made.
    pub fn half_made(&self) -> Result<Vec<PathBuf>> {
        fs::read_dir(&self.staging)
            .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
            .doing_to("reading", &self.staging)
    }

    /// Takes these away, and gives those that could not be: whoever writes into one for a server
    /// that was killed may not have ended yet, and add a file while the others go.
    pub fn sweep(&self, half_made: Vec<PathBuf>, quota: &Quota) -> Vec<PathBuf> {
        let remains = |path: &PathBuf| match self.remove(path, quota) {
            Ok(()) => false,
            Err(error) => {
                tracing::warn!(%error, "left for the next upkeep");
                true
            }
        };
        half_made.into_iter().filter(remains).collect()
    }

    /// Removes a subvolume, a directory that may hold subvolumes, or a file.
    /// What is not there is fine.
    pub fn remove(&self, path: &Path, quota: &Quota) -> Result<()> {
        let meta = match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.doing_to("looking at", path)?,
        };
        if !meta.is_dir() {
            return fs::remove_file(path).doing_to("removing", path);
        }
        if btrfs::is_subvolume(path).doing_to("looking at", path)? {
            return self.remove_subvolume(path, quota);
        }
        // A template or a point: its tree goes in one call, not file by file.
        let forms = fs::read_dir(path).doing_to("reading", path)?.flatten();
        let forms = forms.map(|entry| entry.path()).filter(|path| is_form(path));
        let own = ["root", point::DISK, point::MEMORY].map(|name| path.join(name));
        for root in own.into_iter().chain(forms) {
            if root.is_dir() && btrfs::is_subvolume(&root).doing_to("looking at", &root)? {
                self.remove_subvolume(&root, quota)?;
            }
        }
        fs::remove_dir_all(path).doing_to("removing", path)
    }

    fn remove_subvolume(&self, path: &Path, quota: &Quota) -> Result<()> {
        let id = btrfs::open_dir(path)
            .and_then(|dir| btrfs::subvolume_id(dir.as_fd()))
            .doing_to("asking for the id of", path)?;
        self.dig(id);
        match btrfs::destroy_subvolume(path) {
            Err(error) if error.raw_os_error() == Some(libc::ENOTEMPTY) => {
                let pool = btrfs::open_dir(&self.root).doing_to("opening", &self.root)?;
                // Removing a name writes; a box at its limit must not keep its disk that way.
                quota
                    .limit(pool.as_fd(), id, 0)
                    .doing("lifting the limit of a disk")?;
                if let Err(error) = quota.limit_sum(pool.as_fd(), FOR_NAMES, 0) {
                    tracing::debug!(%error, "the limit of all disks stays");
                }
                self.remove_nested(pool.as_fd(), id)?;
                btrfs::destroy_subvolume(path).doing_to("removing", path)?;
            }
            other => other.doing_to("removing", path)?,
        }
        let pool = btrfs::open_dir(&self.root).doing_to("opening", &self.root)?;
        if let Err(error) = self.fill(pool.as_fd(), quota, &[id]) {
            tracing::debug!(%error, id, "the quota group waits for the next upkeep");
        }
        Ok(())
    }

    /// Removes the subvolumes a box made inside its own disk, deepest first.
    fn remove_nested(&self, pool: BorrowedFd<'_>, top: u64) -> Result<()> {
        let mut stack = vec![top];
        let mut removed = 0;
        while let Some(&id) = stack.last() {
            let children = btrfs::children(pool, id).doing("listing nested subvolumes")?;
            if !children.is_empty() && stack.len() < MAX_NESTED {
                stack.extend(children);
                continue;
            }
            stack.pop();
            if id == top {
                break;
            }
            self.dig(id);
            match btrfs::destroy_subvolume_by_id(pool, id) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => other.doing("removing a nested subvolume")?,
            }
            removed += 1;
            if removed > MAX_NESTED {
                return Err(Error::internal(format!(
                    "more than {MAX_NESTED} subvolumes are nested in one disk"
                ))
                .hint("remove them with `btrfs subvolume delete`"));
            }
        }
        Ok(())
    }

    /// Remembers that the quota groups of a subvolume are to go.
    fn dig(&self, id: u64) {
        // On a full pool this fails; removing must work all the same.
        if let Err(error) = fs::write(self.graves.join(id.to_string()), b"") {
            tracing::warn!(%error, id, "a quota group will stay behind");
        }
    }

    /// Removes the groups of subvolumes that are gone, and makes the kernel hurry with those
    /// that are not quite gone.
    pub fn tidy(&self, quota: &Quota) -> Result<Tidied> {
        let ids = self.graves()?;
        if ids.is_empty() {
            return Ok(Tidied::default());
        }
        let pool = btrfs::open_dir(&self.root).doing_to("opening", &self.root)?;
        let tidied = self.fill(pool.as_fd(), quota, &ids)?;
        if tidied.groups_waiting > 0 {
            btrfs::sync_and_clean(pool.as_fd()).doing_to("writing out", &self.root)?;
        }
        Ok(tidied)
    }

    /// Subvolumes that were removed and perhaps not freed yet.
    pub fn graves(&self) -> Result<Vec<u64>> {
        let mut ids = Vec::new();
        for entry in fs::read_dir(&self.graves).doing_to("reading", &self.graves)? {
            let name = entry.doing_to("reading", &self.graves)?.file_name();
            ids.extend(name.to_str().and_then(|name| name.parse::<u64>().ok()));
        }
        Ok(ids)
    }

    fn fill(&self, pool: BorrowedFd<'_>, quota: &Quota, ids: &[u64]) -> Result<Tidied> {
        let mut tidied = Tidied::default();
        let mut gone = Vec::new();
        for &id in ids {
            if btrfs::subvolume_exists(pool, id).doing("looking for a subvolume")? {
                // A crash came before the removal itself; it is still a disk.
                self.close_grave(id);
            } else if quota.forget(pool, 0, id).doing("removing a quota group")? {
                gone.push(id);
            } else {
                tidied.groups_waiting += 1;
            }
        }
        // A summing group can only go after its members.
        for id in gone {
            if quota.forget(pool, 1, id).doing("removing a quota group")? {
                self.close_grave(id);
                tidied.groups_removed += 1;
            } else {
                tidied.groups_waiting += 1;
            }
        }
        Ok(tidied)
    }

    fn close_grave(&self, id: u64) {
        if let Err(error) = fs::remove_file(self.graves.join(id.to_string()))
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, id, "the note on a removed disk stays");
        }
    }
}

/// Something being made. Dropped without [`Staged::commit`], it is taken away.
#[derive(Debug)]
pub struct Staged<'a> {
    pub path: PathBuf,
    layout: &'a Layout,
    quota: &'a Quota,
}

impl Staged<'_> {
    /// Lets it stay in the staging place until somebody needs it, or the next sweep.
    pub fn keep(mut self) -> PathBuf {
        // What has no name is not there, so dropping the guard removes nothing.
        std::mem::take(&mut self.path)
    }

    /// Moves it to its place in one step. `Ok(false)`: the place is taken.
    pub fn commit(self, target: &Path) -> Result<bool> {
        let moved = rustix::fs::renameat_with(
            rustix::fs::CWD,
            &self.path,
            rustix::fs::CWD,
            target,
            RenameFlags::NOREPLACE,
        );
        match moved {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::EXIST) => Ok(false),
            Err(error) => Err(error).doing_to("moving into place", target),
        }
    }

    /// The same, but what was there before comes back to the staging place and is removed.
    pub fn commit_over(self, target: &Path) -> Result<()> {
        let cwd = rustix::fs::CWD;
        match rustix::fs::renameat_with(cwd, &self.path, cwd, target, RenameFlags::EXCHANGE) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::NOENT) => {
                fs::rename(&self.path, target).doing_to("moving into place", target)
            }
            Err(error) => Err(error).doing_to("moving into place", target),
        }
    }
}

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.layout.remove(&self.path, self.quota) {
            tracing::warn!(%error, path = %self.path.display(), "left for the next sweep");
        }
    }
}

/// Makes the directory, and closes it if it was open before.
pub fn make_private_dir(path: &Path) -> Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::set_permissions(path, fs::Permissions::from_mode(0o700)).doing_to("closing", path)
        }
        other => other.doing_to("making the directory", path),
    }
}

pub fn sync_dir(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|dir| dir.sync_all())
        .doing_to("writing out", path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

    #[test]
    fn a_server_did_not_start_because_somebody_still_wrote_for_the_last_one() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::prepare(dir.path()).unwrap();
        let quota = Quota::none();
        let (written, over) = (layout.staged_path(), layout.staged_path());
        for path in [&written, &over] {
            fs::create_dir(path).unwrap();
            fs::write(path.join("image"), "half").unwrap();
        }
        // It can not go as long as somebody uses it.
        let used = written.join("used");
        fs::create_dir(&used).unwrap();
        mount("none", &used, "tmpfs", MountFlags::empty(), None).unwrap();
        let left = layout.sweep(layout.half_made().unwrap(), &quota);
        assert_eq!(left, std::slice::from_ref(&written));
        assert!(!over.exists(), "the others go");
        unmount(&used, UnmountFlags::empty()).unwrap();
        assert!(layout.sweep(left, &quota).is_empty());
        assert!(layout.half_made().unwrap().is_empty());
    }
}
