//! Unpacking a root file system from a tar that nobody vouches for.

use rustix::fs::Timespec;
use sandkeep_model::{Error, Result};
use std::{
    ffi::OsString,
    io::{self, BufReader, Read},
    os::{fd::AsFd as _, unix::ffi::OsStrExt as _},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tar::{Archive, Entry, EntryType};

use crate::{
    doing::Doing as _,
    progress::{Progress, Stage},
    tree::{About, MAX_XATTR, Tree, clean, damaged, refused},
};

/// What an archive may hold at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    let mut tree = Tree::new(root.as_fd(), *limits);
    let mut skipped = 0_u64;
    let mut last = -1.0_f32;
    for entry in archive.entries().map_err(damaged)? {
        if !put(&mut tree, &mut entry.map_err(damaged)?)? {
            skipped += 1;
        }
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
    if tree.used().entries == 0 {
        return Err(Error::invalid("archive", "the archive is empty")
            .hint("give a tar of a root file system"));
    }
    if skipped > 0 {
        tracing::info!(skipped, "device nodes and the like left out");
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

/// `false`: it is of a kind that is left out.
fn put<R: Read>(tree: &mut Tree<'_>, entry: &mut Entry<'_, R>) -> Result<bool> {
    let kind = entry.header().entry_type();
    if kind.is_pax_global_extensions() {
        return Ok(true);
    }
    let given = entry.path().map_err(damaged)?.into_owned();
    let path = clean(&given)?;
    tree.take_entry()?;
    match kind {
        EntryType::Directory => tree.directory(&path, &about(&path, entry)?)?,
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
            let mut about = about(&path, entry)?;
            about.xattrs = xattrs_of(&path, entry)?;
            let seconds = entry.header().mtime().unwrap_or(0);
            about.modified = Some(Timespec {
                tv_sec: i64::try_from(seconds).unwrap_or(0),
                tv_nsec: 0,
            });
            let size = entry.size();
            tree.file(&path, &about, entry, size, None)?;
        }
        EntryType::Symlink => {
            let target = link_target(&path, entry)?;
            tree.symlink(&path, &about(&path, entry)?, &target)?;
        }
        EntryType::Link => tree.hard_link(&path, &link_target(&path, entry)?)?,
        // Devices are given to a box by its ward; pipes nobody ships.
        _ => return Ok(false),
    }
    Ok(true)
}

fn about<R: Read>(path: &Path, entry: &Entry<'_, R>) -> Result<About> {
    let header = entry.header();
    About::new(
        path,
        header.uid().map_err(damaged)?,
        header.gid().map_err(damaged)?,
        header.mode().map_err(damaged)?,
    )
}

fn link_target<R: Read>(path: &Path, entry: &Entry<'_, R>) -> Result<PathBuf> {
    let target = entry
        .link_name()
        .map_err(damaged)?
        .ok_or_else(|| refused(path, "it links nowhere"))?;
    if target.as_os_str().as_bytes().is_empty() {
        return Err(refused(path, "it links nowhere"));
    }
    Ok(target.into_owned())
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
    use sandkeep_model::Code;

    #[test]
    fn other_compressions_are_named() {
        for head in [&b"\xfd7zXZ\0"[..], b"BZh9"] {
            let error = decompress(head).err().unwrap();
            assert_eq!(error.code, Code::InvalidArgument);
            assert!(error.hint.unwrap().contains("zstd"));
        }
    }
}
