//! CRIU at work, and whoever waits for it.

use super::room::{IMAGE, LOG, PROGRAM};
use crate::{
    failure::{Doing, Failure},
    writing,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, pidfd_open},
};
use std::{
    ffi::OsString,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt as _,
    },
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

/// Longer than any sandbox needs; an image of some GiB is written within.
const DEADLINE: Duration = Duration::from_secs(300);
/// How often it is checked whether the caller still waits for the outcome.
const LOOK: Duration = Duration::from_millis(500);

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
    /// In the room this process is in. `writing` is the lock of whoever writes a sandbox.
    pub fn start(words: &[OsString], writing: Option<&OwnedFd>) -> Result<Self, Failure> {
        let doing = "running CRIU";
        let mut command = Command::new(PROGRAM);
        if let Some(writing) = writing {
            let writing = writing.try_clone().doing(doing)?;
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

    /// It takes no longer than this from now on.
    pub fn ends_within(&mut self, time: Duration) {
        self.until = self.until.min(Instant::now() + time);
    }

    pub fn pid(&self) -> i32 {
        // The kernel has no larger ones.
        i32::try_from(self.child.id()).unwrap_or(i32::MAX)
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
