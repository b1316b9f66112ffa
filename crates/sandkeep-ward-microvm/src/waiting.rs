//! QEMUs that were started ahead.
//!
//! Half of the time a box takes to start goes into a process in a jail with a network of its
//! own, which is the same for every box. A few of them are started before anybody asks, for the
//! memories that boxes began with last: each maps that memory, has an empty disk and no machine
//! yet. They are no boxes: nobody counts or lists them, and they end with the server.

use crate::{
    launch::{Launch, Started},
    memory::Ram,
    network,
    qemu::{Begin, Qemu, Shape, host_limits},
    record::Note,
    ward::Inner,
};
use sandkeep_host::{
    cgroup::Cgroups,
    failure::Doing as _,
    files::{make_private_dir, remove_dir},
    proc,
    slots::Slot,
    work::{blocking, lock},
};
use sandkeep_model::{Error, Limits, Result, random_token};
use std::{
    fs,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// What their directories and cgroups are called until they have a box.
pub const WAITING: &str = "waiting.";
/// Memories for which some wait, at most.
const MEMORIES: usize = 2;
/// After a start: whoever has the new box shall not feel that the next one is prepared.
const AFTER_A_START: Duration = Duration::from_millis(400);
const CGROUP_DEADLINE: Duration = Duration::from_secs(10);
const WARMING: Duration = Duration::from_secs(2);
pub const CONTROL: &str = "control";

/// What one QEMU has of the host. Dropped, it is cleared away with everything in it.
#[derive(Debug)]
pub struct Place {
    pub dir: PathBuf,
    pub cgroups: Cgroups,
    kept: bool,
}

impl Place {
    pub fn new(dir: PathBuf, cgroups: Cgroups) -> Self {
        Self {
            dir,
            cgroups,
            kept: false,
        }
    }

    /// Makes it, after what an earlier server may have left there is gone.
    pub fn make(&self, slot: &Slot, limits: &Limits, holes_bytes: u64) -> Result<()> {
        self.clear()?;
        make_private_dir(&self.dir)?;
        // Written first: should the server die now, the next one knows the ids are used.
        self.note(slot)?;
        self.cgroups.create()?;
        self.cgroups.set_limits(&host_limits(limits, holes_bytes))?;
        Ok(())
    }

    pub fn note(&self, slot: &Slot) -> Result<()> {
        Note {
            slot: slot.number(),
            cgroups: self.cgroups.clone(),
            record: None,
        }
        .write(&self.dir)
    }

    pub fn clear(&self) -> Result<()> {
        self.cgroups.kill_all();
        self.cgroups.remove(CGROUP_DEADLINE)?;
        remove_dir(&self.dir)
    }

    /// Takes everything to another place, which is cleared first.
    pub fn move_to(&mut self, other: &Self) -> Result<()> {
        other.clear()?;
        self.cgroups.rename(&other.cgroups)?;
        self.cgroups = other.cgroups.clone();
        fs::rename(&self.dir, &other.dir).doing("giving a machine to the box")?;
        self.dir.clone_from(&other.dir);
        Ok(())
    }

    /// From now on somebody else sees to its end.
    pub fn keep(mut self) {
        self.kept = true;
    }

    pub fn control(&self) -> PathBuf {
        self.dir.join(CONTROL)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        if let Err(error) = self.clear() {
            tracing::warn!(%error, "a QEMU is left for the next sweep");
        }
    }
}

/// A QEMU that answers and has no machine yet.
#[derive(Debug)]
pub struct Waiting {
    pub place: Place,
    pub slot: Slot,
    pub ram: Arc<Ram>,
    pub started: Started,
    pidfd: OwnedFd,
}

impl Waiting {
    /// Starts one. Blocks.
    pub fn start(
        qemu: &Qemu,
        shape: Shape,
        ram: Arc<Ram>,
        place: Place,
        slot: Slot,
        (netns, card): (OwnedFd, OwnedFd),
    ) -> Result<Self> {
        let started = Launch {
            qemu,
            shape,
            cgroups: &place.cgroups,
            netns,
            card,
            id: slot.first_id(),
            ram: ram.fd(),
            control: &place.control(),
            begin: Begin::Wait,
        }
        .start()?;
        let ticks = proc::start_ticks(started.pid).doing("reading the start of the machine")?;
        let pidfd = proc::find(&proc::boot_id(), started.pid, ticks)
            .ok_or_else(|| Error::internal("QEMU ended as soon as it was started"))?;
        Ok(Self {
            place,
            slot,
            ram,
            started,
            pidfd,
        })
    }
}

/// Those that wait.
#[derive(Debug, Default)]
pub struct Shelf {
    ready: Vec<Waiting>,
    /// Memories in the order in which they were asked for last.
    wanted: Vec<(Arc<Ram>, Shape)>,
    filling: bool,
}

impl Shelf {
    fn count(&self, ram: &Arc<Ram>) -> usize {
        let same = |waiting: &&Waiting| Arc::ptr_eq(&waiting.ram, ram);
        self.ready.iter().filter(same).count()
    }

    /// Notes that boxes begin with this memory; gives back what nobody wants any more.
    fn want(&mut self, ram: &Arc<Ram>, shape: Shape) -> Vec<Waiting> {
        self.wanted.retain(|(other, _)| !Arc::ptr_eq(other, ram));
        self.wanted.push((Arc::clone(ram), shape));
        let too_many = self.wanted.len().saturating_sub(MEMORIES);
        self.wanted.drain(..too_many);
        let (wanted, ready) = (&self.wanted, &mut self.ready);
        ready
            .extract_if(.., |waiting| {
                !wanted.iter().any(|(ram, _)| Arc::ptr_eq(ram, &waiting.ram))
            })
            .collect()
    }

    /// The next one to start, if `most` are not there; the memory asked for last comes first.
    fn lacks(&self, most: usize) -> Option<(Arc<Ram>, Shape)> {
        let lacking = |(ram, _): &&(Arc<Ram>, Shape)| self.count(ram) < most;
        self.wanted.iter().rev().find(lacking).cloned()
    }
}

impl Inner {
    /// One that waits for a box with this memory, if there is one.
    pub(crate) fn take_waiting(&self, ram: &Arc<Ram>) -> Option<Waiting> {
        let mut shelf = lock(&self.shelf);
        loop {
            let place = shelf
                .ready
                .iter()
                .position(|waiting| Arc::ptr_eq(&waiting.ram, ram))?;
            let waiting = shelf.ready.remove(place);
            // The kernel may have wanted its memory.
            if proc::runs(&waiting.pidfd) {
                return Some(waiting);
            }
        }
    }

    /// How many wait.
    pub(crate) fn count_waiting(&self) -> usize {
        lock(&self.shelf).ready.len()
    }

    /// Has some ready for the next boxes that begin with this memory.
    pub(crate) fn prepare_next(self: &Arc<Self>, ram: &Arc<Ram>, shape: Shape) {
        if self.waiting == 0 {
            return;
        }
        let unwanted = {
            let mut shelf = lock(&self.shelf);
            let unwanted = shelf.want(ram, shape);
            if !std::mem::replace(&mut shelf.filling, true) {
                let inner = Arc::clone(self);
                tokio::spawn(async move { inner.fill().await });
            }
            unwanted
        };
        if !unwanted.is_empty() {
            tokio::task::spawn_blocking(move || drop(unwanted));
        }
    }

    async fn fill(self: Arc<Self>) {
        loop {
            tokio::time::sleep(AFTER_A_START).await;
            let lacking = {
                let mut shelf = lock(&self.shelf);
                let lacking = shelf.lacks(self.waiting);
                shelf.filling = lacking.is_some() && !self.closed.load(Ordering::Acquire);
                lacking.filter(|_| shelf.filling)
            };
            let Some((ram, shape)) = lacking else { return };
            let started = match self.qemu().await {
                Ok(qemu) => self.start_ahead(&qemu, ram, shape).await,
                Err(error) => Err(error),
            };
            match started {
                Ok(waiting) => self.shelve(waiting).await,
                Err(error) => {
                    tracing::warn!(%error, "no QEMU was started ahead");
                    lock(&self.shelf).filling = false;
                    return;
                }
            }
        }
    }

    async fn shelve(&self, waiting: Waiting) {
        let unwanted = {
            let mut shelf = lock(&self.shelf);
            if self.closed.load(Ordering::Acquire) {
                Some(waiting)
            } else {
                shelf.ready.push(waiting);
                None
            }
        };
        if let Some(unwanted) = unwanted {
            let _cleared = blocking(move || {
                drop(unwanted);
                Ok(())
            })
            .await;
        }
    }

    pub(crate) async fn start_ahead(
        &self,
        qemu: &Arc<Qemu>,
        ram: Arc<Ram>,
        shape: Shape,
    ) -> Result<Waiting> {
        let qemu = Arc::clone(qemu);
        let network = network::make().await?;
        let slot = self.roster.slots.take()?;
        let name = format!("{WAITING}{}", random_token(10));
        let place = Place::new(
            self.roster.state_dir.join(&name),
            self.roster.tree.child(&name),
        );
        let limits = Limits {
            memory_mib: shape.class_mib,
            ..Limits::default()
        };
        blocking(move || {
            place.make(&slot, &limits, ram.holes()?)?;
            Waiting::start(&qemu, shape, ram, place, slot, network)
        })
        .await
    }

    /// Ends those that wait; none is started any more.
    pub(crate) async fn close(&self) {
        self.closed.store(true, Ordering::Release);
        // One that is being warmed up is let go of soon, or cleared away by the next server.
        let _ended = tokio::time::timeout(WARMING, self.warming_turn.lock()).await;
        let all = std::mem::take(&mut lock(&self.shelf).ready);
        let _cleared = blocking(move || {
            drop(all);
            Ok(())
        })
        .await;
    }
}

/// Clears away what waited for a server that is gone: their ids are used again.
pub fn clear_left(state_dir: &Path, tree: &Cgroups) {
    let names = fs::read_dir(state_dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .chain(tree.children());
    for name in names.filter(|name| name.starts_with(WAITING)) {
        drop(Place::new(state_dir.join(&name), tree.child(&name)));
    }
}
