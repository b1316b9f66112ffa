//! A place where the gVisor ward can be tried: real roots, the real agent, the real runsc.

// Each test program uses a part of this.
#![allow(dead_code)]

use sandkeep_ward::{
    LiveBox, Ward,
    conformance::{
        Bench, HostLimits,
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
}

/// `None` when the operator asked to leave these tests out, or there is no runsc and nobody
/// said that there must be: `script/test` installs it and sets SANDKEEP_TEST_GVISOR.
pub fn bench() -> Option<GvisorBench> {
    if find_runsc(None).is_none() && std::env::var_os("SANDKEEP_TEST_GVISOR").is_none() {
        return None;
    }
    Some(GvisorBench {
        lab: Lab::open()?,
        state: TempDir::new().expect("a state directory"),
    })
}

impl GvisorBench {
    /// Longer than a socket address, as state directories may be.
    pub fn state_dir(&self) -> PathBuf {
        self.state.path().join("a".repeat(120)).join("ward-gvisor")
    }

    /// A directory that the bench removes.
    pub fn directory(&self, name: &str) -> PathBuf {
        let path = self.state.path().join(name);
        std::fs::create_dir(&path).expect("a directory");
        path
    }

    pub fn copy_of(&self, root: &Path) -> PathBuf {
        self.lab.copy_of(root)
    }
}

fn record(live: &LiveBox) -> Record {
    serde_json::from_value(live.record.clone()).expect("a record of ours")
}

impl Bench for GvisorBench {
    fn ward(&self) -> Arc<dyn Ward> {
        GvisorWard::new(GvisorWardConfig::new(self.state_dir(), self.lab.agent()))
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
        if record.control.exists() {
            traces.push(record.control.display().to_string());
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

impl Drop for GvisorBench {
    fn drop(&mut self) {
        if let Ok(state_dir) = self.state_dir().canonicalize() {
            lab::remove_tree(&sandkeep_host::cgroup::tree_name(&state_dir));
        }
    }
}

/// A small box with a root of its own.
pub fn spec(root: PathBuf) -> sandkeep_ward::BoxSpec {
    let id = sandkeep_model::SandboxId::random();
    sandkeep_ward::BoxSpec {
        hostname: id.to_string(),
        id,
        root,
        limits: sandkeep_model::Limits {
            memory_mib: 512,
            pids: 100,
            ..sandkeep_model::Limits::default()
        },
    }
}
