//! Unpacking a root file system from a tar that nobody vouches for.
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
    io::{self, BufReader, Read},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Component, Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tar::{Archive, Entry, EntryType};

use crate::{
    doing::Doing as _,
    progress::{Progress, Stage},
};

/// A box sees the owners 0 to 65535 and no others.
const OWNERS: u64 = 65_536;
const MAX_PATH: usize = 4096;
const MAX_XATTR: usize = 64 * 1024;

/// What an archive may hold at most.
#[derive(Debug, Clone, Copy)]
pub struct ImportLimits {
    /// All files together, unpacked.
    pub bytes: u64,
    pub entries: u64,
}

impl Default for ImportLimits {
    fn default() -> Self {
        Self {
            bytes: 32 << 30,
            entries: 4_000_000,
        }
    }
}

/// Unpacks a tar (plain, gzip or zstd, told by its first bytes) into the directory `root`.
pub fn unpack(
    reader: impl Read,
    size: Option<u64>,
    root: &Path,
    limits: &ImportLimits,
    mut progress: impl FnMut(Progress),
) -> Result<()> {
    let read = Arc::new(AtomicU64::new(0));
    let counted = Counted {
        inner: reader,
        read: Arc::clone(&read),
    };
    let mut archive = Archive::new(decompress(counted)?);
    let root = crate::btrfs::open_dir(root).doing_to("opening", root)?;
    let mut unpacker = Unpacker {
        root: root.as_fd(),
        left: *limits,
        limits: *limits,
        skipped: 0,
    };
    let mut last = -1.0_f32;
    for entry in archive.entries().map_err(damaged)? {
        unpacker.entry(&mut entry.map_err(damaged)?)?;
        if let Some(size) = size.filter(|size| *size > 0) {
            let part = (read.load(Ordering::Relaxed) as f32 / size as f32).min(1.0) * 0.97;
            if part >= last + 0.01 {
                last = part;
                progress(Progress {
                    stage: Stage::Unpacking,
                    fraction: part,
                });
            }
        }
    }
    if unpacker.left.entries == limits.entries {
        return Err(Error::invalid("archive", "the archive is empty")
            .hint("give a tar of a root file system"));
    }
    if unpacker.skipped > 0 {
        tracing::info!(
            skipped = unpacker.skipped,
            "device nodes and the like left out"
        );
    }
    Ok(())
}

struct Counted<R> {
    inner: R,
    read: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buf)?;
        self.read.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

fn decompress<'a>(reader: impl Read + 'a) -> Result<Box<dyn Read + 'a>> {
    let mut reader = BufReader::with_capacity(256 * 1024, reader);
    let mut head = Vec::new();
    reader
        .by_ref()
        .take(4)
        .read_to_end(&mut head)
        .map_err(damaged)?;
    let joined = io::Cursor::new(head.clone()).chain(reader);
    Ok(match head.as_slice() {
        [0x1f, 0x8b, ..] => Box::new(flate2::read::MultiGzDecoder::new(joined)),
        [0x28, 0xb5, 0x2f, 0xfd] => {
            Box::new(zstd::stream::read::Decoder::new(joined).map_err(damaged)?)
        }
        [0xfd, b'7', b'z', b'X'] | [b'B', b'Z', b'h', _] => {
            return Err(Error::invalid("archive", "this compression is not known")
                .hint("give a plain tar, or one packed with gzip or zstd"));
        }
        _ => Box::new(joined),
    })
}

fn damaged(error: io::Error) -> Error {
    if error.raw_os_error().is_some() {
        return Error::from(error).context("reading the archive");
    }
    Error::invalid("archive", format!("the archive can not be read: {error}"))
        .hint("give a whole tar, plain or packed with gzip or zstd")
}

fn refused(path: &Path, why: &str) -> Error {
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

struct Unpacker<'a> {
    root: BorrowedFd<'a>,
    left: ImportLimits,
    limits: ImportLimits,
    skipped: u64,
}

impl Unpacker<'_> {
    fn entry<R: Read>(&mut self, entry: &mut Entry<'_, R>) -> Result<()> {
        let kind = entry.header().entry_type();
        if kind.is_pax_global_extensions() {
            return Ok(());
        }
        let given = entry.path().map_err(damaged)?.into_owned();
        let path = clean(&given)?;
        self.take_entry()?;
        match kind {
            EntryType::Directory => self.directory(&path, entry),
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                self.file(&path, entry)
            }
            EntryType::Symlink => self.symlink(&path, entry),
            EntryType::Link => self.hard_link(&path, entry),
            // Devices are given to a box by its ward; pipes nobody ships.
            _ => {
                self.skipped += 1;
                Ok(())
            }
        }
    }

    fn take_entry(&mut self) -> Result<()> {
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

    fn directory<R: Read>(&self, path: &Path, entry: &mut Entry<'_, R>) -> Result<()> {
        let owner = Owner::of(path, entry)?;
        let Some(name) = path.file_name() else {
            // The root itself.
            return owner.give(self.root, path);
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
        owner.give(dir.as_fd(), path)
    }

    fn file<R: Read>(&mut self, path: &Path, entry: &mut Entry<'_, R>) -> Result<()> {
        let owner = Owner::of(path, entry)?;
        let name = path
            .file_name()
            .ok_or_else(|| refused(path, "it has no name"))?;
        let xattrs = xattrs_of(path, entry)?;
        let parent = self.parent(path)?;
        make_room(&parent, name, path)?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(
            rustix::fs::openat(&parent, name, flags, Mode::RUSR | Mode::WUSR)
                .doing_to("unpacking", path)?,
        );
        let expected = entry.size();
        self.take_bytes(expected)?;
        // The size in the header is a claim; no more than it is ever written.
        let copied =
            io::copy(&mut entry.by_ref().take(expected), &mut file).map_err(damaged_or_full)?;
        if copied != expected {
            return Err(refused(path, "it is cut short"));
        }
        owner.give(file.as_fd(), path)?;
        for (key, value) in xattrs {
            rustix::fs::fsetxattr(&file, key.as_os_str(), &value, XattrFlags::empty())
                .doing_to("setting an attribute of", path)?;
        }
        let mtime = i64::try_from(entry.header().mtime().unwrap_or(0)).unwrap_or(0);
        let stamp = Timespec {
            tv_sec: mtime,
            tv_nsec: 0,
        };
        rustix::fs::futimens(
            &file,
            &Timestamps {
                last_access: stamp,
                last_modification: stamp,
            },
        )
        .doing_to("unpacking", path)
    }

    fn symlink<R: Read>(&self, path: &Path, entry: &mut Entry<'_, R>) -> Result<()> {
        let owner = Owner::of(path, entry)?;
        let target = link_target(path, entry)?;
        let name = path
            .file_name()
            .ok_or_else(|| refused(path, "it has no name"))?;
        let parent = self.parent(path)?;
        make_room(&parent, name, path)?;
        rustix::fs::symlinkat(&target, &parent, name).doing_to("unpacking", path)?;
        rustix::fs::chownat(
            &parent,
            name,
            Some(owner.uid),
            Some(owner.gid),
            AtFlags::SYMLINK_NOFOLLOW,
        )
        .doing_to("unpacking", path)
    }

    fn hard_link<R: Read>(&self, path: &Path, entry: &mut Entry<'_, R>) -> Result<()> {
        let target = clean(&link_target(path, entry)?)?;
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
}

fn too_large(message: String) -> Error {
    Error::new(Code::TooLarge, message)
        .field("archive")
        .hint("leave out what the boxes do not need")
}

fn damaged_or_full(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Error::from(error).context("unpacking")
        }
        _ => damaged(error),
    }
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
fn clean(path: &Path) -> Result<PathBuf> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() > MAX_PATH || bytes.contains(&0) {
        return Err(refused(path, "it is no path"));
    }
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::Normal(name) => out.push(name),
            Component::ParentDir => return Err(refused(path, "it holds \"..\"")),
            Component::RootDir | Component::Prefix(_) => {
                return Err(refused(path, "it is absolute"));
            }
        }
    }
    Ok(out)
}

fn link_target<R: Read>(path: &Path, entry: &Entry<'_, R>) -> Result<PathBuf> {
    let target = entry
        .link_name()
        .map_err(damaged)?
        .ok_or_else(|| refused(path, "it links nowhere"))?;
    let bytes = target.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.len() >= MAX_PATH || bytes.contains(&0) {
        return Err(refused(path, "it links nowhere"));
    }
    Ok(target.into_owned())
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

struct Owner {
    uid: Uid,
    gid: Gid,
    mode: Mode,
}

impl Owner {
    fn of<R: Read>(path: &Path, entry: &Entry<'_, R>) -> Result<Self> {
        let header = entry.header();
        let (uid, gid) = (
            header.uid().map_err(damaged)?,
            header.gid().map_err(damaged)?,
        );
        match (u32::try_from(uid), u32::try_from(gid)) {
            (Ok(raw_uid), Ok(raw_gid)) if uid < OWNERS && gid < OWNERS => Ok(Self {
                uid: Uid::from_raw(raw_uid),
                gid: Gid::from_raw(raw_gid),
                mode: Mode::from_raw_mode(header.mode().map_err(damaged)? & 0o7777),
            }),
            _ => Err(refused(
                path,
                &format!("its owner {uid}:{gid} does not exist in a box (0 to 65535)"),
            )),
        }
    }

    /// Owner first: changing it clears the set-uid bit.
    fn give(&self, file: BorrowedFd<'_>, path: &Path) -> Result<()> {
        rustix::fs::fchown(file, Some(self.uid), Some(self.gid))
            .and_then(|()| rustix::fs::fchmod(file, self.mode))
            .doing_to("unpacking", path)
    }
}

/// File capabilities and user attributes; others mean something only to the host.
fn xattrs_of<R: Read>(path: &Path, entry: &mut Entry<'_, R>) -> Result<Vec<(OsString, Vec<u8>)>> {
    let mut out = Vec::new();
    let Some(extensions) = entry.pax_extensions().map_err(damaged)? else {
        return Ok(out);
    };
    for extension in extensions {
        let extension = extension.map_err(damaged)?;
        let Some(key) = extension
            .key()
            .ok()
            .and_then(|key| key.strip_prefix("SCHILY.xattr."))
        else {
            continue;
        };
        if key != "security.capability" && !key.starts_with("user.") {
            continue;
        }
        let value = extension.value_bytes();
        if value.len() > MAX_XATTR || key.len() > 255 {
            return Err(refused(path, "an attribute is too large"));
        }
        out.push((OsString::from(key), value.to_vec()));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_inside() {
        assert_eq!(clean(Path::new("./a/./b")).unwrap(), Path::new("a/b"));
        assert_eq!(clean(Path::new("./")).unwrap(), Path::new(""));
        for bad in ["/etc/passwd", "../x", "a/../../x", "a/.."] {
            assert!(clean(Path::new(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn other_compressions_are_named() {
        for head in [&b"\xfd7zXZ\0"[..], b"BZh9"] {
            let error = decompress(head).err().unwrap();
            assert_eq!(error.code, Code::InvalidArgument);
            assert!(error.hint.unwrap().contains("zstd"));
        }
    }
}
