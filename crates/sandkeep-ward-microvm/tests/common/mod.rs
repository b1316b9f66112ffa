//! A place where the microVM ward can be tried: real disks, the real agent, the real QEMU.

// Each test program uses a part of this.
#![allow(dead_code)]

use sandkeep_model::{Limits, SandboxId, random_token};
use sandkeep_ward::{
    LiveBox, Ward,
    conformance::{
        Bench, HostLimits, MemoryBench, Obstacle,
        lab::{self, Lab},
    },
};
use sandkeep_ward_microvm::{MicrovmWard, MicrovmWardConfig, Record, host_pids, is_installed};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};
use tempfile::TempDir;

pub struct MicrovmBench {
    pub lab: Lab,
    state: TempDir,
}

/// `None` when the operator asked to leave these tests out, or there is no QEMU and nobody
/// said that there must be: `script/test` installs it and sets SANDKEEP_TEST_MICROVM to the
/// directory of the kernel.
pub fn bench() -> Option<MicrovmBench> {
    let wanted = std::env::var_os("SANDKEEP_TEST_MICROVM").is_some();
    if !wanted && !is_installed() {
        return None;
    }
    Some(MicrovmBench {
        lab: Lab::open()?,
        state: TempDir::new().expect("a state directory"),
    })
}

impl MicrovmBench {
    /// Writes a box down and makes so many copies of its disk at `root`; it goes on. Gives the
    /// image and the copies.
    pub async fn written<const COPIES: usize>(
        &self,
        ward: &dyn Ward,
        id: &SandboxId,
        root: &Path,
    ) -> (PathBuf, [PathBuf; COPIES]) {
        ward.freeze(id).await.expect("it is frozen");
        let image = self.directory();
        ward.save(id, &image).await.expect("it is written");
        let copies = std::array::from_fn(|_| self.copy_of(root));
        ward.thaw(id).await.expect("it goes on");
        (image, copies)
    }

    /// Longer than a socket address, as state directories may be.
    pub fn state_dir(&self) -> PathBuf {
        self.state.path().join("a".repeat(120)).join("ward-microvm")
    }

    fn beside(&self, name: &str) -> PathBuf {
        let parent = self.lab.rootfs().parent().expect("a parent");
        parent.join(name)
    }

    /// Booted once for all tests of a run: each is a process of its own.
    pub fn machines_dir(&self) -> PathBuf {
        self.beside("wardtest-machines")
    }

    pub fn microvm(&self) -> Arc<MicrovmWard> {
        self.microvm_with(0, false)
    }

    /// The same with this many QEMUs that wait, and with machines that are warmed up.
    pub fn microvm_with(&self, waiting: usize, warm: bool) -> Arc<MicrovmWard> {
        let config = MicrovmWardConfig {
            kernel: std::env::var_os("SANDKEEP_TEST_MICROVM").map(PathBuf::from),
            waiting,
            warm,
            ..MicrovmWardConfig::new(self.state_dir(), self.machines_dir(), self.lab.agent())
        };
        MicrovmWard::new(config).expect("the ward is made")
    }

    /// The template as a disk, made by the ward itself, once for all tests of a run.
    pub fn template(&self) -> PathBuf {
        let image = self.beside("wardtest-image2");
        let lock = fs::File::create(self.beside("wardtest-image2.lock")).expect("a lock file");
        lock.lock().expect("the lock");
        if !image.join("disk.json").exists() {
            let _half = btrfs("delete", &image);
            assert!(btrfs("create", &image), "a subvolume");
            let (ward, tree, into) = (self.microvm(), self.lab.rootfs().to_owned(), image.clone());
            std::thread::spawn(move || {
                tokio::runtime::Runtime::new()
                    .expect("a runtime")
                    .block_on(ward.form_disk(&tree, &into))
                    .expect("the disk is made");
            })
            .join()
            .expect("the disk is made");
        }
        image
    }
}

fn btrfs(verb: &str, path: &Path) -> bool {
    Command::new("btrfs")
        .args(["subvolume", verb])
        .arg(path)
        .output()
        .is_ok_and(|output| output.status.success())
}

fn record(live: &LiveBox) -> Record {
    serde_json::from_value(live.record.clone()).expect("a record of ours")
}

pub fn pid(live: &LiveBox) -> i32 {
    record(live).pid
}

/// MiB of the memory of its machine that are the box's own.
pub fn own_mib(live: &LiveBox) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{}/smaps", pid(live))).expect("QEMU runs");
    let mut in_ram = false;
    let mut kib = 0;
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("Anonymous:") if in_ram => {
                kib += words
                    .next()
                    .and_then(|n| n.parse::<u64>().ok())
                    .expect("a number");
            }
            Some(first) if !first.ends_with(':') => in_ram = line.contains("sandkeep-ram"),
            _ => {}
        }
    }
    kib >> 10
}

impl Bench for MicrovmBench {
    fn ward(&self) -> Arc<dyn Ward> {
        self.microvm()
    }

    fn root(&self) -> PathBuf {
        self.lab.copy_of(&self.template())
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
        let held = lab::cgroup_limits(live);
        let pids = (1..1000).find(|pids| host_pids(*pids) == held.pids);
        let noted = record(live).more;
        let host_bytes = |memory_mib| {
            let limits = Limits {
                memory_mib,
                ..Limits::default()
            };
            noted.host_limits(&limits).memory_bytes()
        };
        let memory = (1..2048).find(|mib| host_bytes(*mib) == held.memory_bytes);
        HostLimits {
            pids: pids.expect("a limit of ours"),
            memory_bytes: memory.expect("a limit of ours") << 20,
            ..held
        }
    }

    /// Each of them may be emulated.
    fn side_by_side(&self) -> usize {
        5
    }

    fn kill(&self, live: &LiveBox) {
        let record = record(live);
        lab::kill(record.pid, record.start_ticks);
    }
}

impl MemoryBench for MicrovmBench {
    fn copy_of(&self, root: &Path) -> PathBuf {
        self.lab.copy_of(root)
    }

    fn directory(&self) -> PathBuf {
        let path = self.state.path().join(random_token(10));
        fs::create_dir(&path).expect("a directory");
        path
    }

    /// A machine can be written whatever runs in it.
    fn obstacle(&self) -> Option<Obstacle> {
        None
    }
}

impl Drop for MicrovmBench {
    fn drop(&mut self) {
        if let Ok(state_dir) = self.state_dir().canonicalize() {
            lab::remove_tree(&sandkeep_host::cgroup::tree_name(&state_dir));
        }
    }
}

/// A small box with a root of its own.
pub fn spec(root: PathBuf) -> sandkeep_ward::BoxSpec {
    let id = SandboxId::random();
    sandkeep_ward::BoxSpec {
        hostname: id.to_string(),
        introduction: None,
        id,
        root,
        limits: Limits {
            cpu_millis: 1000,
            memory_mib: 256,
            pids: 100,
            disk_mib: 512,
            ..Limits::default()
        },
    }
}
