//! A box that this server holds.

use crate::{
    failure::{Doing, Failure},
    launcher::SOCKET,
    proc,
    record::Record,
    slots::Slot,
};
use sandkeep_host::first::First;
use sandkeep_model::SandboxId;
use std::{
    fs::File,
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

#[derive(Debug)]
pub struct Live {
    pub id: SandboxId,
    pub record: Record,
    /// PID 1 of the box.
    pub first: Arc<First>,
    /// The directory of the box; the socket is named through it.
    directory: OwnedFd,
    /// Kept for as long as the box is: nobody else may get its ids.
    _slot: Option<Slot>,
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
            first: Arc::new(First::watch(pidfd)?),
            directory,
            _slot: slot,
        })
    }

    /// The network namespace of the box. Blocks.
    pub fn netns(&self) -> Result<OwnedFd, Failure> {
        let found = File::open(format!("/proc/{}/ns/net", self.record.pid))
            .doing("opening the network namespace of the box")?;
        // Asked after it was opened: while PID 1 lives its number is nobody else's.
        let same =
            proc::start_ticks(self.record.pid).is_ok_and(|ticks| ticks == self.record.start_ticks);
        if same && self.first.runs() {
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
