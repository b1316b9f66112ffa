//! Whether a box that came back from the disk is confined as every box is.
//!
//! Asked while no process of it runs, about every thread of it, and answered out of what the
//! kernel says: neither the image nor CRIU is believed.

use super::{caps, table};
use crate::{cgroup::Cgroups, slots::IDS_PER_BOX};
use std::{fs, io, ops::Range, path::Path};

/// What must be true of it.
pub struct Expected<'a> {
    pub first_id: u32,
    /// The mount namespace of CRIU.
    pub room: &'a str,
    pub cgroups: &'a Cgroups,
    /// How many seccomp programs every box has; programs in it may have added their own.
    pub filters: usize,
    /// The file system with the files it has of its own, as `mountinfo` has it.
    pub own: String,
    /// That of the agent.
    pub agent: String,
}

/// Namespaces a box has of its own. The network's and the cgroup's are made by the worker.
const OWN: [&str; 5] = ["user", "pid", "mnt", "ipc", "uts"];
const WORKERS: [&str; 2] = ["net", "cgroup"];
/// So that no core dump starts a program of the host.
const CORE_LIMIT: &str = "1";

/// The processes of the box, or what is wrong with it. `init` is its PID 1.
pub fn confined(init: i32, expected: &Expected<'_>) -> Result<Vec<i32>, String> {
    let namespaces = own_namespaces(init)?;
    if namespaces.iter().any(|(_, its)| its == expected.room) {
        return Err("it is in the mount namespace of CRIU".to_owned());
    }
    let map = format!("0 {} {IDS_PER_BOX}", expected.first_id);
    for file in ["uid_map", "gid_map"] {
        let found = read(&format!("/proc/{init}/{file}"))?;
        if found.split_ascii_whitespace().ne(map.split(' ')) {
            return Err(format!("its {file} is {:?}", found.trim()));
        }
    }
    let mounts = table::of(init).map_err(|error| error.to_string())?;
    table::check(&mounts, &expected.own, &expected.agent)?;
    let processes = processes(init, expected.cgroups)?;
    for pid in &processes {
        of_process(*pid, &namespaces, expected)
            .map_err(|why| format!("process {pid} of it: {why}"))?;
    }
    Ok(processes)
}

fn read(path: &str) -> Result<String, String> {
    text_of(path).map_err(|error| format!("{path}: {error}"))
}

/// A file of /proc. A process may have any bytes as its name.
fn text_of(path: impl AsRef<Path>) -> io::Result<String> {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

fn namespace(pid: &str, name: &str) -> Result<String, String> {
    let path = format!("/proc/{pid}/ns/{name}");
    let link = fs::read_link(&path).map_err(|error| format!("{path}: {error}"))?;
    Ok(link.to_string_lossy().into_owned())
}

/// Those of PID 1: its own, or the worker's.
fn own_namespaces(init: i32) -> Result<Vec<(&'static str, String)>, String> {
    let mut all = Vec::new();
    for name in OWN.into_iter().chain(WORKERS) {
        let its = namespace(&init.to_string(), name)?;
        let ours = namespace("self", name)?;
        if OWN.contains(&name) == (its == ours) {
            return Err(format!("its {name} namespace is {its}, ours is {ours}"));
        }
        all.push((name, its));
    }
    Ok(all)
}

/// Everything in the pid namespace of the box, and all of it in every cgroup of the box.
fn processes(init: i32, cgroups: &Cgroups) -> Result<Vec<i32>, String> {
    let space = namespace(&init.to_string(), "pid")?;
    let inside = |pid: &i32| namespace(&pid.to_string(), "pid").is_ok_and(|its| its == space);
    let entries = fs::read_dir("/proc").map_err(|error| error.to_string())?;
    let all: Vec<i32> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(inside)
        .collect();
    let mut alive = Vec::new();
    for pid in &all {
        // Those that have ended are in no list, and may not be waited for yet.
        if !has_ended(*pid)? {
            alive.push(*pid);
        }
    }
    for branch in &cgroups.branches {
        let name = match branch.controllers.join(",") {
            none if none.is_empty() => "its cgroup".to_owned(),
            controllers => format!("its cgroup for {controllers}"),
        };
        let listed = fs::read_to_string(branch.dir.join("cgroup.procs"))
            .map_err(|error| format!("{name}: {error}"))?;
        let outside = alive
            .iter()
            .find(|pid| !listed.lines().any(|line| line.parse() == Ok(**pid)));
        if let Some(pid) = outside {
            return Err(format!("process {pid} is not in {name}"));
        }
    }
    if all.contains(&init) {
        Ok(all)
    } else {
        Err("its PID 1 is not there".to_owned())
    }
}

/// Whether a process can do nothing any more. Its first thread may have ended alone: then the
/// process only looks as if it had.
fn has_ended(pid: i32) -> Result<bool, String> {
    let tasks = match fs::read_dir(format!("/proc/{pid}/task")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        other => other.map_err(|error| error.to_string())?,
    };
    for task in tasks.flatten() {
        let status = match text_of(task.path().join("status")) {
            Err(error) if is_gone(&error) => continue,
            other => other.map_err(|error| error.to_string())?,
        };
        if !is_over(&status)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn is_over(status: &str) -> Result<bool, String> {
    Ok(field(status, "State")?.starts_with(['Z', 'X']))
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

fn of_process(
    pid: i32,
    namespaces: &[(&str, String)],
    expected: &Expected<'_>,
) -> Result<(), String> {
    if has_ended(pid)? {
        return Ok(());
    }
    for (name, its) in namespaces {
        let found = namespace(&pid.to_string(), name)?;
        if found != *its {
            return Err(format!("it is in the {name} namespace {found}"));
        }
    }
    let limits = read(&format!("/proc/{pid}/limits"))?;
    let core = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max core file size"))
        .ok_or("it has no core limit")?;
    if core
        .split_ascii_whitespace()
        .take(2)
        .any(|limit| limit != CORE_LIMIT)
    {
        return Err(format!("its core limit is {}", core.trim()));
    }
    let tasks = fs::read_dir(Path::new("/proc").join(pid.to_string()).join("task"))
        .map_err(|error| error.to_string())?;
    for task in tasks.flatten() {
        let status = match text_of(task.path().join("status")) {
            Err(error) if is_gone(&error) => continue,
            other => other.map_err(|error| error.to_string())?,
        };
        if !is_over(&status)? {
            of_thread(&status, expected)?;
        }
    }
    Ok(())
}

/// What the kernel says of one thread.
fn of_thread(status: &str, expected: &Expected<'_>) -> Result<(), String> {
    if field(status, "Seccomp")? != "2" {
        return Err("it has no seccomp filter".to_owned());
    }
    let filters: usize = field(status, "Seccomp_filters")?
        .parse()
        .map_err(|_| "its seccomp filters can not be counted")?;
    if filters < expected.filters {
        return Err(format!(
            "it has {filters} seccomp programs instead of {}",
            expected.filters
        ));
    }
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        let held = field(status, set)?;
        let held = u64::from_str_radix(held, 16).map_err(|_| format!("{set} is {held:?}"))?;
        let more = held & !caps::kept().bits();
        if more != 0 {
            return Err(format!("its {set} holds {more:#x}, which no box has"));
        }
    }
    let ids = expected.first_id..expected.first_id + IDS_PER_BOX;
    for kind in ["Uid", "Gid", "Groups"] {
        all_within(field(status, kind)?, &ids)
            .map_err(|id| format!("its {kind} {id} is not of the box"))?;
    }
    Ok(())
}

fn all_within(text: &str, ids: &Range<u32>) -> Result<(), String> {
    for word in text.split_ascii_whitespace() {
        if !word.parse().is_ok_and(|id: u32| ids.contains(&id)) {
            return Err(word.to_owned());
        }
    }
    Ok(())
}

/// One field of `/proc/PID/status`. Names of programs come first and hold no line breaks that
/// the kernel has not escaped.
fn field<'a>(status: &'a str, name: &str) -> Result<&'a str, String> {
    status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .map(str::trim)
        .ok_or_else(|| format!("the kernel says nothing of {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: u32 = 0x7000_0000;

    fn status(change: impl Fn(&mut String)) -> String {
        let kept = caps::kept().bits();
        let mut text = format!(
            "Name:\tSeccomp: 0\\nUid: 0\nState:\tS (sleeping)\n\
             Uid:\t{FIRST}\t{FIRST}\t{FIRST}\t{FIRST}\nGid:\t{FIRST}\t{FIRST}\t{FIRST}\t{FIRST}\n\
             Groups:\t \nCapInh:\t0000000000000000\nCapPrm:\t{kept:016x}\nCapEff:\t{kept:016x}\n\
             CapBnd:\t{kept:016x}\nCapAmb:\t0000000000000000\nNoNewPrivs:\t0\nSeccomp:\t2\n\
             Seccomp_filters:\t5\n"
        );
        change(&mut text);
        text
    }

    fn check(text: &str) -> Result<(), String> {
        let cgroups = Cgroups { branches: vec![] };
        of_thread(
            text,
            &Expected {
                first_id: FIRST,
                room: "mnt:[1]",
                cgroups: &cgroups,
                filters: 5,
                own: String::new(),
                agent: String::new(),
            },
        )
    }

    #[test]
    fn who_has_ended_and_was_not_waited_for_is_known() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while !has_ended(pid).unwrap() {
            assert!(std::time::Instant::now() < until, "it ends");
            std::thread::yield_now();
        }
        child.wait().unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(!has_ended(own).unwrap());
    }

    #[test]
    fn a_thread_with_less_around_it_is_refused() {
        check(&status(|_| ())).unwrap();
        let refused = |from: &str, to: &str| {
            check(&status(|text| *text = text.replacen(from, to, 1))).unwrap_err()
        };
        assert!(refused("Seccomp:\t2", "Seccomp:\t0").contains("seccomp"));
        assert!(refused("filters:\t5", "filters:\t4").contains("4 seccomp"));
        assert!(refused("CapBnd:\t0", "CapBnd:\tf").contains("CapBnd"));
        assert!(refused("CapAmb:\t00", "CapAmb:\t80").contains("CapAmb"));
        assert!(refused("Groups:\t ", "Groups:\t0 ").contains("Groups"));
        assert!(refused(&format!("Gid:\t{FIRST}"), "Gid:\t0").contains("Gid"));
        assert!(refused("CapEff:", "Nothing:").contains("CapEff"));
    }
}
