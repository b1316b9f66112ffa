//! A directory tree built from what an archive says that nobody vouches for.
//!
//! Every path is resolved by the kernel inside the new root (`RESOLVE_IN_ROOT`), so a
//! symbolic link in the archive leads where it would lead in the box and never out of it.
//! Symbolic links may point anywhere: only the box will follow them.

use rustix::{
    fs::{
        AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags,
    },
    io::Errno,
};
use sandkeep_model::{Code, Error, Result, human_bytes};
use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Seek as _, SeekFrom},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Component, Path, PathBuf},
};

use crate::{archive::ImportLimits, doing::Doing as _};

/// A box sees the owners 0 to 65535 and no others.
const OWNERS: u64 = 65_536;
const MAX_PATH: usize = 4096;
/// The kernel's own limit.
const MAX_NAME: usize = 255;
/// Deeper than any tree somebody works in, and shallow enough to be walked again.
const MAX_DEPTH: usize = 512;
/// No file is longer than this, holes or not.
const LONGEST_FILE: u64 = 1 << 44;
pub const MAX_XATTR: usize = 64 * 1024;

/// What an entry says about itself beside its content.
#[derive(Debug)]
pub struct About {
    pub uid: Uid,
    pub gid: Gid,
    pub mode: Mode,
    pub xattrs: Vec<(OsString, Vec<u8>)>,
    pub modified: Option<Timespec>,
}

impl About {
    pub fn new(path: &Path, uid: u64, gid: u64, mode: u32) -> Result<Self> {
        match (u32::try_from(uid), u32::try_from(gid)) {
            (Ok(raw_uid), Ok(raw_gid)) if uid < OWNERS && gid < OWNERS => Ok(Self {
                uid: Uid::from_raw(raw_uid),
                gid: Gid::from_raw(raw_gid),
                mode: Mode::from_raw_mode(mode & 0o7777),
                xattrs: Vec::new(),
                modified: None,
            }),
            _ => Err(refused(
                path,
                &format!("its owner {uid}:{gid} does not exist in a box (0 to 65535)"),
            )),
        }
    }

    /// Owner first: changing it clears the set-uid bit and file capabilities.
    fn give(&self, file: BorrowedFd<'_>, path: &Path) -> Result<()> {
        rustix::fs::fchown(file, Some(self.uid), Some(self.gid))
            .and_then(|()| rustix::fs::fchmod(file, self.mode))
            .doing_to("unpacking", path)?;
        for (key, value) in &self.xattrs {
            rustix::fs::fsetxattr(file, key.as_os_str(), value, XattrFlags::empty())
                .doing_to("setting an attribute of", path)?;
        }
        Ok(())
    }
}

/// Where the bytes of a file go that has holes.
#[derive(Debug)]
pub struct Sparse {
    pub size: u64,
    /// Offset and length, ascending.
    pub extents: Vec<(u64, u64)>,
}

impl Sparse {
    /// In order, apart from each other, and inside the file.
    fn fits(&self, data: u64) -> bool {
        let mut at = 0;
        let mut sum = 0_u64;
        for &(offset, length) in &self.extents {
            let Some(end) = offset.checked_add(length) else {
                return false;
            };
            if offset < at || end > self.size {
                return false;
            }
            at = end;
            sum = sum.saturating_add(length);
        }
        sum == data && self.size <= LONGEST_FILE
    }
}

/// A tree being built below a directory.
pub struct Tree<'a> {
    root: BorrowedFd<'a>,
    left: ImportLimits,
    limits: ImportLimits,
    /// Times of directories, which are set when nothing is put into them any more.
    late: Vec<(PathBuf, Timespec)>,
}

impl<'a> Tree<'a> {
    pub const fn new(root: BorrowedFd<'a>, limits: ImportLimits) -> Self {
        Self {
            root,
            left: limits,
            limits,
            late: Vec::new(),
        }
    }

    pub const fn used(&self) -> ImportLimits {
        ImportLimits {
            bytes: self.limits.bytes - self.left.bytes,
            entries: self.limits.entries - self.left.entries,
        }
    }

    /// To be called once for each entry.
    pub fn take_entry(&mut self) -> Result<()> {
        match self.left.entries.checked_sub(1) {
            Some(left) => self.left.entries = left,
            None => {
                return Err(too_large(format!(
                    "the archive holds more than {} files",
                    self.limits.entries
                )));
            }
        }
        Ok(())
    }

    fn take_bytes(&mut self, bytes: u64) -> Result<()> {
        match self.left.bytes.checked_sub(bytes) {
            Some(left) => self.left.bytes = left,
            None => {
                return Err(too_large(format!(
                    "the archive unpacks to more than {}",
                    human_bytes(self.limits.bytes)
                )));
            }
        }
        Ok(())
    }

    /// The directory an entry lies in, made if the archive did not list it.
    fn parent(&self, path: &Path) -> Result<OwnedFd> {
        let parent = path.parent().unwrap_or(Path::new(""));
        match self.open_in_root(parent) {
            Ok(dir) => return Ok(dir),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(unreachable(path, error)),
        }
        let mut so_far = PathBuf::new();
        let mut dir = self
            .open_in_root(Path::new(""))
            .map_err(|error| unreachable(path, error))?;
        for part in parent {
            so_far.push(part);
            match rustix::fs::mkdirat(&dir, part, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error).doing_to("unpacking", path),
            }
            dir = self
                .open_in_root(&so_far)
                .map_err(|error| unreachable(path, error))?;
        }
        Ok(dir)
    }

    fn open_in_root(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        rustix::fs::openat2(
            self.root,
            path,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV,
        )
    }

    pub fn directory(&mut self, path: &Path, about: &About) -> Result<()> {
        if let Some(modified) = about.modified {
            self.late.push((path.to_owned(), modified));
        }
        let Some(name) = path.file_name() else {
            // The root itself.
            return about.give(self.root, path);
        };
        let parent = self.parent(path)?;
        match rustix::fs::mkdirat(&parent, name, Mode::RWXU) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                if kind_of(&parent, name, path)? != Some(FileType::Directory) {
                    make_room(&parent, name, path)?;
                    rustix::fs::mkdirat(&parent, name, Mode::RWXU).doing_to("unpacking", path)?;
                }
            }
            Err(error) => return Err(error).doing_to("unpacking", path),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir =
            rustix::fs::openat(&parent, name, flags, Mode::empty()).doing_to("unpacking", path)?;
        about.give(dir.as_fd(), path)
    }

    /// `size` bytes of `data`; with holes between them where `sparse` says so.
    pub fn file(
        &mut self,
        path: &Path,
        about: &About,
        data: &mut impl Read,
        size: u64,
        sparse: Option<&Sparse>,
    ) -> Result<()> {
        let name = named(path)?;
        let whole = [(0, size)];
        let extents = match sparse {
            Some(sparse) if !sparse.fits(size) => {
                return Err(refused(path, "its holes do not fit together"));
            }
            Some(sparse) => sparse.extents.as_slice(),
            None => &whole,
        };
        let parent = self.parent(path)?;
        make_room(&parent, name, path)?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(
            rustix::fs::openat(&parent, name, flags, Mode::RUSR | Mode::WUSR)
                .doing_to("unpacking", path)?,
        );
        self.take_bytes(size)?;
        for &(offset, length) in extents {
            file.seek(SeekFrom::Start(offset))
                .doing_to("unpacking", path)?;
            // The size in the header is a claim; no more than it is ever written.
            let copied =
                io::copy(&mut data.by_ref().take(length), &mut file).map_err(damaged_or_full)?;
            if copied != length {
                return Err(refused(path, "it is cut short"));
            }
        }
        if let Some(sparse) = sparse {
            file.set_len(sparse.size).doing_to("unpacking", path)?;
        }
        about.give(file.as_fd(), path)?;
        match about.modified {
            Some(modified) => {
                rustix::fs::futimens(&file, &both(modified)).doing_to("unpacking", path)
            }
            None => Ok(()),
        }
    }

    pub fn symlink(&self, path: &Path, about: &About, target: &Path) -> Result<()> {
        let name = named(path)?;
        let bytes = target.as_os_str().as_bytes();
        if bytes.is_empty() || bytes.len() >= MAX_PATH || bytes.contains(&0) {
            return Err(refused(path, "it links nowhere"));
        }
        let parent = self.parent(path)?;
        make_room(&parent, name, path)?;
        rustix::fs::symlinkat(target, &parent, name).doing_to("unpacking", path)?;
        self.finish_name(&parent, name, path, about)
    }

    /// A pipe or the name of a socket.
    pub fn special(&self, path: &Path, about: &About, kind: FileType) -> Result<()> {
        let name = named(path)?;
        let parent = self.parent(path)?;
        make_room(&parent, name, path)?;
        rustix::fs::mknodat(&parent, name, kind, about.mode, 0).doing_to("unpacking", path)?;
        self.finish_name(&parent, name, path, about)?;
        // What was made went through the umask, and the owner took the set-uid bit away.
        rustix::fs::chmodat(&parent, name, about.mode, AtFlags::empty()).doing_to("unpacking", path)
    }

    fn finish_name(
        &self,
        parent: &OwnedFd,
        name: &OsStr,
        path: &Path,
        about: &About,
    ) -> Result<()> {
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::chownat(parent, name, Some(about.uid), Some(about.gid), flags)
            .doing_to("unpacking", path)?;
        match about.modified {
            Some(modified) => rustix::fs::utimensat(parent, name, &both(modified), flags)
                .doing_to("unpacking", path),
            None => Ok(()),
        }
    }

    pub fn hard_link(&self, path: &Path, target: &Path) -> Result<()> {
        let target = clean(target)?;
        let (Some(name), Some(target_name)) = (path.file_name(), target.file_name()) else {
            return Err(refused(path, "it links to no file"));
        };
        if path == target {
            return Err(refused(path, "it links to itself"));
        }
        let target_parent = self.parent(&target)?;
        match kind_of(&target_parent, target_name, path)? {
            Some(FileType::Directory) | None => {
                return Err(refused(
                    path,
                    "it links to a file that is not in the archive",
                ));
            }
            Some(_) => {}
        }
        let parent = self.parent(path)?;
        make_room(&parent, name, path)?;
        rustix::fs::linkat(&target_parent, target_name, &parent, name, AtFlags::empty())
            .doing_to("unpacking", path)
    }

    /// Nothing is put into the tree any more.
    pub fn finish(&mut self) -> Result<()> {
        while let Some((path, modified)) = self.late.pop() {
            let times = both(modified);
            let Some(name) = path.file_name() else {
                rustix::fs::futimens(self.root, &times).doing_to("unpacking", &path)?;
                continue;
            };
            let parent = self.parent(&path)?;
            rustix::fs::utimensat(&parent, name, &times, AtFlags::SYMLINK_NOFOLLOW)
                .doing_to("unpacking", &path)?;
        }
        Ok(())
    }
}

const fn both(stamp: Timespec) -> Timestamps {
    Timestamps {
        last_access: stamp,
        last_modification: stamp,
    }
}

fn named(path: &Path) -> Result<&OsStr> {
    path.file_name()
        .ok_or_else(|| refused(path, "it has no name"))
}

pub fn too_large(message: String) -> Error {
    Error::new(Code::TooLarge, message)
        .field("archive")
        .hint("leave out what the boxes do not need")
}

pub fn damaged(error: io::Error) -> Error {
    if error.raw_os_error().is_some() {
        return Error::from(error).context("reading the archive");
    }
    Error::invalid("archive", format!("the archive can not be read: {error}"))
        .hint("give a whole tar, plain or packed with gzip or zstd")
}

fn damaged_or_full(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Error::from(error).context("unpacking")
        }
        _ => damaged(error),
    }
}

pub fn refused(path: &Path, why: &str) -> Error {
    let shown: String = path
        .to_string_lossy()
        .chars()
        .filter(|c| !c.is_control())
        .take(200)
        .collect();
    Error::invalid(
        "archive",
        format!("\"{shown}\" in the archive is refused: {why}"),
    )
    .hint("make the archive with `tar -C ROOT --numeric-owner -c .`")
}

fn unreachable(path: &Path, error: Errno) -> Error {
    match error {
        Errno::LOOP | Errno::NOTDIR | Errno::XDEV | Errno::NOENT => {
            refused(path, "its directory can not be reached")
        }
        error => Error::from(io::Error::from(error)).context("unpacking"),
    }
}

/// `./a/b` becomes `a/b`; what leaves the root is refused.
pub fn clean(path: &Path) -> Result<PathBuf> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() > MAX_PATH || bytes.contains(&0) {
        return Err(refused(path, "it is no path"));
    }
    let mut out = PathBuf::new();
    for (depth, part) in path.components().enumerate() {
        match part {
            Component::CurDir => {}
            Component::Normal(name) if name.len() > MAX_NAME => {
                return Err(refused(path, "a name in it is longer than 255 bytes"));
            }
            Component::Normal(_) if depth >= MAX_DEPTH => {
                return Err(refused(path, "it is deeper than 512 directories"));
            }
            Component::Normal(name) => out.push(name),
            Component::ParentDir => return Err(refused(path, "it holds \"..\"")),
            Component::RootDir | Component::Prefix(_) => {
                return Err(refused(path, "it is absolute"));
            }
        }
    }
    Ok(out)
}

fn kind_of(parent: &OwnedFd, name: &OsStr, path: &Path) -> Result<Option<FileType>> {
    match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(FileType::from_raw_mode(stat.st_mode))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error).doing_to("unpacking", path),
    }
}

/// An archive may list a path twice; the later one counts.
fn make_room(parent: &OwnedFd, name: &OsStr, path: &Path) -> Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(Errno::ISDIR) => Err(refused(path, "a directory is in its place")),
        Err(error) => Err(error).doing_to("unpacking", path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_inside() {
        assert_eq!(clean(Path::new("./a/./b")).unwrap(), Path::new("a/b"));
        assert_eq!(clean(Path::new("./")).unwrap(), Path::new(""));
        let (long, deep) = ("x".repeat(256), "d/".repeat(600));
        for bad in ["/etc/passwd", "../x", "a/../../x", "a/..", &long, &deep] {
            assert!(clean(Path::new(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn holes_that_overlap_or_leave_the_file_do_not_fit() {
        let sparse = |size, extents: &[(u64, u64)]| Sparse {
            size,
            extents: extents.to_vec(),
        };
        assert!(sparse(100, &[(0, 10), (50, 50)]).fits(60));
        assert!(sparse(100, &[]).fits(0));
        for (wrong, data) in [
            (sparse(100, &[(0, 10), (5, 10)]), 20),
            (sparse(100, &[(95, 10)]), 10),
            (sparse(100, &[(u64::MAX, 2)]), 2),
            (sparse(100, &[(0, 10)]), 11),
            (sparse(u64::MAX, &[(0, 10)]), 10),
        ] {
            assert!(!wrong.fits(data), "{wrong:?}");
        }
    }
}
