//! The files of a memory: written out, summed up and compared.

use rustix::fs::{IFlags, Mode, OFlags};
use sandkeep_model::{Code, Error, Result};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::Path,
    thread,
};

use crate::{
    doing::Doing as _,
    staging::sync_dir,
    sum::{Adding, Sum},
    verified::{Stamp, Stamps},
};

/// An image has some seven files for each process.
pub const MOST_FILES: usize = 1 << 15;
const CHUNK: usize = 1 << 20;

/// A file of the memory, and what must be in it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MemoryFile {
    pub name: String,
    pub bytes: u64,
    /// `None` in a point for one run of the server alone.
    #[serde(flatten)]
    pub sum: Option<Sum>,
}

/// A name of one file, and nothing that leads elsewhere.
pub fn is_plain(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && name.len() <= 255 && !name.contains(['/', '\0'])
}

fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// The names of all files of an image. Images are flat.
fn list(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).doing_to("reading", dir)? {
        let entry = entry.doing_to("reading", dir)?;
        let name = entry.file_name().into_string().map_err(|name| {
            Error::internal(format!("an image holds a file named {}", name.display()))
        })?;
        let path = entry.path();
        let meta = entry.metadata().doing_to("looking at", &path)?;
        if !meta.is_file() {
            return Err(Error::internal(format!(
                "\"{}\" does not belong into an image",
                name.escape_debug()
            )));
        }
        if names.len() == MOST_FILES {
            return Err(Error::new(
                Code::TooLarge,
                format!("an image has at most {MOST_FILES} files, about seven for each process"),
            )
            .hint("end processes that are not needed"));
        }
        names.push(name);
    }
    names.sort();
    Ok(names)
}

/// An image as it is, without sums.
pub fn look(dir: &Path) -> Result<(Vec<MemoryFile>, Stamps)> {
    let mut memory = Vec::new();
    let mut stamps = Stamps::new();
    for name in list(dir)? {
        let path = dir.join(&name);
        let meta = fs::symlink_metadata(&path).doing_to("looking at", &path)?;
        memory.push(MemoryFile {
            name: name.clone(),
            bytes: meta.len(),
            sum: None,
        });
        stamps.insert(name, Stamp::of(&meta));
    }
    Ok((memory, stamps))
}

/// Brings an image to the disk and sums it up meanwhile. The stamps are those of what was
/// summed; there are none when a later change might not show.
pub fn write_out(dir: &Path) -> Result<(Vec<MemoryFile>, Stamps)> {
    let names = list(dir)?;
    let read = thread::scope(|scope| {
        let written = scope.spawn(|| {
            for name in &names {
                let path = dir.join(name);
                open(&path)
                    .and_then(|file| file.sync_all())
                    .doing_to("writing out", &path)?;
            }
            sync_dir(dir)
        });
        let read: Result<Vec<_>> = names
            .iter()
            .map(|name| {
                let path = dir.join(name);
                read_through(&path, Adding::new()).doing_to("reading", &path)
            })
            .collect();
        let written = written
            .join()
            .unwrap_or_else(|_| Err(Error::internal("writing out an image broke off")));
        written.and(read)
    })?;
    let mut stamps = AllStamps::default();
    let mut memory = Vec::with_capacity(names.len());
    for (name, read) in names.into_iter().zip(read) {
        stamps.add(&name, read.stamp);
        memory.push(MemoryFile {
            name,
            bytes: read.bytes,
            sum: Some(read.sum),
        });
    }
    Ok((memory, stamps.finish()))
}

struct Read {
    bytes: u64,
    sum: Sum,
    /// `None` when a change might not show in it.
    stamp: Option<Stamp>,
}

fn read_through(path: &Path, mut sum: Adding) -> io::Result<Read> {
    let mut file = open(path)?;
    let before = Stamp::of(&file.metadata()?);
    let mut chunk = vec![0; CHUNK];
    let mut bytes = 0_u64;
    loop {
        let count = file.read(&mut chunk)?;
        if count == 0 {
            break;
        }
        sum.add(&chunk[..count]);
        bytes = bytes.saturating_add(count as u64);
    }
    let same = Stamp::of(&file.metadata()?) == before;
    Ok(Read {
        bytes,
        sum: sum.finish(),
        stamp: (same && is_compared_when_read(&file)).then_some(before),
    })
}

/// Whether the file system has sums of its own for this file and compares what it reads from
/// the disk with them. Files that are written in place have none.
fn is_compared_when_read(file: &File) -> bool {
    rustix::fs::ioctl_getflags(file).is_ok_and(|flags| !flags.contains(IFlags::NOCOW))
}

/// All or none.
#[derive(Default)]
struct AllStamps {
    found: Stamps,
    missing: bool,
}

impl AllStamps {
    fn add(&mut self, name: &str, stamp: Option<Stamp>) {
        match stamp {
            Some(stamp) => {
                self.found.insert(name.to_owned(), stamp);
            }
            None => self.missing = true,
        }
    }

    fn finish(self) -> Stamps {
        if self.missing {
            Stamps::new()
        } else {
            self.found
        }
    }
}

/// What the files of an image look like now, or the name of one that is not there.
pub fn stamps<'a>(dir: &Path, memory: &'a [MemoryFile]) -> Result<Stamps, &'a str> {
    let one = |about: &'a MemoryFile| {
        let meta = is_plain(&about.name)
            .then(|| fs::symlink_metadata(dir.join(&about.name)).ok())
            .flatten()
            .filter(fs::Metadata::is_file)
            .ok_or(about.name.as_str())?;
        Ok((about.name.clone(), Stamp::of(&meta)))
    };
    memory.iter().map(one).collect()
}

/// Reads all files through, or names the first that is not what was written. The stamps are as
/// those of [`write_out`].
pub fn compare<'a>(dir: &Path, memory: &'a [MemoryFile]) -> Result<Stamps, &'a str> {
    let mut stamps = AllStamps::default();
    for about in memory {
        let read = about
            .sum
            .as_ref()
            .and_then(|sum| read_through(&dir.join(&about.name), sum.again()).ok())
            .filter(|read| read.bytes == about.bytes && Some(&read.sum) == about.sum.as_ref())
            .ok_or(about.name.as_str())?;
        stamps.add(&about.name, read.stamp);
    }
    Ok(stamps.finish())
}
