//! Where CRIU runs: a mount namespace of the worker's own with a /run for it alone.
//!
//! CRIU looks at the kernel for a tenth of a second at every start, unless it finds what it
//! saw last in a /run in memory. What it saw is kept by the ward between the runs.

use super::protocol::Criu;
use crate::{
    failure::{Doing, Failure},
    sys, writing,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    mount::{MountFlags, MountPropagationFlags, MoveMountFlags, mount, mount_change, move_mount},
    process::{Pid, PidfdFlags, pidfd_open},
    thread::{UnshareFlags, unshare_unsafe},
};
use std::{
    ffi::OsString,
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt as _,
    },
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

/// Where the image is mounted.
pub const IMAGE: &str = "/run/image";
pub const LOG: &str = "/run/criu.log";
/// What CRIU knows of the kernel; the name is its own.
const KNOWN: &str = "/run/criu.kdat";
/// Longer than any box needs; an image of some GiB is written within.
const DEADLINE: Duration = Duration::from_secs(300);
/// How often it is looked whether anybody still waits for the outcome.
const LOOK: Duration = Duration::from_millis(500);

/// Moves this single-threaded process into it.
pub fn enter(criu: &Criu) -> Result<(), Failure> {
    // It may lie below the /run that is about to be covered.
    let known = fs::read(&criu.known).ok();
    // SAFETY: a new mount namespace touches neither memory nor descriptors.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.doing("making a mount namespace")?;
    mount_change(
        "/",
        MountPropagationFlags::REC | MountPropagationFlags::PRIVATE,
    )
    .doing("taking mounts apart from the host's")?;
    memory("/run")?;
    if let Some(known) = known {
        fs::write(KNOWN, known).doing("telling CRIU what it knows")?;
    }
    // The launcher lets the kernel reap; CRIU and we want to know how children ended.
    sys::reset_signals().doing("resetting signals")
}

/// A small file system in memory.
pub fn memory(at: &str) -> Result<(), Failure> {
    mount(
        "tmpfs",
        at,
        "tmpfs",
        MountFlags::NOSUID | MountFlags::NODEV,
        Some(c"mode=755,size=16m"),
    )
    .doing(format_args!("mounting {at}"))
}

/// Attaches a detached mount at a fresh directory or file.
pub fn attach(tree: &OwnedFd, at: &str, is_file: bool) -> Result<(), Failure> {
    let made = if is_file {
        fs::write(at, "")
    } else {
        fs::create_dir(at)
    };
    made.and_then(|()| {
        move_mount(
            tree,
            "",
            rustix::fs::CWD,
            at,
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
        )
        .map_err(io::Error::from)
    })
    .doing(format_args!("mounting {at}"))
}

/// Keeps what CRIU has found out for the next time. Nothing is lost when this fails.
pub fn remember(criu: &Criu) {
    if criu.known.exists() {
        return;
    }
    let own = rustix::process::getpid().as_raw_nonzero();
    let fresh = criu.known.with_extension(own.to_string());
    let kept = fs::read(KNOWN)
        .and_then(|known| fs::write(&fresh, known))
        .and_then(|()| fs::rename(&fresh, &criu.known));
    if kept.is_err() {
        let _gone = fs::remove_file(&fresh);
    }
}

/// CRIU at work.
pub struct Run {
    child: Child,
    pidfd: OwnedFd,
    until: Instant,
}

/// What may happen while CRIU works.
#[derive(Clone, Copy)]
pub struct Beside<'a> {
    /// Whoever has the other end waits for the outcome, and may go.
    pub caller: BorrowedFd<'a>,
    /// Readable when CRIU asks something.
    pub question: BorrowedFd<'a>,
}

/// What [`Run::wait`] saw.
pub enum Seen {
    Ended(ExitStatus),
    Asked,
    /// Nobody waits for the outcome any more, or it takes too long.
    GiveUp,
}

impl Run {
    /// `writing` is the lock of whoever writes a box.
    pub fn start(
        criu: &Criu,
        words: &[OsString],
        writing: Option<&OwnedFd>,
    ) -> Result<Self, Failure> {
        let doing = format!("running {}", criu.program.display());
        let mut command = Command::new(&criu.program);
        if let Some(writing) = writing {
            let writing = writing.try_clone().doing(&doing)?;
            // SAFETY: this process has one thread, so what runs between fork and exec may do
            // whatever other code may.
            unsafe { command.pre_exec(move || writing::note_criu(&writing)) };
        }
        let mut child = command
            .args(words)
            .args(["--no-default-config", "--log-file", LOG, "-v2"])
            .args(["--work-dir", "/run", "--images-dir", IMAGE])
            .args([
                "--tcp-established",
                "--network-lock",
                "skip",
                "--file-locks",
            ])
            .args(["--manage-cgroups=ignore"])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .doing(doing)?;
        let pidfd = i32::try_from(child.id())
            .ok()
            .and_then(Pid::from_raw)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from));
        match pidfd {
            Ok(pidfd) => Ok(Self {
                child,
                pidfd,
                until: Instant::now() + DEADLINE,
            }),
            Err(error) => {
                let _gone = child.kill();
                Err(error).doing("watching CRIU")
            }
        }
    }

    /// Waits for its end, or for what `beside` it may happen.
    pub fn wait(&mut self, beside: Option<Beside<'_>>) -> Result<Seen, Failure> {
        let pause = Timespec::try_from(LOOK)
            .map_err(|_| io::ErrorKind::InvalidInput)
            .doing("waiting for CRIU")?;
        loop {
            let mut fds = vec![PollFd::from_borrowed_fd(self.pidfd.as_fd(), PollFlags::IN)];
            if let Some(Beside { caller, question }) = beside {
                fds.push(PollFd::from_borrowed_fd(caller, PollFlags::RDHUP));
                fds.push(PollFd::from_borrowed_fd(question, PollFlags::IN));
            }
            match poll(&mut fds, Some(&pause)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).doing("waiting for CRIU"),
            }
            let there = |index: usize| fds.get(index).is_some_and(|fd| !fd.revents().is_empty());
            if there(2) {
                return Ok(Seen::Asked);
            }
            if there(0) {
                return self.child.wait().map(Seen::Ended).doing("waiting for CRIU");
            }
            if there(1) || Instant::now() >= self.until {
                return Ok(Seen::GiveUp);
            }
        }
    }

    /// Ends it now.
    pub fn kill(&mut self) {
        // It may have ended by itself.
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// The log of the last run, as far as it is readable.
pub fn log() -> String {
    fs::read(Path::new(LOG))
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_default()
}
