//! The mounts of a box as CRIU and we see them from outside.

use super::mounts::{AGENT, DEVICES, MASKED_DIRS, MASKED_FILES, READ_ONLY};
use std::{collections::HashMap, fs, path::Path};

/// Where the worker that restores a box has the things that are mounted in it.
pub const ROOT: &str = "/run/root";
pub const AGENT_FILE: &str = "/run/agent";
pub const EMPTY: &str = "/run/empty";
pub const SYSTEM: &str = "/run/sys";
pub const PROCESSORS: &str = "/sys/devices/system/cpu";
/// Mounts of the host, with the flags they have in a box: CRIU takes them as they are.
pub const DEVICE_NODES: &str = "/run/dev";
pub const PROCESSORS_COPY: &str = "/run/cpu";

/// A mount of a box that comes from outside of it.
pub struct External {
    /// Where it is in the box.
    pub point: String,
    /// Where it comes from, as the worker sees it.
    pub source: String,
}

/// All there may be. CRIU asks for those that it finds.
pub fn externals() -> Vec<External> {
    let one = |point: String, source: String| External { point, source };
    let node = |name: &str| format!("{DEVICE_NODES}/{name}");
    let mut all = vec![
        one(format!("/run/{AGENT}"), AGENT_FILE.to_owned()),
        one("/sys".to_owned(), SYSTEM.to_owned()),
        one(PROCESSORS.to_owned(), PROCESSORS_COPY.to_owned()),
    ];
    all.extend(DEVICES.map(|name| one(format!("/dev/{name}"), node(name))));
    all.extend(MASKED_FILES.map(|name| one(format!("/proc/{name}"), node("null"))));
    all.extend(MASKED_DIRS.map(|name| one(format!("/proc/{name}"), EMPTY.to_owned())));
    all
}

/// The device nodes of the host that a box gets, as `stat` shows them.
const NULL: &str = "/null";

struct Mount<'a> {
    root: &'a str,
    options: Vec<&'a str>,
    kind: &'a str,
}

/// The mounts on top at each place, out of the text of a `mountinfo`.
fn on_top(text: &str) -> HashMap<&str, Mount<'_>> {
    text.lines()
        .filter_map(|line| {
            let (head, tail) = line.split_once(" - ")?;
            let mut fields = head.split(' ').skip(3);
            let (root, point, options) = (fields.next()?, fields.next()?, fields.next()?);
            let mount = Mount {
                root,
                options: options.split(',').collect(),
                kind: tail.split(' ').next()?,
            };
            Some((point, mount))
        })
        .collect()
}

/// Looks whether a box has the mounts it must have and no others; says what is wrong.
pub fn check(text: &str) -> Result<(), String> {
    let mounts = on_top(text);
    let must = |point: &str, kinds: &[&str], options: &[&str]| -> Result<(), String> {
        let mount = mounts
            .get(point)
            .ok_or_else(|| format!("nothing is mounted at {point}"))?;
        if !kinds.is_empty() && !kinds.contains(&mount.kind) {
            return Err(format!("{point} is a {}", mount.kind));
        }
        match options
            .iter()
            .find(|option| !mount.options.contains(option))
        {
            Some(option) => Err(format!("{point} is not mounted {option}")),
            None => Ok(()),
        }
    };
    must("/", &[], &["nodev", "idmapped"])?;
    must("/proc", &["proc"], &["nosuid", "nodev", "noexec"])?;
    must("/dev", &["tmpfs"], &["nosuid", "noexec"])?;
    must("/dev/pts", &["devpts"], &["nosuid", "noexec"])?;
    must("/dev/shm", &["tmpfs"], &["nosuid", "nodev", "noexec"])?;
    must("/dev/mqueue", &["mqueue"], &["nosuid", "nodev", "noexec"])?;
    must("/run", &["tmpfs"], &["nosuid", "nodev"])?;
    must("/sys", &["tmpfs"], &["ro", "nosuid", "nodev", "noexec"])?;
    let agent = format!("/run/{AGENT}");
    must(&agent, &[], &["ro", "nosuid", "nodev"])?;
    let mut known = vec![
        "/",
        "/proc",
        "/dev",
        "/dev/pts",
        "/dev/shm",
        "/dev/mqueue",
        "/run",
        "/sys",
        &agent,
    ];
    if mounts.contains_key(PROCESSORS) {
        must(PROCESSORS, &["sysfs"], &["ro", "nosuid", "nodev", "noexec"])?;
        known.push(PROCESSORS);
    }
    let of = |dir: &str, names: &[&str]| -> Vec<String> {
        names.iter().map(|name| format!("{dir}/{name}")).collect()
    };
    let devices = of("/dev", &DEVICES);
    for (point, name) in devices.iter().zip(DEVICES) {
        must(point, &[], &["nosuid", "noexec"])?;
        same_file(&mounts, point, name)?;
    }
    let there = |point: &&String| Path::new(point.as_str()).exists();
    let (files, dirs, read_only) = (
        of("/proc", &MASKED_FILES),
        of("/proc", &MASKED_DIRS),
        of("/proc", &READ_ONLY),
    );
    for point in files.iter().filter(there) {
        must(point, &[], &["nosuid", "noexec"])?;
        same_file(&mounts, point, NULL)?;
    }
    for point in dirs.iter().filter(there) {
        must(point, &["tmpfs"], &["ro", "nosuid", "nodev", "noexec"])?;
    }
    for point in read_only.iter().filter(there) {
        must(point, &["proc"], &["ro", "nosuid", "nodev", "noexec"])?;
    }
    let expected: Vec<&str> = known
        .into_iter()
        .chain(
            [&devices, &files, &dirs, &read_only]
                .into_iter()
                .flatten()
                .map(String::as_str),
        )
        .collect();
    match mounts.keys().find(|point| !expected.contains(*point)) {
        Some(stranger) => Err(format!("{stranger} is mounted and should not be")),
        None => Ok(()),
    }
}

/// A device node is the one of its name, and nothing else of the host.
fn same_file(mounts: &HashMap<&str, Mount<'_>>, point: &str, name: &str) -> Result<(), String> {
    let name = name.trim_start_matches('/');
    let found = mounts
        .get(point)
        .map(|mount| mount.root)
        .unwrap_or_default();
    if found.rsplit('/').next() == Some(name) {
        Ok(())
    } else {
        Err(format!("{point} is {found:?} of the host"))
    }
}

/// The mounts of a process, for [`check`].
pub fn of(pid: i32) -> std::io::Result<String> {
    fs::read_to_string(format!("/proc/{pid}/mountinfo"))
}
