//! A place where the container ward can be tried: real roots, the real agent.

// Each test program uses a part of this.
#![allow(dead_code)]

use sandkeep_ward::{
    LiveBox, Ward,
    conformance::{Bench, HostLimits},
};
use sandkeep_ward_container::{ContainerWard, ContainerWardConfig, Record};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex},
    thread::sleep,
    time::{Duration, Instant},
};
use tempfile::TempDir;

const LAUNCHER: &str = env!("CARGO_BIN_EXE_sandkeep-ward-launcher");

pub struct ContainerBench {
    rootfs: PathBuf,
    agent: PathBuf,
    state: TempDir,
    roots: Mutex<Vec<PathBuf>>,
}

/// `None` when the operator asked to leave these tests out.
pub fn bench() -> Option<ContainerBench> {
    if env::var_os("SANDKEEP_SKIP_ROOTFS_TESTS").is_some_and(|value| value == "1") {
        return None;
    }
    let rootfs = env::var_os("SANDKEEP_TEST_ROOTFS")
        .map(PathBuf::from)
        .expect(
            "SANDKEEP_TEST_ROOTFS must name a directory that is a btrfs subvolume with a root file \
         system in it, below which writable snapshots can be made; run as root. \
         SANDKEEP_SKIP_ROOTFS_TESTS=1 leaves these tests out.",
        );
    assert!(
        rootfs.join("bin/bash").exists(),
        "SANDKEEP_TEST_ROOTFS={} holds no root file system",
        rootfs.display()
    );
    Some(ContainerBench {
        rootfs,
        agent: agent(),
        state: TempDir::new().expect("a state directory"),
        roots: Mutex::default(),
    })
}

/// The agent from `SANDKEEP_TEST_AGENT`, or built here once; other test programs wait.
fn agent() -> PathBuf {
    if let Some(given) = env::var_os("SANDKEEP_TEST_AGENT") {
        return PathBuf::from(given);
    }
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("the crate is in a workspace");
    let target = workspace.join("target/agent-tests");
    fs::create_dir_all(&target).expect("a target directory");
    let lock = fs::File::create(target.join("build.lock")).expect("a lock file");
    lock.lock().expect("the lock");
    let triple = format!("{}-unknown-linux-gnu", env::consts::ARCH);
    let status = Command::new(env!("CARGO"))
        .current_dir(workspace)
        .args(["build", "--package", "sandkeep-agent", "--target", &triple])
        .arg("--target-dir")
        .arg(&target)
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the agent does not build");
    target.join(triple).join("debug/sandkeep-agent")
}

impl ContainerBench {
    pub fn container_ward(&self) -> Arc<ContainerWard> {
        ContainerWard::new(ContainerWardConfig::new(
            self.state_dir(),
            self.agent.clone(),
            PathBuf::from(LAUNCHER),
        ))
        .expect("the ward is made")
    }

    /// The root that was made last.
    pub fn last_root(&self) -> PathBuf {
        let roots = self.roots.lock().expect("the list");
        roots.last().expect("a root was made").clone()
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

/// The cgroup directories in the record.
pub fn cgroup_dirs(live: &LiveBox) -> Vec<PathBuf> {
    live.record["cgroups"]["branches"]
        .as_array()
        .expect("branches")
        .iter()
        .map(|branch| PathBuf::from(branch["dir"].as_str().expect("a path")))
        .collect()
}

fn alive(record: &Record) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", record.pid)).unwrap_or_default();
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next().unwrap_or("X");
    let start = fields.nth(18).and_then(|ticks| ticks.parse().ok());
    !matches!(state, "Z" | "X") && start == Some(record.start_ticks)
}

fn read_number(dirs: &[PathBuf], file: &str) -> Option<u64> {
    dirs.iter()
        .find_map(|dir| fs::read_to_string(dir.join(file)).ok())
        .and_then(|text| text.split_ascii_whitespace().next()?.parse().ok())
}

impl Bench for ContainerBench {
    fn ward(&self) -> Arc<dyn Ward> {
        self.container_ward()
    }

    fn root(&self) -> PathBuf {
        let root = self
            .rootfs
            .parent()
            .expect("a parent")
            .join(format!("wardtest-{}", sandkeep_model::random_token(10)));
        let output = Command::new("btrfs")
            .args(["subvolume", "snapshot"])
            .args([&self.rootfs, &root])
            .output()
            .expect("btrfs runs");
        assert!(output.status.success(), "{output:?}");
        self.roots.lock().expect("the list").push(root.clone());
        root
    }

    fn traces(&self, live: &LiveBox) -> Vec<String> {
        let record = record(live);
        let mut traces: Vec<String> = cgroup_dirs(live)
            .into_iter()
            .chain([self.state_dir().join(live.id.as_str())])
            .filter(|path| path.exists())
            .map(|path| path.display().to_string())
            .collect();
        if alive(&record) {
            traces.push(format!("process {}", record.pid));
        }
        traces
    }

    fn host_limits(&self, live: &LiveBox) -> HostLimits {
        let dirs = cgroup_dirs(live);
        let quota = read_number(&dirs, "cpu.cfs_quota_us")
            .or_else(|| read_number(&dirs, "cpu.max"))
            .expect("a quota");
        HostLimits {
            cpu_millis: u32::try_from(quota / 100).expect("a small quota"),
            memory_bytes: read_number(&dirs, "memory.limit_in_bytes")
                .or_else(|| read_number(&dirs, "memory.max"))
                .expect("a limit"),
            pids: u32::try_from(read_number(&dirs, "pids.max").expect("a limit")).expect("small"),
        }
    }

    fn kill(&self, live: &LiveBox) {
        let record = record(live);
        let pid = rustix::process::Pid::from_raw(record.pid).expect("a pid");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it is killed");
        let until = Instant::now() + Duration::from_secs(60);
        while alive(&record) {
            assert!(Instant::now() < until, "it does not die");
            sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for ContainerBench {
    fn drop(&mut self) {
        for root in self.roots.lock().expect("the list").drain(..) {
            let deleted = Command::new("btrfs")
                .args(["subvolume", "delete"])
                .arg(&root)
                .output();
            assert!(
                deleted.is_ok_and(|output| output.status.success()),
                "{} is left behind",
                root.display()
            );
        }
        remove_tree(&self.state_dir());
    }
}

/// Removes the ward's cgroup trees and whatever is still in them.
fn remove_tree(state_dir: &Path) {
    let Ok(state_dir) = state_dir.canonicalize() else {
        return;
    };
    let name = sandkeep_ward_container::tree_name(&state_dir);
    let until = Instant::now() + Duration::from_secs(30);
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let trees = mounts
        .lines()
        .filter(|line| line.contains(" - cgroup"))
        .filter_map(|line| Some(Path::new(line.split(' ').nth(4)?).join(&name)));
    for tree in trees {
        // A test that failed may have left boxes.
        let entries = fs::read_dir(&tree).into_iter().flatten().flatten();
        for left in entries.filter(|entry| entry.path().is_dir()) {
            let procs = fs::read_to_string(left.path().join("cgroup.procs")).unwrap_or_default();
            for pid in procs.lines().filter_map(|line| line.parse().ok()) {
                if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                    let _gone = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
            }
            while fs::remove_dir(left.path()).is_err()
                && left.path().exists()
                && Instant::now() < until
            {
                sleep(Duration::from_millis(5));
            }
        }
        while fs::remove_dir(&tree).is_err() && tree.exists() && Instant::now() < until {
            sleep(Duration::from_millis(5));
        }
    }
}

/// A small box with a root of its own.
pub fn spec(bench: &ContainerBench) -> sandkeep_ward::BoxSpec {
    let id = sandkeep_model::SandboxId::random();
    sandkeep_ward::BoxSpec {
        hostname: id.to_string(),
        id,
        root: bench.root(),
        limits: sandkeep_model::Limits {
            memory_mib: 128,
            pids: 64,
            ..sandkeep_model::Limits::default()
        },
    }
}
