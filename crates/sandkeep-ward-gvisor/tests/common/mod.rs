//! A place where the gVisor ward can be tried: real roots, the real agent, the real runsc.

// Each test program uses a part of this.
#![allow(dead_code)]

use sandkeep_ward::{
    LiveBox, Ward,
    conformance::{
        Bench, HostLimits, MemoryBench, Obstacle,
        lab::{self, Lab},
    },
};
use sandkeep_ward_gvisor::{GvisorWard, GvisorWardConfig, Record, find_runsc, host_pids};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use tempfile::TempDir;

pub struct GvisorBench {
    pub lab: Lab,
    state: TempDir,
    runsc: Option<PathBuf>,
}

/// The `runsc` of SANDKEEP_TEST_RUNSC, or the one of this host. `None` when the operator asked to
/// leave these tests out, or there is no runsc and nobody said that there must be: `script/test`
/// installs it and sets SANDKEEP_TEST_GVISOR.
pub fn bench() -> Option<GvisorBench> {
    with(named("SANDKEEP_TEST_RUNSC"))
}

/// The oldest release we take, where `script/test` says where it is: beside the newest.
pub fn oldest() -> Option<GvisorBench> {
    with(Some(named("SANDKEEP_TEST_RUNSC_OLDEST")?))
}

fn named(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from)
}

fn with(runsc: Option<PathBuf>) -> Option<GvisorBench> {
    if find_runsc(runsc.as_deref()).is_none() && std::env::var_os("SANDKEEP_TEST_GVISOR").is_none()
    {
        return None;
    }
    Some(GvisorBench {
        lab: Lab::open()?,
        state: TempDir::new().expect("a state directory"),
        runsc,
    })
}

impl GvisorBench {
    /// As if the operator had replaced it.
    pub fn use_runsc_of(&mut self, other: &Self) {
        self.runsc.clone_from(&other.runsc);
    }

    pub async fn engine(&self) -> String {
        let engine = self.ward().engine().await;
        engine.expect("there is a runsc").build
    }

    /// Longer than a socket address, as state directories may be.
    pub fn state_dir(&self) -> PathBuf {
        self.state.path().join("a".repeat(120)).join("ward-gvisor")
    }
}

fn record(live: &LiveBox) -> Record {
    serde_json::from_value(live.record.clone()).expect("a record of ours")
}

impl Bench for GvisorBench {
    fn ward(&self) -> Arc<dyn Ward> {
        GvisorWard::new(GvisorWardConfig {
            runsc: self.runsc.clone(),
            ..GvisorWardConfig::new(self.state_dir(), self.lab.agent())
        })
        .expect("the ward is made")
    }

    fn root(&self) -> PathBuf {
        self.lab.root()
    }

    fn traces(&self, live: &LiveBox) -> Vec<String> {
        let record = record(live);
        let mut traces = lab::files_left(live, &self.state_dir());
        if lab::alive(record.pid, record.start_ticks) {
            traces.push(format!("process {}", record.pid));
        }
        if record.more.control.exists() {
            traces.push(record.more.control.display().to_string());
        }
        traces
    }

    fn host_limits(&self, live: &LiveBox) -> HostLimits {
        let held = lab::cgroup_limits(live);
        let pids = (1..1000).find(|pids| host_pids(*pids) == held.pids);
        HostLimits {
            pids: pids.expect("a limit of ours"),
            ..held
        }
    }

    fn memory_takes_the_box(&self) -> bool {
        true
    }

    /// Its kernel counts forks that are under way late.
    fn more_forks(&self) -> u32 {
        64
    }

    fn kill(&self, live: &LiveBox) {
        let record = record(live);
        lab::kill(record.pid, record.start_ticks);
    }
}

impl MemoryBench for GvisorBench {
    fn copy_of(&self, root: &Path) -> PathBuf {
        self.lab.copy_of(root)
    }

    fn directory(&self) -> PathBuf {
        lab::fresh_directory(self.state.path())
    }

    /// A deleted pipe that is still open on the disk of the box: no release writes that. (Old ones
    /// do not write deleted files either.)
    fn obstacle(&self) -> Option<Obstacle> {
        Some(Obstacle {
            make: "mkfifo /root/deleted; nohup sh -c 'exec 3<> /root/deleted; rm /root/deleted; echo yes > /run/held; \
                   exec sleep 1000' >/dev/null 2>&1 & until [ -s /run/held ]; do sleep 0.1; done",
            undo: "pkill sleep",
            named: "/root/deleted",
        })
    }
}

impl Drop for GvisorBench {
    fn drop(&mut self) {
        if let Ok(state_dir) = self.state_dir().canonicalize() {
            lab::remove_tree(&sandkeep_host::cgroup::tree_name(&state_dir));
        }
    }
}
