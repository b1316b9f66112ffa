//! A box that this server holds.

use crate::{
    failure::{Doing, Failure},
    launcher::SOCKET,
    proc,
    record::Record,
    slots::Slot,
};
use sandkeep_model::SandboxId;
use std::{
    fs::File,
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};
use tokio::io::{Interest, unix::AsyncFd};

#[derive(Debug)]
pub struct Live {
    pub id: SandboxId,
    pub record: Record,
    /// Readable when PID 1 of the box has ended.
    pidfd: AsyncFd<OwnedFd>,
    /// The directory of the box; the socket is named through it.
    directory: OwnedFd,
    /// Kept for as long as the box is: nobody else may get its ids.
    _slot: Option<Slot>,
    ending: AtomicBool,
}

impl Live {
    pub fn new(
        id: SandboxId,
        record: Record,
        pidfd: OwnedFd,
        directory: OwnedFd,
        slot: Option<Slot>,
    ) -> Result<Self, Failure> {
        Ok(Self {
            id,
            record,
            pidfd: proc::watch_fd(pidfd, Interest::READABLE).doing("watching the box")?,
            directory,
            _slot: slot,
            ending: AtomicBool::new(false),
        })
    }

    pub fn runs(&self) -> bool {
        proc::runs(self.pidfd.get_ref())
    }

    /// Waits for the end of PID 1.
    pub async fn ended(&self) -> io::Result<()> {
        let mut guard = self.pidfd.readable().await?;
        // It stays readable for ever; others may wait for it, too.
        guard.retain_ready();
        Ok(())
    }

    /// From now on its end is no news.
    pub fn begin_end(&self) {
        self.ending.store(true, Ordering::Release);
    }

    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// Kills everything in the box. The end of PID 1 would do, but a box that is frozen ends only
    /// when it goes on, and then all of it must be dead.
    pub fn kill(&self) -> Result<(), Failure> {
        proc::kill_by(self.pidfd.get_ref())?;
        self.record.cgroups.kill_all();
        Ok(())
    }

    /// The network namespace of the box. Blocks.
    pub fn netns(&self) -> Result<OwnedFd, Failure> {
        let found = File::open(format!("/proc/{}/ns/net", self.record.pid))
            .doing("opening the network namespace of the box")?;
        // Asked after it was opened: while PID 1 lives its number is nobody else's.
        let same =
            proc::start_ticks(self.record.pid).is_ok_and(|ticks| ticks == self.record.start_ticks);
        if same && self.runs() {
            return Ok(found.into());
        }
        Err(io::Error::from(io::ErrorKind::NotFound))
            .doing("finding the network of a box that ended")
    }

    /// Short enough for a socket address wherever the state directory is.
    pub fn socket(&self) -> PathBuf {
        PathBuf::from(format!(
            "/proc/self/fd/{}/{SOCKET}",
            self.directory.as_raw_fd()
        ))
    }
}

/// Finds PID 1 of a box again; `None` when it is gone, or its number is somebody else's now.
pub fn find(record: &Record) -> Option<OwnedFd> {
    proc::find(&record.boot_id, record.pid, record.start_ticks)
}

/// Ends a box that nobody holds. Blocks; says how many processes there were.
pub fn clear(record: &Record, wait: Duration) -> Result<usize, Failure> {
    let found = find(record);
    let processes = record.cgroups.kill_all();
    if let Some(pidfd) = found {
        proc::kill_by(&pidfd)?;
        if !proc::ended_within(&pidfd, wait) {
            return Err(io::Error::from(io::ErrorKind::TimedOut))
                .doing("waiting for the box to end");
        }
    }
    // Stragglers that were made while the rest was killed.
    record.cgroups.kill_all();
    Ok(processes)
}
