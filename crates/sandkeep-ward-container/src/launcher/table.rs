//! The mounts of a box as CRIU and we see them from outside.

use super::{
    mounts::{AGENT, DEVICES, MASKED_DIRS, MASKED_FILES, READ_ONLY, REPLACED_FILES, TERMINALS},
    own,
};
use sandkeep_host::lone_file;
use std::{collections::HashMap, fs, path::Path};

/// Where the worker that restores a box has the things that are mounted in it.
pub const ROOT: &str = "/run/root";
pub const AGENT_FILE: &str = "/run/agent";
/// The files a sandbox has of its own, with the flags they have in it: CRIU takes mounts as they
/// are. First those that can be used, then those that can only be read.
pub const OWN: &str = "/run/own";
pub const OWN_STILL: &str = "/run/still";

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
    let node = |name: &str| format!("{OWN}/{name}");
    let still = |name: &str| format!("{OWN_STILL}/{name}");
    let mut all = vec![
        one(format!("/run/{AGENT}"), AGENT_FILE.to_owned()),
        one("/sys".to_owned(), still(own::SYSTEM)),
    ];
    all.extend(DEVICES.map(|(name, _, _)| one(format!("/dev/{name}"), node(name))));
    all.extend(MASKED_FILES.map(|name| one(format!("/proc/{name}"), node("null"))));
    all.extend(MASKED_DIRS.map(|name| one(format!("/proc/{name}"), still(own::EMPTY))));
    all.extend(REPLACED_FILES.map(|(name, part)| one(format!("/proc/{name}"), still(part))));
    all
}

struct Mount<'a> {
    /// `major:minor` of the file system.
    device: &'a str,
    root: &'a str,
    options: Vec<&'a str>,
    kind: &'a str,
    /// Of the file system, not of the mount.
    settings: Vec<&'a str>,
}

/// The mounts on top at each place, out of the text of a `mountinfo`.
fn on_top(text: &str) -> HashMap<&str, Mount<'_>> {
    text.lines()
        .filter_map(|line| {
            let (head, tail) = line.split_once(" - ")?;
            let mut fields = head.split(' ').skip(2);
            let (device, root) = (fields.next()?, fields.next()?);
            let (point, options) = (fields.next()?, fields.next()?);
            let mut tail = tail.split(' ');
            let mount = Mount {
                device,
                root,
                options: options.split(',').collect(),
                kind: tail.next()?,
                settings: tail.nth(1)?.split(',').collect(),
            };
            Some((point, mount))
        })
        .collect()
}

/// Looks whether a box has the mounts it must have and no others; says what is wrong. `own` is
/// the file system with the files it has of its own, as `major:minor`; `agents` that of the agent.
pub fn check(text: &str, own: &str, agents: &str) -> Result<(), String> {
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
    let agent = format!("/run/{AGENT}");
    must(&agent, &["tmpfs"], &["ro", "nosuid", "nodev"])?;
    let found = &mounts[agent.as_str()];
    if found.device != agents || found.root.strip_prefix('/') != Some(lone_file::NAME) {
        return Err(format!(
            "{agent} is {} of the file system {}, which is not the agent's",
            found.root, found.device
        ));
    }
    let known = vec![
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
    let terminals = format!("max={TERMINALS}");
    if !mounts["/dev/pts"].settings.contains(&terminals.as_str()) {
        return Err(format!("/dev/pts is not mounted with {terminals}"));
    }
    let of = |dir: &str, names: &[&str]| -> Vec<String> {
        names.iter().map(|name| format!("{dir}/{name}")).collect()
    };
    const NODE: &[&str] = &["nosuid", "noexec"];
    const STILL: &[&str] = &["ro", "nosuid", "nodev", "noexec"];
    let device_names = DEVICES.map(|(name, _, _)| name);
    let replaced_names = REPLACED_FILES.map(|(name, _)| name);
    let devices = of("/dev", &device_names);
    let (files, dirs, replaced, read_only) = (
        of("/proc", &MASKED_FILES),
        of("/proc", &MASKED_DIRS),
        of("/proc", &replaced_names),
        of("/proc", &READ_ONLY),
    );
    let there = |point: &&String| Path::new(point.as_str()).exists();
    // Which of its own files is where, and how it is mounted.
    let mut placed: Vec<(&str, &str, &[&str])> = vec![("/sys", own::SYSTEM, STILL)];
    placed.extend(
        devices
            .iter()
            .zip(device_names)
            .map(|(at, of)| (at.as_str(), of, NODE)),
    );
    placed.extend(
        files
            .iter()
            .filter(there)
            .map(|at| (at.as_str(), "null", NODE)),
    );
    placed.extend(
        dirs.iter()
            .filter(there)
            .map(|at| (at.as_str(), own::EMPTY, STILL)),
    );
    placed.extend(
        (replaced.iter().zip(REPLACED_FILES))
            .filter(|(at, _)| there(at))
            .map(|(at, (_, of))| (at.as_str(), of, STILL)),
    );
    for (point, part, options) in placed {
        must(point, &["tmpfs"], options)?;
        let mount = &mounts[point];
        if mount.device != own || mount.root.strip_prefix('/') != Some(part) {
            return Err(format!(
                "{point} is {} of the file system {}, which is not the sandbox's own {part}",
                mount.root, mount.device
            ));
        }
    }
    for point in read_only.iter().filter(there) {
        must(point, &["proc"], STILL)?;
    }
    let expected: Vec<&str> = known
        .into_iter()
        .chain(
            [&devices, &files, &dirs, &replaced, &read_only]
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

/// The mounts of a process, for [`check`].
pub fn of(pid: i32) -> std::io::Result<String> {
    fs::read_to_string(format!("/proc/{pid}/mountinfo"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN_DEVICE: &str = "0:77";
    const AGENTS: &str = "0:78";

    /// As a sandbox on this kernel has them.
    fn mounts() -> String {
        let still = "ro,nosuid,nodev,noexec";
        let line = |device: &str, root: &str, point: &str, options: &str, tail: &str| {
            format!("90 80 {device} {root} {point} {options},relatime - {tail}\n")
        };
        let mut text = line(
            "0:30",
            "/disk",
            "/",
            "rw,nodev,idmapped",
            "btrfs /dev/loop0 rw",
        );
        for (point, options, tail) in [
            ("/proc", "rw,nosuid,nodev,noexec", "proc proc rw"),
            ("/dev", "rw,nosuid,noexec", "tmpfs none rw"),
            (
                "/dev/pts",
                "rw,nosuid,noexec",
                "devpts none rw,mode=620,max=64",
            ),
            ("/dev/shm", "rw,nosuid,nodev,noexec", "tmpfs none rw"),
            ("/dev/mqueue", "rw,nosuid,nodev,noexec", "mqueue none rw"),
            ("/run", "rw,nosuid,nodev", "tmpfs none rw"),
        ] {
            text += &line("0:31", "/", point, options, tail);
        }
        let agent = "/run/sandkeep-agent";
        text += &line(AGENTS, "/agent", agent, "ro,nosuid,nodev", "tmpfs none rw");
        for name in READ_ONLY {
            text += &line(
                "0:31",
                &format!("/{name}"),
                &format!("/proc/{name}"),
                still,
                "proc proc rw",
            );
        }
        let node = "rw,nosuid,noexec";
        for external in externals() {
            let (options, part) = match external.source.rsplit_once('/') {
                Some((OWN, part)) => (node, part),
                Some((OWN_STILL, part)) => (still, part),
                _ => continue,
            };
            if !external.point.starts_with("/proc/") || Path::new(&external.point).exists() {
                let tail = "tmpfs none rw";
                text += &line(
                    OWN_DEVICE,
                    &format!("/{part}"),
                    &external.point,
                    options,
                    tail,
                );
            }
        }
        text
    }

    #[test]
    fn a_file_that_is_not_the_sandboxs_own_is_refused() {
        let whole = mounts();
        assert_eq!(check(&whole, OWN_DEVICE, AGENTS), Ok(()));
        assert!(
            check(&whole, "0:5", AGENTS).is_err(),
            "of another file system"
        );
        let why = check(&whole, OWN_DEVICE, "0:5").unwrap_err();
        assert!(why.contains("not the agent's"), "{why}");
        for (point, root) in [
            ("/dev/null", "/null"),
            ("/proc/loadavg", "/loadavg"),
            ("/sys", "/sys"),
        ] {
            let own = format!("{OWN_DEVICE} {root} {point} ");
            assert!(whole.contains(&own), "{own}");
            for other in [
                format!("0:5 {root} {point} "),
                format!("{OWN_DEVICE} /zero {point} "),
            ] {
                let why = check(&whole.replacen(&own, &other, 1), OWN_DEVICE, AGENTS).unwrap_err();
                assert!(why.contains(point), "{why}");
            }
        }
        let many = whole.replace("max=64", "max=1024");
        assert!(
            check(&many, OWN_DEVICE, AGENTS)
                .unwrap_err()
                .contains("max=64")
        );
    }
}
