//! A box that this server holds.

use crate::{Kind, Record};
use sandkeep_host::{
    failure::{Doing as _, Failure},
    proc,
    slots::Slot,
    work::blocking,
};
use sandkeep_model::{Error, Limits, Result, SandboxId, Secret};
use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    sync::atomic::{AtomicBool, Ordering},
};
use tokio::io::{Interest, unix::AsyncFd};
use tokio_util::sync::CancellationToken;

#[derive(Debug)]
pub struct Live<K: Kind> {
    pub id: SandboxId,
    pub record: Record<K::Noted>,
    pub has: K::Has,
    /// What a connection to the agent begins with.
    pub token: Secret,
    /// Readable when the process has ended.
    pidfd: AsyncFd<OwnedFd>,
    netns: OwnedFd,
    /// Kept for as long as the box is: nobody else may get its ids.
    _slot: Option<Slot>,
    ending: AtomicBool,
    /// Whether the box stands still; held while that changes.
    pub frozen: tokio::sync::Mutex<bool>,
    /// Cancelled when the process has ended; connections to the agent end with it.
    pub over: CancellationToken,
}

impl<K: Kind> Live<K> {
    pub fn new(
        id: SandboxId,
        record: Record<K::Noted>,
        token: Secret,
        has: K::Has,
        pidfd: OwnedFd,
        slot: Option<Slot>,
    ) -> Result<Self, Failure> {
        let netns = File::open(format!("/proc/{}/ns/net", record.pid))
            .doing("opening the network namespace of the box")?;
        // Asked after it was opened: while the process lives its number is nobody else's.
        if !proc::runs(&pidfd) {
            return Err(io::Error::from(io::ErrorKind::NotFound)).doing("finding the box");
        }
        Ok(Self {
            id,
            record,
            has,
            token,
            pidfd: proc::watch_fd(pidfd, Interest::READABLE).doing("watching the box")?,
            netns: netns.into(),
            _slot: slot,
            ending: AtomicBool::new(false),
            frozen: tokio::sync::Mutex::new(false),
            over: CancellationToken::new(),
        })
    }

    pub fn runs(&self) -> bool {
        proc::runs(self.pidfd.get_ref())
    }

    /// Waits for the end of the process, and with it of everything in the box.
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

    /// Kills the process and whatever else runs for the box.
    pub fn kill(&self) -> Result<(), Failure> {
        proc::kill_by(self.pidfd.get_ref())?;
        self.record.cgroups.kill_all();
        Ok(())
    }

    pub const fn netns(&self) -> &OwnedFd {
        &self.netns
    }

    /// A network namespace for somebody who may outlive the box.
    pub fn share_netns(&self) -> Result<OwnedFd> {
        self.netns
            .try_clone()
            .doing("keeping the network namespace of the box")
            .map_err(Error::from)
    }

    /// Whether the box surely runs and answers now.
    pub fn moves(&self) -> bool {
        self.frozen.try_lock().is_ok_and(|frozen| !*frozen)
    }

    /// The limits of its cgroup: what the host holds it to. One that stands still can not be told
    /// the rest and is refused.
    pub async fn limit_outside(&self, limits: Limits) -> Result<()> {
        let id = &self.id;
        if !self.runs() {
            return Err(Error::conflict(format!("box {id} has ended")));
        }
        let cgroups = self.record.cgroups.clone();
        blocking(move || {
            cgroups.set_limits(&limits).map_err(|failure| {
                let busy = failure.source.kind() == io::ErrorKind::ResourceBusy;
                let error = Error::from(failure);
                if busy {
                    Error::conflict(error.message).hint("the box uses more memory than that now")
                } else {
                    error
                }
            })
        })
        .await?;
        if *self.frozen.lock().await {
            return Err(Error::conflict(format!("box {id} is frozen")).hint("resume it first"));
        }
        Ok(())
    }
}
