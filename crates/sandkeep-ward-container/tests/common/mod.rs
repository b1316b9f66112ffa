//! A place where the container ward can be tried: real roots, the real agent.

// Each test program uses a part of this.
#![allow(dead_code)]

use sandkeep_ward::{
    LiveBox, Ward,
    conformance::{
        Bench, HostLimits, MemoryBench, Obstacle,
        lab::{self, Lab},
    },
};
use sandkeep_ward_container::{ContainerWard, ContainerWardConfig, Record};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use tempfile::TempDir;

const LAUNCHER: &str = env!("CARGO_BIN_EXE_sandkeep-ward-launcher");

pub struct ContainerBench {
    lab: Lab,
    state: TempDir,
}

/// `None` when the operator asked to leave these tests out.
pub fn bench() -> Option<ContainerBench> {
    Some(ContainerBench {
        lab: Lab::open()?,
        state: TempDir::new().expect("a state directory"),
    })
}

impl ContainerBench {
    pub fn container_ward(&self) -> Arc<ContainerWard> {
        self.ward_with(None)
    }

    /// A ward that runs another CRIU than the one of this host.
    pub fn ward_with(&self, criu: Option<PathBuf>) -> Arc<ContainerWard> {
        let config =
            ContainerWardConfig::new(self.state_dir(), self.lab.agent(), PathBuf::from(LAUNCHER));
        ContainerWard::new(ContainerWardConfig { criu, ..config }).expect("the ward is made")
    }

    /// The ward of another server, with other ids for its boxes.
    pub fn ward_elsewhere(&self) -> Arc<ContainerWard> {
        let usual =
            ContainerWardConfig::new(self.elsewhere(), self.lab.agent(), PathBuf::from(LAUNCHER));
        let config = ContainerWardConfig {
            id_base: usual.id_base + 0x0400_0000,
            id_slots: 16,
            ..usual
        };
        ContainerWard::new(config).expect("the ward is made")
    }

    fn elsewhere(&self) -> PathBuf {
        self.state.path().join("elsewhere")
    }

    /// The root that was made last.
    pub fn last_root(&self) -> PathBuf {
        self.lab.last_root()
    }

    /// Longer than a socket address, as state directories may be.
    pub fn state_dir(&self) -> PathBuf {
        self.state
            .path()
            .join("a".repeat(120))
            .join("ward-container")
    }
}

fn record(live: &LiveBox) -> Record {
    serde_json::from_value(live.record.clone()).expect("a record of ours")
}

impl Bench for ContainerBench {
    fn ward(&self) -> Arc<dyn Ward> {
        self.container_ward()
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
        traces
    }

    fn host_limits(&self, live: &LiveBox) -> HostLimits {
        lab::cgroup_limits(live)
    }

    fn kill(&self, live: &LiveBox) {
        let record = record(live);
        lab::kill(record.pid, record.start_ticks);
    }
}

impl MemoryBench for ContainerBench {
    fn copy_of(&self, root: &Path) -> PathBuf {
        self.lab.copy_of(root)
    }

    fn directory(&self) -> PathBuf {
        lab::fresh_directory(self.state.path())
    }

    /// A POSIX message queue: kernel state that nobody can read out.
    fn obstacle(&self) -> Option<Obstacle> {
        Some(Obstacle {
            make: "cat > /root/queue.py <<'END'
import ctypes, os, time
attributes = (ctypes.c_long * 8)(0, 4, 64)
queue = ctypes.CDLL(None).mq_open(b'/held', os.O_CREAT | os.O_RDWR, 0o600, attributes)
assert queue >= 0
open('/run/held', 'w').write('yes')
time.sleep(1000)
END
nohup python3 /root/queue.py >/dev/null 2>&1 & until [ -s /run/held ]; do sleep 0.1; done",
            undo: "pkill -f '[q]ueue.py' && rm /dev/mqueue/held",
            named: "message queue",
        })
    }
}

impl Drop for ContainerBench {
    fn drop(&mut self) {
        for state_dir in [self.state_dir(), self.elsewhere()] {
            if let Ok(state_dir) = state_dir.canonicalize() {
                lab::remove_tree(&sandkeep_ward_container::tree_name(&state_dir));
            }
        }
    }
}

/// A small box with a root of its own.
pub fn spec(bench: &ContainerBench) -> sandkeep_ward::BoxSpec {
    spec_on(bench.root())
}

pub fn spec_on(root: PathBuf) -> sandkeep_ward::BoxSpec {
    let id = sandkeep_model::SandboxId::random();
    sandkeep_ward::BoxSpec {
        hostname: id.to_string(),
        introduction: None,
        id,
        root,
        limits: sandkeep_model::Limits {
            memory_mib: 128,
            pids: 64,
            ..sandkeep_model::Limits::default()
        },
    }
}
