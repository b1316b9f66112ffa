//! What a ward's tests bring to the suite.

use crate::{BoxSpec, LiveBox, Ward};
use sandkeep_model::{Limits, SandboxId};
use std::{path::PathBuf, sync::Arc};

/// A place on this host where a ward can be tried.
pub trait Bench: Send + Sync {
    /// A ward over the bench's state; called again it is the ward of a restarted server.
    fn ward(&self) -> Arc<dyn Ward>;

    /// A fresh writable root. The bench removes it at its end.
    fn root(&self) -> PathBuf;

    /// What is left of a box on the host, a line each: processes, cgroups, files.
    fn traces(&self, live: &LiveBox) -> Vec<String>;

    /// The limits as the host holds them, not as the ward remembers them.
    fn host_limits(&self, live: &LiveBox) -> HostLimits;

    /// Whether a box that runs out of memory ends, instead of losing a process.
    fn memory_takes_the_box(&self) -> bool {
        false
    }

    /// By how many processes a limit can be missed.
    fn more_forks(&self) -> u32 {
        0
    }

    /// How many boxes a small host can run at once.
    fn side_by_side(&self) -> usize {
        12
    }

    /// Kills the box behind the ward's back, and waits until it is dead.
    fn kill(&self, live: &LiveBox);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostLimits {
    pub cpu_millis: u32,
    pub memory_bytes: u64,
    pub pids: u32,
}

impl From<Limits> for HostLimits {
    fn from(limits: Limits) -> Self {
        Self {
            cpu_millis: limits.cpu_millis,
            memory_bytes: limits.memory_bytes(),
            pids: limits.pids,
        }
    }
}

/// A ward with one running box, the beginning of most scenarios.
pub struct Stage {
    pub ward: Arc<dyn Ward>,
    pub live: LiveBox,
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stage")
            .field("live", &self.live)
            .finish_non_exhaustive()
    }
}

/// Small enough for many boxes on a small host.
pub(super) const SMALL: Limits = Limits {
    cpu_millis: 1000,
    memory_mib: 128,
    pids: 64,
    disk_mib: 64,
    open_files: 1024,
};

pub(super) fn spec(bench: &dyn Bench, limits: Limits) -> BoxSpec {
    let id = SandboxId::random();
    BoxSpec {
        hostname: id.to_string(),
        introduction: None,
        id,
        root: bench.root(),
        limits,
    }
}

impl Stage {
    pub async fn new(bench: &dyn Bench) -> Self {
        Self::with_limits(bench, SMALL).await
    }

    pub async fn with_limits(bench: &dyn Bench, limits: Limits) -> Self {
        let ward = bench.ward();
        let live = ward
            .start(spec(bench, limits))
            .await
            .expect("the box starts");
        Self { ward, live }
    }

    /// Runs a shell command as root in the box.
    pub async fn run(&self, command: &str) -> super::Output {
        super::run(self.ward.as_ref(), &self.live.id, command).await
    }

    /// Runs a shell command as another user.
    pub async fn run_as(&self, user: &str, command: &str) -> super::Output {
        super::run_as(self.ward.as_ref(), &self.live.id, user, command).await
    }

    pub async fn end(self) {
        self.ward
            .destroy(&self.live.id)
            .await
            .expect("the box is destroyed");
    }
}
