//! Control groups: one directory per box in every hierarchy that is used.

mod files;
pub mod layout;
mod v1;
mod v2;

use crate::{
    failure::{Doing, Failure},
    proc,
};
use layout::{Kind, Layout};
use sandkeep_model::{Limits, Result, Usage};
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

const RENAME_DEADLINE: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Version {
    V1,
    V2,
}

/// One directory in one hierarchy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Branch {
    pub version: Version,
    pub dir: PathBuf,
    pub controllers: Vec<String>,
}

/// The same place in all hierarchies: the ward's tree, or one box in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroups {
    pub branches: Vec<Branch>,
}

impl Cgroups {
    /// Makes the ward's own tree. `name` tells the trees of two servers on one host apart.
    pub fn make_tree(layout: &Layout, name: &str) -> Result<Self> {
        let kind = layout.kind()?;
        let mut branches = Vec::new();
        if kind != Kind::Unified {
            for (mount, controllers) in &layout.v1 {
                branches.push(Branch {
                    version: Version::V1,
                    dir: mount.join(name),
                    controllers: controllers.clone(),
                });
            }
        }
        if let Some(v2) = &layout.v2 {
            let dir = if kind == Kind::Unified {
                v2::make_tree(v2, name)?
            } else {
                v2.mount.join(name)
            };
            branches.push(Branch {
                version: Version::V2,
                dir,
                controllers: if kind == Kind::Unified {
                    ["cpu", "memory", "pids"].map(str::to_owned).to_vec()
                } else {
                    Vec::new()
                },
            });
        }
        let tree = Self { branches };
        tree.create()?;
        Ok(tree)
    }

    /// The cgroups called `name` in this tree.
    pub fn child(&self, name: &str) -> Self {
        let mut child = self.clone();
        for branch in &mut child.branches {
            branch.dir.push(name);
        }
        child
    }

    pub fn create(&self) -> Result<(), Failure> {
        self.branches
            .iter()
            .try_for_each(|branch| v2::make_dir(&branch.dir))
    }

    /// The name of a box's cgroups in the tree.
    pub fn name(&self) -> Option<&str> {
        self.branches.first()?.dir.file_name()?.to_str()
    }

    /// Whether a process must be moved in; with everything on cgroup2 it is cloned into it.
    pub fn needs_attach(&self) -> bool {
        self.branches
            .iter()
            .any(|branch| branch.version == Version::V1)
    }

    pub fn v2(&self) -> Option<&Path> {
        self.branches
            .iter()
            .find(|branch| branch.version == Version::V2)
            .map(|branch| branch.dir.as_path())
    }

    /// Moves a process in. On version 1 this waits for the kernel, about 3 ms per hierarchy.
    pub fn attach(&self, pid: i32) -> Result<(), Failure> {
        self.branches
            .iter()
            .try_for_each(|branch| files::write(&branch.dir, "cgroup.procs", pid))
    }

    /// Moves a process in wherever that works: for one that is about to end.
    pub fn attach_as_far_as_possible(&self, pid: i32) {
        for branch in &self.branches {
            let _moved = files::write(&branch.dir, "cgroup.procs", pid);
        }
    }

    /// Gives them, with everything in them, another name in their tree; nothing has that name.
    /// Version 2 renames nothing: there the processes move, and the memory they have so far is
    /// counted by the tree from then on.
    pub fn rename(&self, to: &Self) -> Result<(), Failure> {
        for (from, to) in self.branches.iter().zip(&to.branches) {
            if from.version == Version::V1 {
                fs::rename(&from.dir, &to.dir)
                    .doing(format_args!("renaming the cgroup {}", from.dir.display()))?;
                continue;
            }
            v2::make_dir(&to.dir)?;
            let here = Self {
                branches: vec![from.clone()],
            };
            for pid in here.listed() {
                files::write(&to.dir, "cgroup.procs", pid)?;
            }
            here.remove(RENAME_DEADLINE)?;
        }
        Ok(())
    }

    fn with(&self, controller: &str) -> Result<&Branch, Failure> {
        self.branches
            .iter()
            .find(|branch| branch.controllers.iter().any(|name| name == controller))
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
            .doing(format_args!("finding the {controller} cgroup of the box"))
    }

    pub fn set_limits(&self, limits: &Limits) -> Result<(), Failure> {
        let (memory, cpu, pids) = (self.with("memory")?, self.with("cpu")?, self.with("pids")?);
        match memory.version {
            Version::V1 => v1::set_memory(&memory.dir, limits.memory_bytes())?,
            Version::V2 => v2::set_memory(&memory.dir, limits.memory_bytes())?,
        }
        match cpu.version {
            Version::V1 => v1::set_cpu(&cpu.dir, limits.cpu_millis)?,
            Version::V2 => v2::set_cpu(&cpu.dir, limits.cpu_millis)?,
        }
        match pids.version {
            Version::V1 => v1::set_pids(&pids.dir, limits.pids),
            Version::V2 => v2::set_pids(&pids.dir, limits.pids),
        }
    }

    pub fn usage(&self) -> Result<Usage, Failure> {
        let memory = self.with("memory")?;
        let (memory_bytes, cache_bytes) = match memory.version {
            Version::V1 => (
                v1::memory_bytes(&memory.dir)?,
                v1::cache_bytes(&memory.dir)?,
            ),
            Version::V2 => (
                v2::memory_bytes(&memory.dir)?,
                v2::cache_bytes(&memory.dir)?,
            ),
        };
        let cpu_usec = match self.with("cpuacct") {
            Ok(branch) => v1::cpu_usec(&branch.dir)?,
            Err(_) => v2::cpu_usec(&self.with("cpu")?.dir)?,
        };
        Ok(Usage {
            cpu_usec,
            memory_bytes,
            cache_bytes,
            pids: files::read_number(&self.with("pids")?.dir, "pids.current")?,
            oom_kills: self.oom_kills()?,
            disk_bytes: 0,
        })
    }

    pub fn oom_kills(&self) -> Result<u64, Failure> {
        let memory = self.with("memory")?;
        match memory.version {
            Version::V1 => v1::oom_kills(&memory.dir),
            Version::V2 => v2::oom_kills(&memory.dir),
        }
    }

    /// Everything that runs in them. Threads of the kernel do not belong to whoever they were made for:
    /// KVM has one for each machine, which Linux before 6.13 shows beside its QEMU.
    pub fn processes(&self) -> Vec<i32> {
        let mut pids = self.listed();
        pids.retain(|pid| !proc::is_of_kernel(*pid));
        pids
    }

    /// What the kernel lists in them, its own threads included.
    fn listed(&self) -> Vec<i32> {
        let mut pids: Vec<i32> = self
            .branches
            .iter()
            .filter_map(|branch| fs::read_to_string(branch.dir.join("cgroup.procs")).ok())
            .flat_map(|text| {
                text.lines()
                    .filter_map(|line| line.parse().ok())
                    .collect::<Vec<i32>>()
            })
            // 0 stands for a process of another pid namespace: not ours to signal.
            .filter(|pid| *pid > 1)
            .collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// Stops everything in them and waits until it stands still. On error it goes on as before.
    pub fn freeze(&self, deadline: Duration) -> Result<(), Failure> {
        let until = Instant::now() + deadline;
        let frozen = match self.freezer() {
            Some((Version::V1, dir)) => v1::freeze(dir, until),
            Some((Version::V2, dir)) => v2::freeze(dir, until),
            None => Err(io::Error::from(io::ErrorKind::Unsupported))
                .doing("finding a freezer of this host"),
        };
        if frozen.is_err() {
            self.thaw();
        }
        frozen
    }

    /// Has everything in them stand still at its next step, and does not wait for it. What is killed
    /// then dies without another step, in whatever order that is done.
    pub fn halt(&self) {
        let halted = match self.freezer() {
            Some((Version::V1, dir)) => files::write_if_there(dir, "freezer.state", "FROZEN"),
            Some((Version::V2, dir)) => files::write_if_there(dir, "cgroup.freeze", 1),
            None => Ok(()),
        };
        if let Err(failure) = halted {
            tracing::debug!(%failure, "the cgroup was not frozen");
        }
    }

    /// The directory that freezes: the one of version 1 where there is one.
    pub fn freezer(&self) -> Option<(Version, &Path)> {
        let v1 = self.branches.iter().find(|branch| {
            branch.version == Version::V1 && branch.controllers.iter().any(|c| c == "freezer")
        });
        match v1 {
            Some(branch) => Some((Version::V1, &branch.dir)),
            None => self.v2().map(|dir| (Version::V2, dir)),
        }
    }

    /// Whether everything in them stands still.
    pub fn is_frozen(&self) -> Result<bool, Failure> {
        match self.freezer() {
            Some((Version::V1, dir)) => v1::is_frozen(dir),
            Some((Version::V2, dir)) => v2::is_frozen(dir),
            None => Ok(false),
        }
    }

    /// Moves what is in memory to swap, and says how many bytes went. The kernel takes as much
    /// as it can and says that it could have been more; that is no fault.
    pub fn push_out(&self) -> Result<u64, Failure> {
        if !has_swap(&fs::read_to_string("/proc/swaps").unwrap_or_default()) {
            return Ok(0);
        }
        let memory = self.with("memory")?;
        let swapped = || match memory.version {
            Version::V1 => v1::swapped_bytes(&memory.dir),
            Version::V2 => v2::swapped_bytes(&memory.dir),
        };
        let before = swapped()?;
        let pushed = match memory.version {
            Version::V1 => v1::push_out(&memory.dir),
            Version::V2 => v2::push_out(&memory.dir),
        };
        if let Err(failure) = pushed {
            tracing::debug!(%failure, "not everything went to swap");
        }
        self.keep_out_of_swap()?;
        Ok(swapped()?.saturating_sub(before))
    }

    /// A box that runs has what it has in memory. What was pushed out comes back when it is used.
    pub fn keep_out_of_swap(&self) -> Result<(), Failure> {
        let memory = self.with("memory")?;
        match memory.version {
            Version::V1 => v1::keep_out_of_swap(&memory.dir),
            Version::V2 => v2::keep_out_of_swap(&memory.dir),
        }
    }

    /// A frozen process does not die; whoever is to be killed must be thawed.
    pub fn thaw(&self) {
        for branch in &self.branches {
            let thawed = match branch.version {
                Version::V1 if branch.controllers.iter().any(|name| name == "freezer") => {
                    files::write_if_there(&branch.dir, "freezer.state", "THAWED")
                }
                Version::V2 => files::write_if_there(&branch.dir, "cgroup.freeze", 0),
                Version::V1 => continue,
            };
            if let Err(failure) = thawed {
                tracing::debug!(%failure, "the cgroup was not thawed");
            }
        }
    }

    /// Kills everything in them and says how many processes that were. What is frozen dies where
    /// it stands: thawed first, it would go on for a moment and write to a disk that is to be what
    /// it was when its memory was written down.
    pub fn kill_all(&self) -> usize {
        let pids = self.processes();
        let by_kernel = self
            .v2()
            .is_some_and(|dir| files::write(dir, "cgroup.kill", 1).is_ok());
        if !by_kernel || self.needs_attach() {
            for pid in &pids {
                proc::kill(*pid);
            }
        }
        self.thaw();
        pids.len()
    }

    /// Kills everything in them and removes them; says how many processes and cgroups that were. There
    /// may be a CRIU that holds processes of a box, which would run if it ended first.
    pub fn clear(&self, deadline: Duration) -> Result<(usize, usize), Failure> {
        self.halt();
        let processes = self.kill_all();
        Ok((processes, self.remove(deadline)?))
    }

    /// Removes them. The last process may still be on its way out, so this waits a little.
    pub fn remove(&self, deadline: Duration) -> Result<usize, Failure> {
        let until = Instant::now() + deadline;
        let mut removed = 0;
        for branch in &self.branches {
            loop {
                match fs::remove_dir(&branch.dir) {
                    Ok(()) => {
                        removed += 1;
                        break;
                    }
                    Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                    Err(error)
                        if error.kind() == io::ErrorKind::ResourceBusy
                            && Instant::now() < until =>
                    {
                        thread::sleep(Duration::from_millis(1));
                    }
                    Err(error) => {
                        return Err(error)
                            .doing(format_args!("removing the cgroup {}", branch.dir.display()));
                    }
                }
            }
        }
        Ok(removed)
    }

    /// The names of all children in any hierarchy of this tree, but for the one of the kernel's threads.
    pub fn children(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .branches
            .iter()
            .filter_map(|branch| fs::read_dir(&branch.dir).ok())
            .flatten()
            .filter_map(|entry| entry.ok())
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name != v2::KERNEL)
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

/// `/proc/swaps` has a line of titles and one for each place.
fn has_swap(swaps: &str) -> bool {
    swaps.lines().count() > 1
}

/// Looks until everything stands still. A task in the middle of a system call that can not be
/// interrupted lets us wait.
fn wait_frozen(
    until: Instant,
    mut still: impl FnMut() -> Result<bool, Failure>,
) -> Result<(), Failure> {
    while !still()? {
        if Instant::now() >= until {
            return Err(io::Error::from(io::ErrorKind::TimedOut)).doing("freezing the box");
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// `sandkeep.<hash of the state directory>`: two servers on one host keep apart.
pub fn tree_name(state_dir: &Path) -> String {
    use std::os::unix::ffi::OsStrExt as _;
    // FNV-1a: needs to be the same in every build, not to withstand an attacker.
    let hash = state_dir
        .as_os_str()
        .as_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
    format!("sandkeep.{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_disk() -> (tempfile::TempDir, Cgroups) {
        let dir = tempfile::tempdir().unwrap();
        let branch = |name: &str, version, controllers: &[&str]| Branch {
            version,
            dir: dir.path().join(name),
            controllers: controllers.iter().map(|name| (*name).to_owned()).collect(),
        };
        let tree = Cgroups {
            branches: vec![
                branch("cpu", Version::V1, &["cpu", "cpuacct"]),
                branch("memory", Version::V1, &["memory"]),
                branch("unified", Version::V2, &[]),
            ],
        };
        tree.create().unwrap();
        (dir, tree)
    }

    #[test]
    fn a_box_is_at_the_same_place_in_every_hierarchy() {
        let (dir, tree) = on_disk();
        let child = tree.child("x-1");
        child.create().unwrap();
        assert_eq!(child.name(), Some("x-1"));
        assert_eq!(child.v2().unwrap(), dir.path().join("unified/x-1"));
        assert_eq!(tree.children(), ["x-1"]);
        assert!(child.needs_attach());
        assert_eq!(child.remove(Duration::ZERO).unwrap(), 3);
        assert_eq!(child.remove(Duration::ZERO).unwrap(), 0);
        assert!(tree.children().is_empty());
    }

    #[test]
    fn titles_alone_are_no_swap() {
        let titles = "Filename\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        assert!(!has_swap(titles));
        assert!(!has_swap(""));
        assert!(has_swap(&format!("{titles}/dev/vdb partition\t1\t0\t-2\n")));
    }

    #[test]
    fn the_tree_is_named_after_the_state_directory() {
        assert_eq!(tree_name(Path::new("/a")), tree_name(Path::new("/a")));
        assert_ne!(tree_name(Path::new("/a")), tree_name(Path::new("/b")));
    }
}
