//! CRIU at work, and whoever waits for it.

use super::room::{IMAGE, LOG, PROGRAM};
use crate::{
    cgroup::Cgroups,
    failure::{Doing, Failure},
    writing,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, pidfd_open},
    thread::{CapabilitySet, remove_capability_from_bounding_set},
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
/// Of a CRIU that waits for what never happens. One that reads from a slow disk uses the processor.
const STALLED: Duration = Duration::from_secs(20);
/// Looking at it uses less.
const LEAST: Duration = Duration::from_millis(20);
/// How often it is checked whether the caller still waits for the outcome.
const LOOK: Duration = Duration::from_millis(500);

/// CRIU at work.
pub struct Run {
    child: Child,
    pidfd: OwnedFd,
    until: Instant,
    progress: Option<(Cgroups, Progress)>,
}

/// When processes last used the processor in earnest.
struct Progress {
    at: Instant,
    used: Duration,
}

impl Progress {
    const fn from(at: Instant) -> Self {
        Self {
            at,
            used: Duration::ZERO,
        }
    }

    /// `used` is all that was used so far.
    fn has_stalled(&mut self, now: Instant, used: Duration) -> bool {
        if used >= self.used + LEAST {
            *self = Self { at: now, used };
        }
        now.saturating_duration_since(self.at) >= STALLED
    }
}

/// What CRIU is to do.
#[derive(Clone, Copy)]
pub enum Task<'a> {
    /// `writing` is the lock of whoever writes a sandbox.
    Save {
        writing: &'a OwnedFd,
    },
    Restore,
}

/// CRIU opens what an image has no name for by the number that its file system gave it. All disks are
/// of one file system: the number leads to the disk of the sandbox that was written, whichever disk
/// this is restored on. A trial would find there what is gone at the resume.
fn find_nothing_by_number() -> io::Result<()> {
    remove_capability_from_bounding_set(CapabilitySet::DAC_READ_SEARCH).map_err(io::Error::from)
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
    /// In the room this process is in.
    pub fn start(words: &[OsString], task: Task<'_>) -> Result<Self, Failure> {
        let doing = "running CRIU";
        let mut command = Command::new(PROGRAM);
        match task {
            Task::Save { writing } => {
                let writing = writing.try_clone().doing(doing)?;
                // SAFETY: this process has one thread, so what runs between fork and exec may do
                // whatever other code may.
                unsafe { command.pre_exec(move || writing::note_criu(&writing)) };
            }
            Task::Restore => {
                // SAFETY: as above.
                unsafe { command.pre_exec(find_nothing_by_number) };
            }
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
                progress: None,
            }),
            Err(error) => {
                let _gone = child.kill();
                Err(error).doing("watching CRIU")
            }
        }
    }

    /// It is given up when nothing happens in its cgroups any more.
    pub fn must_get_on(&mut self, cgroups: Cgroups) {
        self.progress = Some((cgroups, Progress::from(Instant::now())));
    }

    /// What cannot be told counts as getting on: there is a deadline beside this.
    fn has_stalled(&mut self) -> bool {
        let Some((cgroups, progress)) = &mut self.progress else {
            return false;
        };
        let used = cgroups.usage().map(|usage| usage.cpu_usec);
        used.is_ok_and(|used| progress.has_stalled(Instant::now(), Duration::from_micros(used)))
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
            if there(1) || Instant::now() >= self.until || self.has_stalled() {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_criu_that_waits_for_ever_is_told_from_a_slow_one() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut slow = Progress::from(begun);
        for second in 0..300 {
            // A hundredth of a processor.
            assert!(!slow.has_stalled(at(second), Duration::from_millis(second * 10)));
        }
        // Nothing but whoever looks at it.
        let mut hung = Progress::from(begun);
        let used = |second| Duration::from_millis(500) + Duration::from_micros(second * 100);
        assert!((0..STALLED.as_secs()).all(|second| !hung.has_stalled(at(second), used(second))));
        assert!(hung.has_stalled(at(STALLED.as_secs()), used(STALLED.as_secs())));
    }
}
