//! The servers that run on this host.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::state::LOCK_FILE;

/// A server, and its state directory where we may look at it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    pub pid: i32,
    pub state: Option<PathBuf>,
}

/// The servers of root or of the caller. Processes of sandboxes are in `/proc`, too, and call
/// themselves and their files whatever they like.
pub fn servers() -> Vec<Running> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            serves(&words) && is_of_this_host(*pid) && is_trusted(*pid)
        })
        .map(|pid| Running {
            pid,
            state: state_of(pid),
        })
        .collect()
}

/// Whether a process is in our own process and user namespaces. A sandbox has others.
fn is_of_this_host(pid: i32) -> bool {
    ["pid", "user"].iter().all(|kind| {
        let of = |who: &str| fs::read_link(format!("/proc/{who}/ns/{kind}")).ok();
        let ours = of("self");
        ours.is_some() && of(&pid.to_string()) == ours
    })
}

/// Whether a process has no other user than root or ourselves.
fn is_trusted(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    users.is_some_and(|users| {
        let mut users = users.split_ascii_whitespace().peekable();
        users.peek().is_some() && users.all(|user| user.parse().is_ok_and(is_root_or_self))
    })
}

fn is_root_or_self(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}

/// Whether a command line is that of a server.
fn serves(words: &[u8]) -> bool {
    let mut words = words.split(|byte| *byte == 0);
    let program = words.next().unwrap_or_default();
    let name = program.rsplit(|byte| *byte == b'/').next();
    name.is_some_and(|name| name.starts_with(b"sandkeep"))
        && words.any(|word| word == b"serve".as_slice())
}

/// It holds the lock of its directory open for as long as it runs.
fn state_of(pid: i32) -> Option<PathBuf> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    open.flatten().find_map(|entry| {
        let lock = fs::read_link(entry.path()).ok()?;
        if lock.file_name()? != LOCK_FILE {
            return None;
        }
        // The path is one of its mount namespace; it must be that very file in ours.
        let (held, here) = (
            fs::metadata(entry.path()).ok()?,
            fs::symlink_metadata(&lock).ok()?,
        );
        let same = (held.dev(), held.ino()) == (here.dev(), here.ino());
        let state = lock.parent()?;
        (same && is_private(state)).then(|| state.to_owned())
    })
}

/// Whether nobody but root and ourselves can have put a file there.
fn is_private(directory: &Path) -> bool {
    const WRITABLE_BY_OTHERS: u32 = 0o022;
    fs::symlink_metadata(directory).is_ok_and(|found| {
        found.is_dir() && is_root_or_self(found.uid()) && found.mode() & WRITABLE_BY_OTHERS == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_servers_are_servers() {
        assert!(serves(b"/usr/bin/sandkeep\0serve\0--state\0/x\0"));
        assert!(serves(b"sandkeep\0--json\0serve\0"));
        for other in [b"sandkeep\0doctor\0".as_slice(), b"/bin/grep\0serve\0", b""] {
            assert!(!serves(other));
        }
    }
}
