//! What the benches of wards on one host have in common: roots, the agent, what is left.

use super::HostLimits;
use crate::LiveBox;
use std::{
    env, fs,
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
    thread::sleep,
    time::{Duration, Instant},
};

/// Real roots on btrfs and the real agent.
#[derive(Debug)]
pub struct Lab {
    rootfs: PathBuf,
    agent: PathBuf,
    roots: Mutex<Vec<PathBuf>>,
}

impl Lab {
    /// `None` when the operator asked to leave these tests out.
    pub fn open() -> Option<Self> {
        if env::var_os("SANDKEEP_SKIP_ROOTFS_TESTS").is_some_and(|value| value == "1") {
            return None;
        }
        let rootfs = env::var_os("SANDKEEP_TEST_ROOTFS")
            .map(PathBuf::from)
            .expect(
                "SANDKEEP_TEST_ROOTFS must name a directory that is a btrfs subvolume with a root \
                 file system in it, beside which writable snapshots can be made; run as root. \
                 SANDKEEP_SKIP_ROOTFS_TESTS=1 leaves these tests out.",
            );
        assert!(
            rootfs.join("bin/bash").exists(),
            "SANDKEEP_TEST_ROOTFS={} holds no root file system",
            rootfs.display()
        );
        Some(Self {
            rootfs,
            agent: agent(),
            roots: Mutex::default(),
        })
    }

    /// The template, read-only.
    pub fn rootfs(&self) -> &Path {
        &self.rootfs
    }

    pub fn agent(&self) -> PathBuf {
        self.agent.clone()
    }

    /// A fresh writable root, removed at the end.
    pub fn root(&self) -> PathBuf {
        self.copy_of(&self.rootfs)
    }

    /// Another writable root with the files of this one.
    pub fn copy_of(&self, root: &Path) -> PathBuf {
        let copy = self
            .rootfs
            .parent()
            .expect("a parent")
            .join(format!("wardtest-{}", sandkeep_model::random_token(10)));
        let output = Command::new("btrfs")
            .args(["subvolume", "snapshot"])
            .args([root, &copy])
            .output()
            .expect("btrfs runs");
        assert!(output.status.success(), "{output:?}");
        self.roots.lock().expect("the list").push(copy.clone());
        copy
    }

    /// The root that was made last.
    pub fn last_root(&self) -> PathBuf {
        let roots = self.roots.lock().expect("the list");
        roots.last().expect("a root was made").clone()
    }
}

impl Lab {
    /// Removes all roots made so far.
    pub fn drop_roots(&self) {
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
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.drop_roots();
    }
}

/// Puts the files of an image into an empty directory as one finds them that came from elsewhere:
/// images are flat, and modes are not carried.
pub fn carried(image: &Path, to: PathBuf) -> PathBuf {
    for entry in fs::read_dir(image).expect("an image").flatten() {
        let file = to.join(entry.file_name());
        fs::copy(entry.path(), &file).expect("a copy");
        fs::set_permissions(file, fs::Permissions::from_mode(0o600)).expect("a mode");
    }
    fs::set_permissions(&to, fs::Permissions::from_mode(0o700)).expect("a mode");
    to
}

/// An empty directory below `parent` that nobody else has and nobody else may enter.
pub fn fresh_directory(parent: &Path) -> PathBuf {
    let path = parent.join(format!("image-{}", sandkeep_model::random_token(10)));
    fs::DirBuilder::new()
        .mode(0o700)
        .create(&path)
        .expect("a directory");
    path
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
    let status = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
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

/// The cgroup directories in the record.
pub fn cgroup_dirs(live: &LiveBox) -> Vec<PathBuf> {
    live.record["cgroups"]["branches"]
        .as_array()
        .expect("branches")
        .iter()
        .map(|branch| PathBuf::from(branch["dir"].as_str().expect("a path")))
        .collect()
}

/// Whether a process that started then still runs.
pub fn alive(pid: i32, start_ticks: u64) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next().unwrap_or("X");
    let start = fields.nth(18).and_then(|ticks| ticks.parse().ok());
    !matches!(state, "Z" | "X") && start == Some(start_ticks)
}

/// Kills a process and waits until it is dead.
pub fn kill(pid: i32, start_ticks: u64) {
    let killed = Command::new("kill")
        .args(["-KILL", &pid.to_string()])
        .status();
    assert!(killed.is_ok_and(|status| status.success()), "it is killed");
    let until = Instant::now() + Duration::from_secs(30);
    while alive(pid, start_ticks) {
        assert!(Instant::now() < until, "it does not die");
        sleep(Duration::from_millis(1));
    }
}

/// The limits in the cgroups of a box.
pub fn cgroup_limits(live: &LiveBox) -> HostLimits {
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

/// What is left of a box in its cgroups and its directory.
pub fn files_left(live: &LiveBox, state_dir: &Path) -> Vec<String> {
    cgroup_dirs(live)
        .into_iter()
        .chain([state_dir.join(live.id.as_str())])
        .filter(|path| path.exists())
        .map(|path| path.display().to_string())
        .collect()
}

fn read_number(dirs: &[PathBuf], file: &str) -> Option<u64> {
    dirs.iter()
        .find_map(|dir| fs::read_to_string(dir.join(file)).ok())
        .and_then(|text| text.split_ascii_whitespace().next()?.parse().ok())
}

/// Removes the ward's cgroup trees and whatever is still in them.
pub fn remove_tree(name: &str) {
    let until = Instant::now() + Duration::from_secs(5);
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let trees = mounts
        .lines()
        .filter(|line| line.contains(" - cgroup"))
        .filter_map(|line| Some(Path::new(line.split(' ').nth(4)?).join(name)));
    for tree in trees {
        // A test that failed may have left boxes.
        let entries = fs::read_dir(&tree).into_iter().flatten().flatten();
        for left in entries.filter(|entry| entry.path().is_dir()) {
            let procs = fs::read_to_string(left.path().join("cgroup.procs")).unwrap_or_default();
            for pid in procs.lines() {
                let _gone = Command::new("kill").args(["-KILL", pid]).status();
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
