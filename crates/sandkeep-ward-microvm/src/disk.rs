//! The disk of a box: one file with a file system in it.
//!
//! It is made once for each template; copies share its blocks. A copy is as large as what the
//! template holds and the box may write beyond that: the box sees its limit as the size of its
//! disk.

use crate::{
    jail::{Bounds, Jail},
    launch::LARGEST_DISK,
};
use rustix::fs::OFlags;
use sandkeep_host::failure::Doing as _;
use sandkeep_model::{Code, Error, Limits, Result, human_bytes, random_token};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::{self, Read as _},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

/// In the root of a box.
pub const DISK_FILE: &str = "disk.ext4";
const NOTE: &str = "disk.json";
/// Beyond the files themselves: the journal, tables of inodes, and air.
const SLACK: u64 = 96 << 20;
const MOST_NOTE: u64 = 4 << 10;
const TOKEN: usize = 20;
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
        template: Some(random_token(TOKEN)),
    };
    note.write(into)
}

impl Note {
    /// It may come from another server: what it says becomes the name of a file and a size.
    fn read(root: &Path) -> Result<Self> {
        let mut text = Vec::new();
        open_at(&root.join(NOTE), false)
            .and_then(|file| file.take(MOST_NOTE).read_to_end(&mut text))
            .doing("reading the note of the disk")?;
        let note: Self = serde_json::from_slice(&text)
            .map_err(|error| Error::internal(format!("the note of the disk: {error}")))?;
        let plain = |token: &String| {
            token.len() == TOKEN && token.bytes().all(|byte| byte.is_ascii_alphanumeric())
        };
        if note.template.as_ref().is_some_and(|token| !plain(token)) {
            return Err(Error::internal("the note of the disk names no template"));
        }
        Ok(note)
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
            .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
            .open(to)?;
        rustix::fs::ioctl_ficlone(&to, File::open(from)?)?;
        Ok::<_, io::Error>(())
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

/// Gives a disk the size its limit says; one that is larger stays as it is. `id` is nobody's
/// but this box's: a box may have written the disk, so programs that read it have no more rights
/// than its QEMU.
pub fn size(root: &Path, limits: &Limits, id: u32) -> Result<()> {
    let note = Note::read(root)?;
    let wanted = note.wanted(limits);
    let [disk, _] = open(root)?;
    let file = File::from(disk);
    let there = file.metadata().doing("looking at the disk")?.len();
    if wanted <= there {
        return Ok(());
    }
    if wanted > LARGEST_DISK {
        return Err(cannot_grow(wanted, "no machine has a disk that large"));
    }
    file.set_len(wanted).doing("growing the disk")?;
    // It is handed over open, but such programs open what they work on: by the name that their
    // descriptor has, and with their own rights.
    let own = |id: u32| std::os::unix::fs::fchown(&file, Some(id), Some(id));
    own(id).doing("handing the disk over")?;
    let grown = grow(&file, &note, wanted, id);
    own(0).doing("taking the disk back")?;
    grown
}

fn grow(file: &File, note: &Note, wanted: u64, id: u32) -> Result<()> {
    let bounds = Bounds {
        memory: 1 << 30,
        file: wanted,
        cpu_seconds: 60,
        wait: Duration::from_secs(120),
    };
    // What its last kernel had noted down to do must be done first: done later, by the next
    // kernel, it would undo the growth. Nobody has used a fresh one.
    let replay: &[(&str, &[&str])] = &[("e2fsck", &["-p", "-E", "journal_only"])];
    let replay = if note.template.is_none() { replay } else { &[] };
    // Forced, because it would like to look at the whole of it first.
    for (program, words) in replay.iter().chain([&("resize2fs", &["-f"][..])]) {
        let mut command = Command::new(program);
        command
            .args(*words)
            .arg(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin")
            // Whether it is mounted somewhere can not be seen in the jail.
            .env("EXT2FS_NO_MTAB_OK", "1");
        let mut jail = Jail::for_one_task(id, bounds);
        jail.keep(file.as_raw_fd());
        let ended = jail.run(command)?;
        // 1 of e2fsck: there was something to do, and it is done.
        let fine = ended.status.success() || *program == "e2fsck" && ended.status.code() == Some(1);
        if ended.late {
            return Err(cannot_grow(wanted, &format!("{program} does not end")));
        }
        if !fine {
            let said = match ended.said.lines().last() {
                Some(line) => line.chars().filter(|c| !c.is_control()).collect(),
                None => ended.status.to_string(),
            };
            return Err(cannot_grow(wanted, &format!("{program}: {said}")));
        }
    }
    Ok(())
}

fn cannot_grow(wanted: u64, why: &str) -> Error {
    Error::conflict(format!(
        "the disk can not be grown to {}: {why}",
        human_bytes(wanted)
    ))
    .hint("a box may have damaged its disk; use another point, or one with its memory")
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
        open_at(path, write).map(OwnedFd::from).map_err(|error| {
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

/// A file, and not what a link or a pipe from elsewhere leads to.
fn open_at(path: &Path, write: bool) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(write)
        .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed())
        .open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::other("it is no file"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::fs::symlink, path::PathBuf};

    /// Nobody's.
    const ID: u32 = 1_900_000_001;

    fn limits(disk_mib: u64) -> Limits {
        Limits {
            disk_mib,
            ..Limits::default()
        }
    }

    /// A small disk as templates have it.
    fn made(dir: &Path) -> PathBuf {
        let (tree, root) = (dir.join("tree"), dir.join("root"));
        fs::create_dir_all(tree.join("etc")).unwrap();
        fs::create_dir_all(&root).unwrap();
        fs::write(tree.join("etc/file"), "here").unwrap();
        make(&tree, &root).unwrap();
        root
    }

    fn tool(words: &[&str], root: &Path) -> String {
        let (program, words) = words.split_first().unwrap();
        let output = Command::new(format!("/usr/sbin/{program}"))
            .args(words)
            .arg(root.join(DISK_FILE))
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        String::from_utf8_lossy(&text).into_owned()
    }

    #[test]
    fn fresh_and_used_disks_grow_and_stay_sound() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        crate::jail::prepare_host().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let root = made(dir.path());
        for (mib, used) in [(300, false), (500, true)] {
            if used {
                use_up(&root).unwrap();
                // As the kernel of a box leaves it when its disk is copied.
                tool(&["debugfs", "-w", "-R", "feature needs_recovery"], &root);
                assert!(tool(&["dumpe2fs", "-h"], &root).contains("needs_recovery"));
            }
            size(&root, &limits(mib), ID).unwrap();
            let about = tool(&["dumpe2fs", "-h"], &root);
            let blocks = Note::read(&root).unwrap().wanted(&limits(mib)) / 4096;
            let line = about.lines().find(|line| line.starts_with("Block count"));
            let line = line.unwrap_or(&about);
            assert!(line.ends_with(&format!(" {blocks}")), "{about}");
            assert!(!about.contains("needs_recovery"), "{about}");
            let checked = tool(&["e2fsck", "-fn"], &root);
            assert!(!checked.contains("WARNING"), "{checked}");
            // It is the host's again.
            let found = fs::metadata(root.join(DISK_FILE)).unwrap();
            assert_eq!((found.uid(), found.gid()), (0, 0));
        }
        let stays = fs::metadata(root.join(DISK_FILE)).unwrap().len();
        size(&root, &limits(100), ID).unwrap();
        assert_eq!(fs::metadata(root.join(DISK_FILE)).unwrap().len(), stays);
    }

    #[test]
    fn a_disk_that_is_none_is_refused_in_words() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        crate::jail::prepare_host().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let root = made(dir.path());
        use_up(&root).unwrap();
        let whole = fs::read(root.join(DISK_FILE)).unwrap();
        let wreck = |wreck: &dyn Fn(&mut [u8])| {
            let mut bytes = whole.clone();
            // The superblock and the table of groups.
            wreck(&mut bytes[1024..12_288]);
            fs::write(root.join(DISK_FILE), bytes).unwrap();
            let refused = size(&root, &limits(300), ID).unwrap_err();
            assert_eq!(refused.code, Code::Conflict, "{refused}");
            assert!(refused.message.contains("can not be grown"), "{refused}");
            assert!(!refused.message.contains(char::is_control), "{refused}");
            let found = fs::metadata(root.join(DISK_FILE)).unwrap();
            assert_eq!(found.uid(), 0);
        };
        wreck(&|bytes| bytes.fill(0));
        wreck(&|bytes| bytes.fill(0xff));
        // Without features there are no sums: what it says is believed as far as it goes.
        wreck(&|bytes| {
            bytes[0x5c..0x68].fill(0);
            bytes[..0x2c].fill(0xff);
        });
        fs::remove_file(root.join(DISK_FILE)).unwrap();
        symlink("/etc/passwd", root.join(DISK_FILE)).unwrap();
        let refused = size(&root, &limits(300), ID).unwrap_err();
        assert_eq!(refused.code, Code::NotEnforceable, "{refused}");
        share(&root.join(NOTE), &root.join(DISK_FILE)).unwrap_err();
    }

    /// A note from elsewhere is no way to a file of the host, nor to a disk without end.
    #[test]
    fn hostile_notes_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let fresh_of = |text: &str| {
            fs::write(root.join(NOTE), text).unwrap();
            fresh(root, &limits(1))
        };
        let token = "a".repeat(TOKEN);
        let good = format!(r#"{{"template_bytes": 1, "template": "{token}"}}"#);
        assert_eq!(fresh_of(&good).unwrap().unwrap().template, token);
        assert_eq!(fresh_of(r#"{"template_bytes": 1}"#).unwrap(), None);
        for template in [
            "",
            "../../../x",
            "aaaaaaaaaaaaaaaa/../",
            "a",
            &"a".repeat(21),
        ] {
            let text = format!(r#"{{"template_bytes": 1, "template": "{template}"}}"#);
            fresh_of(&text).expect_err(template);
        }
        fresh_of(&format!("{}{good}", " ".repeat(MOST_NOTE as usize))).unwrap_err();
        fs::write(root.join(DISK_FILE), "").unwrap();
        for bytes in [u64::MAX, LARGEST_DISK] {
            fs::write(root.join(NOTE), format!(r#"{{"template_bytes": {bytes}}}"#)).unwrap();
            let refused = size(root, &limits(1), ID).unwrap_err();
            assert!(refused.message.contains("that large"), "{refused}");
        }
        fs::remove_file(root.join(NOTE)).unwrap();
        symlink("/etc/hostname", root.join(NOTE)).unwrap();
        Note::read(root).unwrap_err();
        fs::remove_file(root.join(NOTE)).unwrap();
        // Nobody would ever write to it.
        rustix::fs::mknodat(
            rustix::fs::CWD,
            root.join(NOTE),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        Note::read(root).unwrap_err();
    }
}
