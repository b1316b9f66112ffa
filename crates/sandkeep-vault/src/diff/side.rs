//! The trees that can be compared.

use sandkeep_model::Result;
use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, Metadata},
    io::Read,
    os::unix::{ffi::OsStringExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use crate::doing::Doing as _;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    File,
    Dir,
    Link,
    Other,
}

/// When and where a file was changed last: two that are the same were not touched in between.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stamp {
    /// As the kernel of the host says.
    Host {
        inode: u64,
        seconds: i64,
        nanoseconds: i64,
    },
    /// As the kernel of the box says, with all its times.
    Box(Box<ext4_view::Metadata>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub kind: Kind,
    pub size: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub stamp: Stamp,
    /// When its content was changed last, where reading may not show it.
    pub modified: Option<(i64, u32)>,
}

impl Node {
    pub fn is_dir(&self) -> bool {
        self.kind == Kind::Dir
    }

    pub fn is_in_image(&self) -> bool {
        matches!(self.stamp, Stamp::Box(_))
    }
}

pub type Entries = BTreeMap<OsString, Node>;

/// A tree of files. Paths are relative to its root; no link is followed.
pub trait Side {
    fn entries(&self, dir: &Path) -> Result<Entries>;
    fn link(&self, path: &Path) -> Result<Vec<u8>>;
    fn open(&self, path: &Path) -> Result<Box<dyn Read + '_>>;
}

/// One in a directory of the host.
pub struct Directory<'a>(pub &'a Path);

impl Side for Directory<'_> {
    fn entries(&self, dir: &Path) -> Result<Entries> {
        let found = entries(Some(self.0.join(dir)))?;
        Ok(found
            .into_iter()
            .map(|(name, meta)| (name, node(&meta)))
            .collect())
    }

    fn link(&self, path: &Path) -> Result<Vec<u8>> {
        let path = self.0.join(path);
        let target = fs::read_link(&path).doing_to("reading", &path)?;
        Ok(target.into_os_string().into_vec())
    }

    fn open(&self, path: &Path) -> Result<Box<dyn Read + '_>> {
        let path = self.0.join(path);
        let file = fs::File::open(&path).doing_to("reading", &path)?;
        Ok(Box::new(file))
    }
}

fn node(meta: &Metadata) -> Node {
    let kind = match meta.file_type() {
        kind if kind.is_dir() => Kind::Dir,
        kind if kind.is_file() => Kind::File,
        kind if kind.is_symlink() => Kind::Link,
        _ => Kind::Other,
    };
    Node {
        kind,
        size: meta.size(),
        mode: meta.mode(),
        uid: meta.uid(),
        gid: meta.gid(),
        stamp: Stamp::Host {
            inode: meta.ino(),
            seconds: meta.ctime(),
            nanoseconds: meta.ctime_nsec(),
        },
        modified: None,
    }
}

/// What is in a directory, by name.
pub fn entries(dir: Option<PathBuf>) -> Result<BTreeMap<OsString, Metadata>> {
    let mut out = BTreeMap::new();
    let Some(dir) = dir else {
        return Ok(out);
    };
    for entry in fs::read_dir(&dir).doing_to("reading", &dir)? {
        let entry = entry.doing_to("reading", &dir)?;
        let meta = entry.metadata().doing_to("looking at", &entry.path())?;
        out.insert(entry.file_name(), meta);
    }
    Ok(out)
}
