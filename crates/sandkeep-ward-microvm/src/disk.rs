//! The disk of a box: one file with a file system in it.
//!
//! It is made once for each template; copies share its blocks. A copy is as large as what the
//! template holds and the box may write beyond that: the box sees its limit as the size of its
//! disk.

use rustix::fs::OFlags;
use sandkeep_host::failure::Doing as _;
use sandkeep_model::{Code, Error, Limits, Result, random_token};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    os::{
        fd::OwnedFd,
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::Path,
    process::{Command, Stdio},
};

/// In the root of a box.
pub const DISK_FILE: &str = "disk.ext4";
const NOTE: &str = "disk.json";
/// Beyond the files themselves: the journal, tables of inodes, and air.
const SLACK: u64 = 96 << 20;
const MIB: u64 = 1 << 20;

#[derive(Debug, Serialize, Deserialize)]
struct Note {
    /// The size of the file system as it was made.
    template_bytes: u64,
    /// Tells this template from every other, as long as no box has used the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    template: Option<String>,
}

/// A disk that is as it was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fresh {
    pub template: String,
    /// The size it is to have.
    pub bytes: u64,
}

/// Makes a disk of a tree of files. Blocks; takes seconds.
pub fn make(tree: &Path, into: &Path) -> Result<()> {
    let used = bytes_in(tree)?;
    let size = (used + used / 4 + SLACK).next_multiple_of(MIB);
    let path = into.join(DISK_FILE);
    let mut make = Command::new("mkfs.ext4");
    make.args(["-q", "-F", "-b", "4096", "-m", "0", "-J", "size=16"])
        .args(["-E", "lazy_itable_init=1,lazy_journal_init=1", "-d"])
        .arg(tree)
        .arg(&path)
        .arg(format!("{}k", size / 1024));
    run(&mut make)?;
    let note = Note {
        template_bytes: size,
        template: Some(random_token(20)),
    };
    note.write(into)
}

impl Note {
    fn read(root: &Path) -> Result<Self> {
        let text = fs::read(root.join(NOTE)).doing("reading the note of the disk")?;
        serde_json::from_slice(&text)
            .map_err(|error| Error::internal(format!("the note of the disk: {error}")))
    }

    fn write(&self, root: &Path) -> Result<()> {
        let text = serde_json::to_vec(self).map_err(|error| Error::internal(error.to_string()))?;
        fs::write(root.join(NOTE), text).doing("writing the note of the disk")?;
        Ok(())
    }

    const fn wanted(&self, limits: &Limits) -> u64 {
        self.template_bytes.saturating_add(limits.disk_bytes())
    }
}

/// Whether no box has used a disk, and which template it is then.
pub fn fresh(root: &Path, limits: &Limits) -> Result<Option<Fresh>> {
    let note = Note::read(root)?;
    let bytes = note.wanted(limits);
    Ok(note.template.map(|template| Fresh { template, bytes }))
}

/// From now on a box may have written to the disk: copies of it are not fresh either. Before
/// the box begins.
pub fn use_up(root: &Path) -> Result<()> {
    let mut note = Note::read(root)?;
    if note.template.take().is_some() {
        note.write(root)?;
    }
    Ok(())
}

/// Has a file share the blocks of another, instead of its own.
pub fn share(from: &Path, to: &Path) -> Result<()> {
    let shared = || {
        let to = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(to)?;
        rustix::fs::ioctl_ficlone(&to, File::open(from)?)?;
        Ok::<_, std::io::Error>(())
    };
    shared().doing("copying a disk").map_err(Error::from)
}

/// What the files take in blocks of the new file system; hard links count once.
fn bytes_in(tree: &Path) -> Result<u64> {
    let mut seen = std::collections::HashSet::new();
    let mut stack = vec![tree.to_owned()];
    let mut total = 0_u64;
    while let Some(dir) = stack.pop() {
        let entries = fs::read_dir(&dir).doing(format_args!("reading {}", dir.display()))?;
        for entry in entries {
            let entry = entry.doing(format_args!("reading {}", dir.display()))?;
            let found = entry
                .metadata()
                .doing(format_args!("looking at {}", entry.path().display()))?;
            if found.is_dir() {
                stack.push(entry.path());
            } else if found.nlink() > 1 && !seen.insert(found.ino()) {
                continue;
            }
            // Its blocks and its inode.
            total += found.len().next_multiple_of(4096) + 256;
        }
    }
    Ok(total)
}

/// Gives a disk the size its limit says; one that is larger stays as it is.
pub fn size(root: &Path, limits: &Limits) -> Result<()> {
    let wanted = Note::read(root)?.wanted(limits);
    let [disk, _] = open(root)?;
    let file = File::from(disk);
    let there = file.metadata().doing("looking at the disk")?.len();
    if wanted <= there {
        return Ok(());
    }
    file.set_len(wanted).doing("growing the disk")?;
    // Forced, because it would like to look at the whole of it first: nobody has used it yet.
    run(Command::new("resize2fs")
        .arg("-f")
        .arg(root.join(DISK_FILE)))
}

fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().display().to_string();
    let output = command
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .stdin(Stdio::null())
        .output()
        .doing(format_args!("running {name}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said: String = said.trim().chars().take(500).collect();
    Err(Error::internal(format!("{name}: {said}")))
}

/// To read and write, and to read: QEMU asks for both.
pub fn open(root: &Path) -> Result<[OwnedFd; 2]> {
    open_file(&root.join(DISK_FILE))
}

pub fn open_file(path: &Path) -> Result<[OwnedFd; 2]> {
    let open = |write: bool| {
        File::options()
            .read(true)
            .write(write)
            .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
            .open(path)
            .map(OwnedFd::from)
            .map_err(|error| {
                Error::new(
                    Code::NotEnforceable,
                    format!(
                        "{} can not be opened as the disk of a machine: {error}",
                        path.display()
                    ),
                )
                .hint("a point made at another isolation level can not be used at this one")
            })
    };
    Ok([open(true)?, open(false)?])
}
