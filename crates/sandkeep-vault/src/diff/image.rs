//! A tree in the image of a disk, read without the help of any kernel.
//!
//! The box wrote every byte of it. What the library allocates by numbers in the image is
//! checked before; everything else is bounded by the limits of the process this runs in.

use ext4_view::{Ext4, Ext4Error, Ext4Read, FileType, Metadata};
use sandkeep_model::{Code, Error, Result};
use std::{
    cell::Cell,
    ffi::OsString,
    fs::File,
    io::{self, Read},
    os::unix::{
        ffi::{OsStrExt as _, OsStringExt as _},
        fs::FileExt as _,
    },
    path::Path,
};

use super::side::{Entries, Kind, Node, Side, Stamp};

const SUPERBLOCK: u64 = 1024;
const SUPERBLOCK_BYTES: usize = 1024;
/// Fewer blocks in a group only make more groups; no tool makes such file systems.
const SMALLEST_GROUP: u32 = 256;
/// More files than this are no box anybody compares.
const MOST_ENTRIES: u64 = 4_000_000;
const LONGEST_LINK: u64 = 4096;

pub struct Image {
    fs: Ext4,
    entries_left: Cell<u64>,
}

impl Image {
    pub fn open(file: File) -> Result<Self> {
        check(&file)?;
        let fs = Ext4::load(Box::new(Blocks(file))).map_err(|error| damaged(&error))?;
        Ok(Self {
            fs,
            entries_left: Cell::new(MOST_ENTRIES),
        })
    }
}

impl Side for Image {
    fn entries(&self, dir: &Path) -> Result<Entries> {
        let mut out = Entries::new();
        let path = in_image(dir);
        let listed = self
            .fs
            .read_dir(path.as_slice())
            .map_err(|error| damaged(&error))?;
        for entry in listed {
            let entry = entry.map_err(|error| damaged(&error))?;
            let name = entry.file_name().as_ref().to_vec();
            if name == b"." || name == b".." {
                continue;
            }
            let left = self.entries_left.get().checked_sub(1);
            self.entries_left.set(left.ok_or_else(|| {
                Error::new(
                    Code::TooLarge,
                    format!("there are more than {MOST_ENTRIES} files on the disk"),
                )
            })?);
            let metadata = entry.metadata().map_err(|error| damaged(&error))?;
            out.insert(OsString::from_vec(name), node(&metadata));
        }
        Ok(out)
    }

    fn link(&self, path: &Path) -> Result<Vec<u8>> {
        let path = in_image(path);
        let length = self
            .fs
            .symlink_metadata(path.as_slice())
            .map_err(|error| damaged(&error))?
            .len();
        if length > LONGEST_LINK {
            return Err(no_disk("a link is longer than any path"));
        }
        let target = self
            .fs
            .read_link(path.as_slice())
            .map_err(|error| damaged(&error))?;
        Ok(target.as_ref().to_vec())
    }

    fn open(&self, path: &Path) -> Result<Box<dyn Read + '_>> {
        let file = self
            .fs
            .open(in_image(path).as_slice())
            .map_err(|error| damaged(&error))?;
        Ok(Box::new(Content(file)))
    }
}

fn in_image(path: &Path) -> Vec<u8> {
    [b"/", path.as_os_str().as_bytes()].concat()
}

fn node(metadata: &Metadata) -> Node {
    let kind = match metadata.file_type() {
        FileType::Directory => Kind::Dir,
        FileType::Regular => Kind::File,
        FileType::Symlink => Kind::Link,
        _ => Kind::Other,
    };
    let modified = metadata.modified();
    Node {
        kind,
        size: metadata.len(),
        mode: metadata.mode().into(),
        uid: metadata.uid(),
        gid: metadata.gid(),
        stamp: Stamp::Box(Box::new(metadata.clone())),
        // Blocks that were set aside and never written are read by the library as if they
        // had been: what was written near them may be missed, but not when.
        modified: Some((modified.seconds(), modified.nanoseconds())),
    }
}

struct Content(ext4_view::File);

impl Read for Content {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read_bytes(into).map_err(io::Error::other)
    }
}

struct Blocks(File);

impl Ext4Read for Blocks {
    fn read(
        &mut self,
        start: u64,
        into: &mut [u8],
    ) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync + 'static>> {
        self.0.read_exact_at(into, start).map_err(Into::into)
    }
}

/// What the library takes from the superblock to decide how much memory it needs.
fn check(file: &File) -> Result<()> {
    let cut = |error: io::Error| no_disk(&format!("it can not be read: {error}"));
    let length = file.metadata().map_err(cut)?.len();
    let mut block = [0; SUPERBLOCK_BYTES];
    file.read_exact_at(&mut block, SUPERBLOCK).map_err(cut)?;
    let number = |at: usize| {
        let bytes = block[at..at + 4].try_into().unwrap_or_default();
        u32::from_le_bytes(bytes)
    };
    let blocks = u64::from(number(0x4)) | u64::from(number(0x150)) << 32;
    let size = 1024_u64.checked_shl(number(0x18)).unwrap_or(0);
    if !(1024..=65_536).contains(&size) {
        return Err(no_disk("its blocks have no size"));
    }
    if blocks.checked_mul(size).is_none_or(|bytes| bytes > length) {
        return Err(no_disk("it says that it is larger than it is"));
    }
    if number(0x20) < SMALLEST_GROUP {
        return Err(no_disk("its groups of blocks are too small"));
    }
    Ok(())
}

fn damaged(error: &Ext4Error) -> Error {
    match error {
        Ext4Error::PathTooLong => Error::new(Code::TooLarge, "a path on the disk is too long"),
        other => no_disk(&other.to_string()),
    }
}

fn no_disk(why: &str) -> Error {
    Error::conflict(format!("the disk of a point can not be read: {why}")).hint(
        "the box may have damaged it, or have written to it at that moment; use another point",
    )
}
