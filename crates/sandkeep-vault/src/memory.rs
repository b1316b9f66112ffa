//! The files of a memory: written out, summed up and compared.

use rustix::fs::{IFlags, Mode, OFlags};
use sandkeep_model::{Error, Result};
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

/// An image is a handful of files; whatever has more was not written by an engine of ours.
pub const MOST_FILES: usize = 4096;
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

fn stamp(file: &File) -> io::Result<Stamp> {
    file.metadata().map(|meta| Stamp::of(&meta))
}

/// All files of an image, by name. Images are flat.
fn list(dir: &Path) -> Result<Vec<(String, File)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).doing_to("reading", dir)? {
        let entry = entry.doing_to("reading", dir)?;
        let name = entry.file_name().into_string().map_err(|name| {
            Error::internal(format!("an image holds a file named {}", name.display()))
        })?;
        let path = entry.path();
        let meta = entry.metadata().doing_to("looking at", &path)?;
        if !meta.is_file() || files.len() == MOST_FILES {
            return Err(Error::internal(format!(
                "{} does not belong into an image",
                path.display()
            )));
        }
        files.push((name, open(&path).doing_to("opening", &path)?));
    }
    files.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(files)
}

/// An image as it is, without sums.
pub fn look(dir: &Path) -> Result<(Vec<MemoryFile>, Stamps)> {
    let mut memory = Vec::new();
    let mut stamps = Stamps::new();
    for (name, file) in list(dir)? {
        let found = stamp(&file).doing_to("looking at", &dir.join(&name))?;
        memory.push(MemoryFile {
            name: name.clone(),
            bytes: found.bytes(),
            sum: None,
        });
        stamps.insert(name, found);
    }
    Ok((memory, stamps))
}

/// Brings an image to the disk and sums it up meanwhile. The stamps are those of what was
/// summed; there are none when a later change might not show.
pub fn write_out(dir: &Path) -> Result<(Vec<MemoryFile>, Stamps)> {
    let files = list(dir)?;
    let summed = thread::scope(|scope| {
        let written = scope.spawn(|| {
            for (name, file) in &files {
                file.sync_all().doing_to("writing out", &dir.join(name))?;
            }
            sync_dir(dir)
        });
        let summed: Result<Vec<_>> = files
            .iter()
            .map(|(name, file)| {
                let path = dir.join(name);
                let before = stamp(file).doing_to("looking at", &path)?;
                let (bytes, sum) = add_up(file, Adding::new()).doing_to("reading", &path)?;
                Ok((bytes, sum, before))
            })
            .collect();
        let written = written
            .join()
            .unwrap_or_else(|_| Err(Error::internal("writing out an image broke off")));
        written.and(summed)
    })?;
    let mut shows = true;
    let mut stamps = Stamps::new();
    let mut memory = Vec::with_capacity(files.len());
    for ((name, file), (bytes, sum, before)) in files.into_iter().zip(summed) {
        shows &= is_compared_when_read(&file) && stamp(&file).is_ok_and(|now| now == before);
        memory.push(MemoryFile {
            name: name.clone(),
            bytes,
            sum: Some(sum),
        });
        stamps.insert(name, before);
    }
    if !shows {
        stamps.clear();
    }
    Ok((memory, stamps))
}

/// Reads all of a file and says how much that was.
fn add_up(mut file: &File, mut sum: Adding) -> io::Result<(u64, Sum)> {
    let mut chunk = vec![0; CHUNK];
    let mut bytes = 0_u64;
    loop {
        let count = file.read(&mut chunk)?;
        if count == 0 {
            return Ok((bytes, sum.finish()));
        }
        sum.add(&chunk[..count]);
        bytes = bytes.saturating_add(count as u64);
    }
}

/// Whether the file system has sums of its own for this file and compares what it reads from
/// the disk with them. Files that are written in place have none.
fn is_compared_when_read(file: &File) -> bool {
    rustix::fs::ioctl_getflags(file).is_ok_and(|flags| !flags.contains(IFlags::NOCOW))
}

/// What a manifest says of a file, and the file. Whatever is wrong with one is told by its name.
pub struct Opened<'a> {
    about: &'a MemoryFile,
    file: File,
}

pub fn open_all<'a>(dir: &Path, memory: &'a [MemoryFile]) -> Result<Vec<Opened<'a>>, &'a str> {
    let one = |about: &'a MemoryFile| {
        let file = is_plain(&about.name)
            .then(|| open(&dir.join(&about.name)).ok())
            .flatten();
        file.map(|file| Opened { about, file })
            .ok_or(about.name.as_str())
    };
    memory.iter().map(one).collect()
}

pub fn stamps<'a>(files: &[Opened<'a>]) -> Result<Stamps, &'a str> {
    let one = |opened: &Opened<'a>| {
        let name = &opened.about.name;
        let found = stamp(&opened.file).map_err(|_| name.as_str())?;
        Ok((name.clone(), found))
    };
    files.iter().map(one).collect()
}

/// Reads all files through.
pub fn compare<'a>(files: &[Opened<'a>]) -> Result<(), &'a str> {
    for Opened { about, file } in files {
        let same = about.sum.as_ref().is_some_and(|sum| {
            add_up(file, sum.again())
                .is_ok_and(|(bytes, found)| bytes == about.bytes && found == *sum)
        });
        if !same {
            return Err(&about.name);
        }
    }
    Ok(())
}

pub fn are_compared_when_read(files: &[Opened<'_>]) -> bool {
    files
        .iter()
        .all(|opened| is_compared_when_read(&opened.file))
}
