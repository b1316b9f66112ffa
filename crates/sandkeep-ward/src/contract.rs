use std::{collections::HashSet, os::fd::OwnedFd, path::Path, time::Duration};

use async_trait::async_trait;
use sandkeep_model::{Code, Error, Isolation, Limits, Result, SandboxId, Usage};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::{BoxSpec, Channel, Check};

/// A box that runs, as the ward wants to remember it.
///
/// `record` is the ward's own note, kept in the ledger and given back to [`Ward::adopt`]
/// after a restart of the server: pids with start times, cgroup paths, socket paths.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveBox {
    pub id: SandboxId,
    pub record: serde_json::Value,
}

/// What became of a box while the server was away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Adoption {
    /// It runs and is this ward's again.
    Alive,
    /// It is not there any more; whatever was left of it has been cleared away.
    Gone,
}

/// What a ward noticed by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WardEvent {
    /// PID 1 of the box ended without [`Ward::destroy`] having been asked for.
    Exited { id: SandboxId, out_of_memory: bool },
    /// The kernel killed processes of the box for want of memory; `kills` counts from the start of the box.
    OutOfMemory { id: SandboxId, kills: u64 },
}

/// Leftovers that belonged to no known box and were cleared away.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Swept {
    pub processes: usize,
    pub cgroups: usize,
    pub files: usize,
}

impl std::ops::AddAssign for Swept {
    fn add_assign(&mut self, more: Self) {
        self.processes += more.processes;
        self.cgroups += more.cgroups;
        self.files += more.files;
    }
}

/// What writes the memory of boxes to disk, down to its build: an image is only given back
/// to the engine that wrote it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Engine {
    /// `runsc`, `criu`, `qemu`.
    pub name: String,
    /// Version and whatever else must be the same when an image is read again.
    pub build: String,
}

/// Whose images an engine may read, beside those that were written here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImagesFrom {
    /// What reads them is itself locked in: a hostile one is no danger to the host.
    Anybody,
    /// What reads them has rights of the host, and with them whoever wrote one.
    KnownServers,
}

/// What runs the instructions of a box that is a machine of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Acceleration {
    /// The processor itself.
    Kvm,
    /// A program: the same machine, many times slower.
    Emulated,
}

/// An isolation level.
///
/// Every method may be called from any task at any time. Operations on one box are
/// serialised by the keeper; operations on different boxes run side by side and must not
/// wait for each other.
#[async_trait]
pub trait Ward: Send + Sync + 'static {
    fn level(&self) -> Isolation;

    /// Whether whatever runs on a plain host runs here, too: `auto` only picks such levels.
    fn suits_everything(&self) -> bool {
        true
    }

    /// How much of one core, in percent, a box of this level uses at most while nothing happens
    /// in it: what its own kernel does.
    fn cpu_at_rest_pct(&self) -> f64 {
        0.0
    }

    /// What runs the machine of this box; `None` where there is no machine.
    fn acceleration(&self, _id: &SandboxId) -> Option<Acceleration> {
        None
    }

    /// Looks at the host. Any [`crate::Verdict::Missing`] means that [`Ward::start`] would fail.
    async fn check(&self) -> Vec<Check>;

    /// What the root of a box at this level holds: `None`, the files of its template as they
    /// are; else the name of another form of them, which [`Ward::form_disk`] makes.
    fn disk_form(&self) -> Option<&'static str> {
        None
    }

    /// Makes this level's form of a template, once for all boxes: `tree` has its files, `into`
    /// is an empty directory which becomes the root that boxes get copies of.
    async fn form_disk(&self, _tree: &Path, _into: &Path) -> Result<()> {
        Err(cannot(self.level(), "make another form of a template"))
    }

    /// The file in a root of this level's form that holds an ext4 file system with the files of
    /// the box. Only ever read by a program that is locked in: the box wrote every byte of it.
    fn disk_image(&self) -> Option<&'static str> {
        None
    }

    /// How long a start may take before something must be wrong.
    fn patience(&self) -> Duration {
        Duration::from_secs(30)
    }

    /// The same for one that comes back with its memory: how long that takes is up to what is in the
    /// image, and to how much processor the sandbox may use. As much as it had for writing it.
    fn patience_with_memory(&self) -> Duration {
        Duration::from_secs(330).max(self.patience())
    }

    /// Whether a box that comes up has been told who it is (`introduction` of its specification)
    /// by the ward: where a conversation with the agent is expensive, one is enough.
    fn introduces(&self) -> bool {
        false
    }

    /// Starts a box. When this returns the agent is running and its channel can be opened.
    /// On error nothing of the box is left behind.
    async fn start(&self, spec: BoxSpec) -> Result<LiveBox>;

    /// Finds a box again after the server was restarted. Does not wait for anybody.
    async fn adopt(&self, live: &LiveBox) -> Result<Adoption>;

    /// Waits until nobody has his hands in an adopted box any more who was [saving](Ward::save) it
    /// for a server that has died: it must not go on before. Ending it is always possible.
    async fn released(&self, _id: &SandboxId) -> Result<()> {
        Ok(())
    }

    /// A fresh connection to the box's agent.
    async fn connect(&self, id: &SandboxId) -> Result<Channel>;

    /// Changes the limits of a running box (the disk limit is the vault's).
    async fn set_limits(&self, id: &SandboxId, limits: &Limits) -> Result<()>;

    /// What the box uses, read outside of it. `disk_bytes` is left at zero: the vault knows it.
    async fn usage(&self, id: &SandboxId) -> Result<Usage>;

    /// The box's network namespace: owned by the host, without a way out. Boxes that use the
    /// host's network stack have nothing but a loopback device in it; of those with a stack of
    /// their own, it holds the host's end of the cable to them, named as `sandkeep-netlink` says.
    async fn netns(&self, id: &SandboxId) -> Result<OwnedFd>;

    /// Brings what the box has written so far to its disk, at levels where a kernel of its own
    /// keeps that back: before its disk is copied without its memory.
    async fn settle(&self, _id: &SandboxId) -> Result<()> {
        Ok(())
    }

    /// Stops every process of the box where it is; its memory stays. Freezing a frozen box is
    /// no error. Connections to its agent stay open and are silent.
    async fn freeze(&self, _id: &SandboxId) -> Result<()> {
        Err(cannot(self.level(), "freeze a box"))
    }

    /// Whether a sandbox stands still because it was frozen.
    async fn is_frozen(&self, _id: &SandboxId) -> Result<bool> {
        Ok(false)
    }

    /// Lets a frozen box go on. Thawing a running box is no error.
    async fn thaw(&self, _id: &SandboxId) -> Result<()> {
        Err(cannot(self.level(), "thaw a box"))
    }

    /// Moves the memory of a frozen box to the host's swap, and says how many bytes went. Where
    /// there is no swap nothing happens.
    async fn push_out(&self, _id: &SandboxId) -> Result<u64> {
        Ok(0)
    }

    /// The engine that [`Ward::save`] and [`Ward::restore`] use; an error says why this host
    /// has none.
    async fn engine(&self) -> Result<Engine> {
        Err(cannot(self.level(), "write memory to disk"))
    }

    /// The engine that runs this box: what [`Ward::save`] writes of it, that one can read. Another than
    /// [`Ward::engine`] for a box that an earlier server started with another.
    async fn engine_of(&self, _id: &SandboxId) -> Result<Engine> {
        self.engine().await
    }

    /// Whose images may be given to [`Ward::restore`].
    fn images_from(&self) -> ImagesFrom {
        ImagesFrom::KnownServers
    }

    /// Takes in an image that was written elsewhere, by whom [`Ward::images_from`] says, while it
    /// has no name and nothing has read it: refuses what [`Ward::save`] would not write, and may
    /// change the files, which are summed up afterwards. Names in it by which boxes share
    /// something must not be those of others.
    async fn take_in(&self, _image: &Path) -> Result<()> {
        Ok(())
    }

    /// Writes processes and memory of a frozen box into the empty directory `image`. It
    /// need not be on the disk when this returns; whoever keeps it sees to that.
    /// The caller has closed its connections to the agent. Whatever the outcome, the box is
    /// there and frozen as before; a box whose state this engine can not write is refused with
    /// [`Code::NotEnforceable`] and words that name the obstacle.
    async fn save(&self, _id: &SandboxId, _image: &Path) -> Result<()> {
        Err(cannot(self.level(), "write memory to disk"))
    }

    /// Whether what [`Ward::save`] wrote is to be [tried](Ward::try_image) before anybody relies on
    /// it.
    fn tries_images(&self) -> bool {
        false
    }

    /// Brings an image back up to the moment before anything of it would run, and ends it there: what
    /// this accepts, [`Ward::restore`] can read. `spec` has an id that nobody else has, and a copy of
    /// the disk. Nothing of it ever runs, and nothing is left of it when this returns. An image that
    /// does not come back, or cannot be tried, is refused with words that say why.
    async fn try_image(&self, _spec: BoxSpec, _image: &Path) -> Result<()> {
        Ok(())
    }

    /// Starts a box from an image written by [`Ward::save`] (of this or another box of the same
    /// engine) on the disk that belongs to it, under a new or the same id. Confinement (seccomp,
    /// capabilities, limits, cgroup) is verified before any process of it runs. Returns when the
    /// agent is running; on error nothing of the box is left behind.
    async fn restore(&self, _spec: BoxSpec, _image: &Path) -> Result<LiveBox> {
        Err(cannot(self.level(), "read memory from disk"))
    }

    /// Ends the box and everything in it, and waits until nothing is left. Ending a box that
    /// is not there is no error.
    async fn destroy(&self, id: &SandboxId) -> Result<()>;

    /// Clears away what belongs to none of `known`: processes, cgroups, sockets of boxes that
    /// were half made when the server died.
    async fn sweep(&self, known: &HashSet<SandboxId>) -> Result<Swept>;

    /// The server ends: what the ward keeps for boxes to come goes. Boxes go on.
    async fn close(&self) {}

    /// The stream of [`WardEvent`]s. It can be taken once.
    fn events(&self) -> Option<mpsc::Receiver<WardEvent>>;
}

fn cannot(level: Isolation, what: &str) -> Error {
    Error::new(
        Code::NotEnforceable,
        format!("isolation level {level} can not {what} on this host"),
    )
    .hint("`sandkeep doctor` tells what each level can do here")
}
