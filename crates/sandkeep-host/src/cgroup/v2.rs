//! Limits and counters in the files of cgroup2, and making a subtree there.

use super::{
    files::{keyed, read, read_number, write, write_if_there},
    layout::V2Mount,
    v1::CPU_PERIOD_USEC,
};
use crate::{
    failure::{Doing, Failure},
    proc,
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Instant,
};

const CONTROLLERS: &str = "+cpu +memory +pids";

/// Swap would make the limit soft.
pub fn keep_out_of_swap(dir: &Path) -> Result<(), Failure> {
    write_if_there(dir, "memory.swap.max", 0)
}

/// No more than the box may have in memory goes there.
pub fn push_out(dir: &Path) -> Result<(), Failure> {
    let most = read(dir, "memory.max")?;
    write_if_there(dir, "memory.swap.max", most.trim())?;
    write_if_there(dir, "memory.reclaim", memory_bytes(dir)?)
}

pub fn swapped_bytes(dir: &Path) -> Result<u64, Failure> {
    match read_number(dir, "memory.swap.current") {
        Err(failure) if failure.source.kind() == io::ErrorKind::NotFound => Ok(0),
        other => other,
    }
}

pub fn set_memory(dir: &Path, bytes: u64) -> Result<(), Failure> {
    keep_out_of_swap(dir)?;
    // One child is lost at the limit, not the whole box.
    write_if_there(dir, "memory.oom.group", 0)?;
    write(dir, "memory.max", bytes)
}

pub fn set_cpu(dir: &Path, millis: u32) -> Result<(), Failure> {
    let quota = u64::from(millis) * CPU_PERIOD_USEC / 1000;
    write(dir, "cpu.max", format_args!("{quota} {CPU_PERIOD_USEC}"))
}

pub fn set_pids(dir: &Path, most: u32) -> Result<(), Failure> {
    write(dir, "pids.max", most)
}

pub fn cpu_usec(dir: &Path) -> Result<u64, Failure> {
    Ok(keyed(&read(dir, "cpu.stat")?, "usage_usec"))
}

pub fn memory_bytes(dir: &Path) -> Result<u64, Failure> {
    read_number(dir, "memory.current")
}

pub fn cache_bytes(dir: &Path) -> Result<u64, Failure> {
    let stat = read(dir, "memory.stat")?;
    Ok(keyed(&stat, "active_file") + keyed(&stat, "inactive_file"))
}

pub fn oom_kills(dir: &Path) -> Result<u64, Failure> {
    Ok(keyed(&read(dir, "memory.events")?, "oom_kill"))
}

/// A directory for our cgroups whose children can have all controllers.
///
/// At the top and not below our own cgroup, even in a unit with `Delegate=yes`: boxes outlive
/// the server, and a cgroup that shares out controllers takes no processes, so systemd could
/// not start the server again (219/CGROUP) while it holds boxes. Where the top is not ours to
/// change, below our own is better than nothing.
pub fn make_tree(v2: &V2Mount, name: &str) -> Result<PathBuf, Failure> {
    match make_tree_below(&v2.mount, name) {
        Err(refused) if !v2.own.as_os_str().is_empty() => {
            make_tree_below(&v2.mount.join(&v2.own), name).map_err(|_| refused)
        }
        other => other,
    }
}

fn make_tree_below(base: &Path, name: &str) -> Result<PathBuf, Failure> {
    enable_below(base)?;
    let tree = base.join(name);
    make_dir(&tree)?;
    write(&tree, "cgroup.subtree_control", CONTROLLERS)?;
    Ok(tree)
}

/// A cgroup with processes of its own can not share out controllers; ours and those of our
/// unit move into a leaf first.
fn enable_below(base: &Path) -> Result<(), Failure> {
    match write(base, "cgroup.subtree_control", CONTROLLERS) {
        Err(failure) if failure.source.kind() == io::ErrorKind::ResourceBusy => {
            let leaf = base.join("sandkeep.server");
            make_dir(&leaf)?;
            for pid in read(base, "cgroup.procs")?.lines() {
                match write(&leaf, "cgroup.procs", pid) {
                    // It ended meanwhile.
                    Err(gone) if gone.source.raw_os_error() == Some(libc::ESRCH) => {}
                    other => other?,
                }
            }
            write(base, "cgroup.subtree_control", CONTROLLERS)
        }
        other => other,
    }
}

pub fn make_dir(dir: &Path) -> Result<(), Failure> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other.doing(format_args!("making the cgroup {}", dir.display())),
    }
}

/// Beside the cgroups of sandboxes: threads of the kernel that were in them.
pub const KERNEL: &str = "kernel.threads";

/// Threads of the kernel are never frozen and are counted all the same: with one of them in it, a cgroup
/// would never be. They have nothing of the sandbox in them.
fn move_kernel_threads(dir: &Path) -> Result<(), Failure> {
    for pid in read(dir, "cgroup.procs")?.lines() {
        if !pid.parse().is_ok_and(proc::is_of_kernel) {
            continue;
        }
        let other = dir.with_file_name(KERNEL);
        make_dir(&other)?;
        match write(&other, "cgroup.procs", pid) {
            // It ended meanwhile.
            Err(gone) if gone.source.raw_os_error() == Some(libc::ESRCH) => {}
            other => other?,
        }
    }
    Ok(())
}

pub fn freeze(dir: &Path, until: Instant) -> Result<(), Failure> {
    move_kernel_threads(dir)?;
    write(dir, "cgroup.freeze", 1)?;
    super::wait_frozen(until, || is_frozen(dir))
}

pub fn is_frozen(dir: &Path) -> Result<bool, Failure> {
    Ok(keyed(&read(dir, "cgroup.events")?, "frozen") == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    #[test]
    fn limits_go_into_the_files_of_version_2() {
        let dir = fixture(&[("memory.max", ""), ("cpu.max", ""), ("pids.max", "")]);
        set_memory(dir.path(), 4096).unwrap();
        set_cpu(dir.path(), 250).unwrap();
        set_pids(dir.path(), 7).unwrap();
        let read = |file| fs::read_to_string(dir.path().join(file)).unwrap();
        assert_eq!(read("memory.max"), "4096");
        assert_eq!(read("cpu.max"), "25000 100000");
        assert_eq!(read("pids.max"), "7");
    }

    #[test]
    fn counters_come_from_the_files_of_version_2() {
        let dir = fixture(&[
            ("cpu.stat", "usage_usec 77\nuser_usec 70\n"),
            ("memory.current", "8192\n"),
            ("memory.stat", "anon 1\ninactive_file 3\nactive_file 4\n"),
            ("memory.events", "low 0\nmax 9\noom 2\noom_kill 1\n"),
        ]);
        assert_eq!(cpu_usec(dir.path()).unwrap(), 77);
        assert_eq!(memory_bytes(dir.path()).unwrap(), 8192);
        assert_eq!(cache_bytes(dir.path()).unwrap(), 7);
        assert_eq!(oom_kills(dir.path()).unwrap(), 1);
    }

    /// A cgroup mount as plain files, with the server in `unit`; `shared` are the cgroups
    /// that let us share out controllers.
    fn mount(shared: &[&str]) -> (tempfile::TempDir, V2Mount) {
        let dir = tempfile::tempdir().unwrap();
        for group in shared {
            let group = dir.path().join(group);
            fs::create_dir_all(group.join("ours")).unwrap();
            fs::write(group.join("cgroup.subtree_control"), "").unwrap();
            fs::write(group.join("ours/cgroup.subtree_control"), "").unwrap();
        }
        let v2 = V2Mount {
            mount: dir.path().to_owned(),
            own: "unit".into(),
            controllers: Vec::new(),
        };
        (dir, v2)
    }

    #[test]
    fn the_tree_is_at_the_top_so_that_the_unit_can_be_started_again() {
        let (dir, v2) = mount(&["", "unit"]);
        assert_eq!(make_tree(&v2, "ours").unwrap(), dir.path().join("ours"));
        let unit = fs::read_to_string(dir.path().join("unit/cgroup.subtree_control")).unwrap();
        assert_eq!(unit, "", "the unit can still take processes");
    }

    #[test]
    fn the_tree_is_below_our_own_cgroup_where_the_top_is_not_ours() {
        let (dir, v2) = mount(&["unit"]);
        assert_eq!(
            make_tree(&v2, "ours").unwrap(),
            dir.path().join("unit/ours")
        );
    }

    #[test]
    fn the_top_is_what_is_named_when_neither_will_do() {
        let (dir, v2) = mount(&[]);
        let refused = make_tree(&v2, "ours").unwrap_err().to_string();
        let top = dir.path().join("cgroup.subtree_control");
        assert!(refused.contains(top.to_str().unwrap()), "{refused}");
    }
}
