//! A box that this server holds.

use crate::{Kind, Record};
use sandkeep_host::{
    failure::{Doing as _, Failure},
    first::{self, First},
    proc,
    slots::Slot,
    work::blocking,
};
use sandkeep_model::{Error, Limits, Result, SandboxId, Secret};
use std::{fs::File, io, os::fd::OwnedFd, sync::Arc};
use tokio_util::sync::CancellationToken;

#[derive(Debug)]
pub struct Live<K: Kind> {
    pub id: SandboxId,
    pub record: Record<K::Noted>,
    pub has: K::Has,
    /// What a connection to the agent begins with.
    pub token: Secret,
    pub first: Arc<First>,
    netns: OwnedFd,
    /// Kept for as long as the box is: nobody else may get its ids.
    _slot: Option<Slot>,
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
            first: Arc::new(First::watch(pidfd)?),
            netns: netns.into(),
            _slot: slot,
            frozen: tokio::sync::Mutex::new(false),
            over: CancellationToken::new(),
        })
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
        if !self.first.runs() {
            return Err(Error::conflict(format!("box {id} has ended")));
        }
        let cgroups = self.record.cgroups.clone();
        blocking(move || first::limit(&cgroups, &limits)).await?;
        if *self.frozen.lock().await {
            return Err(Error::conflict(format!("box {id} is frozen")).hint("resume it first"));
        }
        Ok(())
    }
}
