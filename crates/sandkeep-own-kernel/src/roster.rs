//! Which boxes there are: held, on their way, or left by an earlier server.

use crate::{Kind, Live, Note, Record};
use sandkeep_host::{
    cgroup::{Cgroups, layout::Layout, tree_name},
    failure::Doing as _,
    files::{read_token, remove_dir},
    first::END_DEADLINE,
    netns, proc,
    slots::{Reserved, Slot, Slots},
    starting::{Begun, Starting},
    work::{blocking, lock},
};
use sandkeep_model::{Error, Result, SandboxId, Secret};
use sandkeep_ward::{LiveBox, WardEvent};
use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, Mutex},
};
use tokio::{sync::mpsc, task::AbortHandle};

/// Events that nobody has taken yet; more wait in the tasks that have them.
const EVENTS: usize = 1024;

#[derive(Debug)]
pub struct Roster<K: Kind> {
    /// Holds a directory for each box.
    pub state_dir: PathBuf,
    pub tree: Cgroups,
    pub slots: Arc<Slots>,
    pub(crate) boxes: Mutex<HashMap<SandboxId, Held<K>>>,
    pub(crate) starting: Starting,
    pub(crate) reserved: Reserved,
    sender: mpsc::Sender<WardEvent>,
    receiver: Mutex<Option<mpsc::Receiver<WardEvent>>>,
}

/// A box and the task that watches it.
#[derive(Debug)]
pub(crate) struct Held<K: Kind> {
    live: Arc<Live<K>>,
    watcher: AbortHandle,
}

impl<K: Kind> Drop for Held<K> {
    fn drop(&mut self) {
        self.watcher.abort();
    }
}

/// A box that outlived the server that made it.
#[derive(Debug)]
pub struct Remains<K: Kind> {
    pub record: Record<K::Noted>,
    id: SandboxId,
    token: Secret,
    pidfd: OwnedFd,
    slot: Option<Slot>,
}

/// A server before this one may have made the cable without its guard, or with another.
async fn guard<K: Kind>(live: &Live<K>) {
    let guarded = netns::inside(live.netns(), || {
        sandkeep_netlink::guard_again().doing("guarding the cable of the sandbox")
    });
    if let Err(error) = guarded.await {
        tracing::warn!(id = %live.id, %error, "a sandbox can write what it likes on its cable");
    }
}

impl<K: Kind> Roster<K> {
    pub fn new(state_dir: PathBuf, id_base: u32, id_slots: u32) -> Result<Self> {
        let tree = Cgroups::make_tree(&Layout::of_this_host()?, &tree_name(&state_dir))?;
        let slots = Slots::new(id_base, id_slots)?;
        let (sender, receiver) = mpsc::channel(EVENTS);
        Ok(Self {
            reserved: Reserved::of(&state_dir, &slots, |directory| {
                Some(Note::<K::Noted>::read(directory)?.slot)
            }),
            state_dir,
            tree,
            slots,
            boxes: Mutex::default(),
            starting: Starting::default(),
            sender,
            receiver: Mutex::new(Some(receiver)),
        })
    }

    pub fn box_dir(&self, id: &SandboxId) -> PathBuf {
        self.state_dir.join(id.as_str())
    }

    pub fn held(&self, id: &SandboxId) -> Option<Arc<Live<K>>> {
        lock(&self.boxes).get(id).map(|held| Arc::clone(&held.live))
    }

    pub fn must_hold(&self, id: &SandboxId) -> Result<Arc<Live<K>>> {
        self.held(id).ok_or_else(|| Error::sandbox_not_found(id))
    }

    /// Takes a running box in and has it watched.
    pub fn hold<W>(
        &self,
        live: Arc<Live<K>>,
        watch: impl FnOnce(Arc<Live<K>>, mpsc::Sender<WardEvent>) -> W,
    ) where
        W: Future<Output = ()> + Send + 'static,
    {
        let watcher = tokio::spawn(watch(Arc::clone(&live), self.sender.clone())).abort_handle();
        lock(&self.boxes).insert(live.id.clone(), Held { live, watcher });
    }

    /// What the watchers tell; once.
    pub fn events(&self) -> Option<mpsc::Receiver<WardEvent>> {
        lock(&self.receiver).take()
    }

    pub fn begin(&self, id: &SandboxId) -> Result<Begun> {
        self.starting.begin(id, self.held(id).is_some())
    }

    /// Finds a box of an earlier server. `None`: it is gone, and cleared away.
    pub async fn find_again(&self, found: &LiveBox) -> Result<Option<Remains<K>>> {
        let record = Record::parse(&found.record)?;
        let Some(pidfd) = record.find() else {
            self.clear_record(&found.id, record).await?;
            return Ok(None);
        };
        Ok(Some(Remains {
            token: read_token(&self.box_dir(&found.id))?,
            slot: self.reserved.hand_over(&found.id, record.slot),
            id: found.id.clone(),
            record,
            pidfd,
        }))
    }

    /// Takes it up again. `None`: it ended just now, and is cleared away.
    pub async fn revive(&self, found: Remains<K>, has: K::Has) -> Result<Option<Live<K>>> {
        let Remains {
            record,
            id,
            token,
            pidfd,
            slot,
        } = found;
        let watched = pidfd.try_clone().doing("watching the box")?;
        match Live::new(id.clone(), record.clone(), token, has, pidfd, slot) {
            Ok(live) => {
                guard(&live).await;
                Ok(Some(live))
            }
            // One that is about to end has lost its namespaces before it is seen to be dead.
            Err(failure) => {
                if !blocking(move || Ok(proc::ended_within(&watched, END_DEADLINE))).await? {
                    return Err(failure.into());
                }
                self.clear_record(&id, record).await?;
                Ok(None)
            }
        }
    }

    /// Ends a box for good, also one that is still being started for somebody who gave up.
    pub async fn end(&self, id: &SandboxId) -> Result<()> {
        self.starting.end(id, || self.destroy(id)).await
    }

    pub async fn destroy(&self, id: &SandboxId) -> Result<()> {
        let Some(live) = self.held(id) else {
            return self.clear_unheld(id).await.map(drop);
        };
        live.first.end(id, &live.record.cgroups).await?;
        live.over.cancel();
        let (cgroups, more) = (live.record.cgroups.clone(), live.record.more.clone());
        let directory = self.box_dir(id);
        drop(live);
        blocking(move || {
            // Stragglers that were made while the rest was killed.
            cgroups.kill_all();
            cgroups.remove(END_DEADLINE)?;
            K::clear(&more);
            remove_dir(&directory)
        })
        .await?;
        lock(&self.boxes).remove(id);
        Ok(())
    }

    /// What there is of a box that did not come to life: the half of it that runs, then its files.
    pub async fn clear_half_made(&self, id: &SandboxId) {
        let left = match self.held(id) {
            Some(_) => self.destroy(id).await,
            None => self.clear_unheld(id).await.map(drop),
        };
        if let Err(error) = left {
            tracing::warn!(%id, %error, "a box that did not start was not cleared away");
        }
    }
}
