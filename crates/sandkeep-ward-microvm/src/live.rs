//! A box that this server holds.

use crate::{image::Memory, record::Record};
use sandkeep_host::{
    failure::{Doing as _, Failure},
    proc,
    slots::Slot,
};
use sandkeep_model::{SandboxId, Secret};
use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::io::{Interest, unix::AsyncFd};
use tokio_util::sync::CancellationToken;

#[derive(Debug)]
pub struct Live {
    pub id: SandboxId,
    pub record: Record,
    /// What a connection to the agent begins with.
    pub token: Secret,
    /// `None`: this server does not have what the box began with.
    pub memory: Option<Memory>,
    /// Readable when QEMU has ended.
    pidfd: AsyncFd<OwnedFd>,
    netns: OwnedFd,
    /// Kept for as long as the box is: nobody else may get its ids.
    _slot: Option<Slot>,
    ending: AtomicBool,
    /// Kills for want of memory that are no news; `None` until the machine was asked.
    pub kills: Mutex<Option<u64>>,
    /// Whether the machine is stopped; held while that changes.
    pub frozen: tokio::sync::Mutex<bool>,
    /// Cancelled when QEMU has ended; connections to the agent end with it.
    pub over: CancellationToken,
}

impl Live {
    pub fn new(
        id: SandboxId,
        record: Record,
        token: Secret,
        memory: Option<Memory>,
        pidfd: OwnedFd,
        slot: Option<Slot>,
    ) -> Result<Self, Failure> {
        let netns = File::open(format!("/proc/{}/ns/net", record.pid))
            .doing("opening the network namespace of the box")?;
        // Asked after it was opened: while QEMU lives its number is nobody else's.
        if !proc::runs(&pidfd) {
            return Err(io::Error::from(io::ErrorKind::NotFound)).doing("finding the box");
        }
        Ok(Self {
            id,
            record,
            token,
            memory,
            pidfd: proc::watch_fd(pidfd, Interest::READABLE).doing("watching the box")?,
            netns: netns.into(),
            _slot: slot,
            ending: AtomicBool::new(false),
            kills: Mutex::default(),
            frozen: tokio::sync::Mutex::new(false),
            over: CancellationToken::new(),
        })
    }

    pub fn runs(&self) -> bool {
        proc::runs(self.pidfd.get_ref())
    }

    /// Waits for the end of QEMU, and with it of everything in the box.
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

    /// Kills QEMU and whatever else runs for the box.
    pub fn kill(&self) -> Result<(), Failure> {
        proc::kill_by(self.pidfd.get_ref())?;
        self.record.cgroups.kill_all();
        Ok(())
    }

    pub const fn netns(&self) -> &OwnedFd {
        &self.netns
    }
}

/// Finds the QEMU of a box again; `None` when it is gone.
pub fn find(record: &Record) -> Option<OwnedFd> {
    proc::find(&record.boot_id, record.pid, record.start_ticks)
}

/// Ends a box that nobody holds. Blocks; says how many processes there were.
pub fn clear(record: &Record, wait: Duration) -> Result<usize, Failure> {
    let qemu = find(record);
    let processes = record.cgroups.kill_all();
    if let Some(pidfd) = qemu {
        proc::kill_by(&pidfd)?;
        if !proc::ended_within(&pidfd, wait) {
            return Err(io::Error::from(io::ErrorKind::TimedOut))
                .doing("waiting for the box to end");
        }
    }
    Ok(processes)
}
