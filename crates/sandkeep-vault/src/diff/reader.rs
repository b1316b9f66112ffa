//! Disks that boxes wrote are read by a process of their own: it has no rights, little memory
//! and little time, and nothing but the two files.

use rustix::{
    fs::{Gid, Uid},
    process::{Resource, Rlimit, setrlimit},
    thread::{
        UnshareFlags, set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
        unshare_unsafe,
    },
};
use sandkeep_model::{Code, Error, Result};
use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::{fs::OpenOptionsExt as _, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use super::{Diff, compare, image::Image};
use crate::doing::Doing as _;

const WITH_TEXT: &str = "--text";
const NOBODY: u32 = 65_534;
const MEMORY: u64 = 2 << 30;
const CPU_SECONDS: u64 = 120;
/// Waiting for the disk of the host is no fault of the box.
const WAIT: Duration = Duration::from_secs(300);
/// More than the longest list with the longest texts.
const MOST_ANSWER: u64 = 64 << 20;

/// The program that reads disks: one whose `main` calls [`main`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskReader {
    pub program: PathBuf,
    pub args: Vec<String>,
}

/// Compares two images. Blocks.
pub fn read(reader: &DiskReader, before: &Path, after: &Path, with_text: bool) -> Result<Diff> {
    let open = |path: &Path| {
        File::options()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path)
            .doing_to("opening", path)
    };
    let disks = [OwnedFd::from(open(before)?), OwnedFd::from(open(after)?)];
    // Opened with our rights: it may lie where nobody else may go, as in the home of root.
    let program = File::open(&reader.program).doing_to("opening", &reader.program)?;
    let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
    command
        .args(&reader.args)
        .args(disks.iter().map(|disk| disk.as_raw_fd().to_string()))
        .args(with_text.then_some(WITH_TEXT))
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    // SAFETY: between fork and exec only `lock_in` runs, which makes system calls on memory that
    // is there; it neither allocates nor takes a lock.
    unsafe { command.pre_exec(move || lock_in(&disks)) };
    let mut child = command.spawn().doing("starting the reader of disks")?;
    // With the command goes our hold on the disks.
    drop(command);
    let answer = child.stdout.take();
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = answer.map_or(Ok(0), |pipe| pipe.take(MOST_ANSWER).read_to_end(&mut bytes));
        // Who asked may have given up.
        let _gone = tell.send(read.map(|_| bytes));
    });
    let answer = told.recv_timeout(WAIT);
    let _ended_already = child.kill();
    let status = child.wait().doing("waiting for the reader of disks")?;
    let gave_up = || {
        Error::new(
            Code::TooLarge,
            format!("the disks could not be compared within bounds ({status})"),
        )
        .hint("a box may have made its disk hard to read; copy the files out and compare those")
    };
    let bytes = match answer {
        Ok(read) => read.doing("reading what is different")?,
        Err(_) => return Err(gave_up()),
    };
    serde_json::from_slice::<std::result::Result<Diff, Error>>(&bytes).map_err(|_| gave_up())?
}

/// Between fork and exec: two files stay open, and then no rights.
fn lock_in(disks: &[OwnedFd; 2]) -> io::Result<()> {
    for disk in disks {
        rustix::io::fcntl_setfd(disk, rustix::io::FdFlags::empty())?;
    }
    let apart = UnshareFlags::NEWNET | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
    // SAFETY: the process has one thread; its descriptors and memory stay as they are.
    unsafe { unshare_unsafe(apart) }?;
    let (uid, gid) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
    set_thread_groups(&[])?;
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)?;
    set_no_new_privs(true)?;
    for (what, most) in [
        (Resource::As, MEMORY),
        (Resource::Cpu, CPU_SECONDS),
        (Resource::Core, 0),
        (Resource::Fsize, 0),
        (Resource::Nofile, 16),
    ] {
        let both = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        setrlimit(what, both)?;
    }
    Ok(())
}

/// The program that reads disks. Says what is different, or why it can not, in JSON.
pub fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    let with_text = words.iter().any(|word| word == WITH_TEXT);
    let numbers: Vec<i32> = words.iter().filter_map(|word| word.parse().ok()).collect();
    let answer = match numbers[..] {
        [before, after] => taken(before)
            .and_then(|before| Ok((Image::open(before)?, Image::open(taken(after)?)?)))
            .and_then(|(before, after)| compare(&before, &after, with_text)),
        _ => Err(Error::internal("two disks are compared")),
    };
    let written = serde_json::to_vec(&answer)
        .map_err(io::Error::other)
        .and_then(|bytes| io::stdout().write_all(&bytes));
    if written.is_err() {
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn taken(number: i32) -> Result<File> {
    if number <= libc::STDERR_FILENO {
        return Err(Error::internal("this is no disk"));
    }
    // SAFETY: whoever started this program left a disk open there, and nobody else uses it.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_getfd(fd.as_fd()).doing("taking a disk")?;
    Ok(File::from(fd))
}
