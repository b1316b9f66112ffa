use std::{collections::HashSet, os::fd::OwnedFd, path::PathBuf};

use async_trait::async_trait;
use sandkeep_model::{Isolation, Limits, Result, SandboxId, Usage};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::{Channel, Check};

/// What a ward needs to start a box.
#[derive(Debug, Clone)]
pub struct BoxSpec {
    pub id: SandboxId,
    /// The box's own writable root directory, made by the vault, owners as inside (root is 0).
    pub root: PathBuf,
    pub limits: Limits,
    /// The host name seen inside.
    pub hostname: String,
}

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

/// An isolation level.
///
/// Every method may be called from any task at any time. Operations on one box are
/// serialised by the keeper; operations on different boxes run side by side and must not
/// wait for each other.
#[async_trait]
pub trait Ward: Send + Sync + 'static {
    fn level(&self) -> Isolation;

    /// Looks at the host. Any [`crate::Verdict::Missing`] means that [`Ward::start`] would fail.
    async fn check(&self) -> Vec<Check>;

    /// Starts a box. When this returns the agent is running and its channel can be opened.
    /// On error nothing of the box is left behind.
    async fn start(&self, spec: BoxSpec) -> Result<LiveBox>;

    /// Finds a box again after the server was restarted.
    async fn adopt(&self, live: &LiveBox) -> Result<Adoption>;

    /// A fresh connection to the box's agent.
    async fn connect(&self, id: &SandboxId) -> Result<Channel>;

    /// Changes the limits of a running box (the disk limit is the vault's).
    async fn set_limits(&self, id: &SandboxId, limits: &Limits) -> Result<()>;

    /// What the box uses, read outside of it. `disk_bytes` is left at zero: the vault knows it.
    async fn usage(&self, id: &SandboxId) -> Result<Usage>;

    /// The box's network namespace: owned by the host, nothing but a loopback device in it.
    async fn netns(&self, id: &SandboxId) -> Result<OwnedFd>;

    /// Ends the box and everything in it, and waits until nothing is left. Ending a box that
    /// is not there is no error.
    async fn destroy(&self, id: &SandboxId) -> Result<()>;

    /// Clears away what belongs to none of `known`: processes, cgroups, sockets of boxes that
    /// were half made when the server died.
    async fn sweep(&self, known: &HashSet<SandboxId>) -> Result<Swept>;

    /// The stream of [`WardEvent`]s. It can be taken once.
    fn events(&self) -> Option<mpsc::Receiver<WardEvent>>;
}
