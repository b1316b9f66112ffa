//! The servers that run on this host.

use std::{fs, path::PathBuf};

use crate::state::LOCK_FILE;

/// A server, and its state directory where we may look at it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    pub pid: i32,
    pub state: Option<PathBuf>,
}

pub fn servers() -> Vec<Running> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            serves(&words)
        })
        .map(|pid| Running {
            pid,
            state: state_of(pid),
        })
        .collect()
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
    open.flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .find(|path| path.file_name().is_some_and(|name| name == LOCK_FILE))
        .and_then(|path| path.parent().map(ToOwned::to_owned))
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
