//! A process and all that came of it, to be ended together.
//!
//! What a command started is its descendants, whatever session they made for themselves, and
//! what is left in the session it was started in, whoever their parent is by now. Daemons that
//! left both stay: they were meant to.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpgid, kill_process, kill_process_group};

/// Enough for any tree that does not grow as fast as it is read.
const ROUNDS: usize = 16;

/// What the kernel says of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kin {
    parent: i32,
    session: i32,
}

/// Ends a process that was not waited for, and its family; false if it is gone.
pub(crate) fn kill(pid: Pid, session: Pid) -> io::Result<bool> {
    // The shell of a terminal. Its other jobs are told by the terminal's end, as anywhere.
    if pid == session {
        return sent(kill_process_group(pid, Signal::KILL));
    }
    let (root, session_number) = (pid.as_raw_nonzero().get(), session.as_raw_nonzero().get());
    let mut found = vec![root];
    for _ in 0..ROUNDS {
        let relatives = relatives(&all(), root, session_number);
        let new: Vec<i32> = relatives
            .into_iter()
            .filter(|one| !found.contains(one))
            .collect();
        if new.is_empty() {
            break;
        }
        for &one in &new {
            // Stopped it starts no others while they are looked for.
            send(one, Signal::STOP);
        }
        found.extend(new);
    }
    let killed = match getpgid(Some(pid)) {
        // At once, also those that were started meanwhile. Its number is that of the group it was
        // started in as long as one is in it, and the process is.
        Ok(group) if group == session => kill_process_group(session, Signal::KILL),
        _ => kill_process(pid, Signal::KILL),
    };
    for one in found {
        send(one, Signal::KILL);
    }
    sent(killed)
}

fn sent(result: rustix::io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(Errno::SRCH) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn send(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        // One that has ended is what we want.
        let _ = kill_process(pid, signal);
    }
}

/// The descendants of a process, and who is in its session.
fn relatives(all: &HashMap<i32, Kin>, root: i32, session: i32) -> Vec<i32> {
    // Who led the session has ended, and its number is free only when nobody is in the session any
    // more. So if a process has the number, the session of now is another.
    let is_ours = !all.contains_key(&session);
    let descends = |mut pid: i32| {
        // No chain is longer than there are processes.
        for _ in 0..all.len() {
            let Some(kin) = all.get(&pid) else {
                return false;
            };
            if kin.parent == root {
                return true;
            }
            pid = kin.parent;
        }
        false
    };
    let is_relative =
        |pid: i32, kin: &Kin| pid != root && ((is_ours && kin.session == session) || descends(pid));
    all.iter()
        .filter(|&(&pid, kin)| is_relative(pid, kin))
        .map(|(&pid, _)| pid)
        .collect()
}

fn all() -> HashMap<i32, Kin> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return HashMap::new();
    };
    entries
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let stat = read(&entry.path().join("stat")).ok()?;
            Some((pid, parse(&String::from_utf8_lossy(&stat))?))
        })
        .collect()
}

/// Root of the sandbox may have mounted anything there: nothing is waited for.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    const LONGEST: u64 = 1024;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let mut bytes = Vec::new();
    file.take(LONGEST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// `PID (NAME) STATE PARENT GROUP SESSION …`, where the name may hold anything.
fn parse(stat: &str) -> Option<Kin> {
    let mut words = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(1);
    let parent = words.next()?.parse().ok()?;
    let session = words.nth(1)?.parse().ok()?;
    Some(Kin { parent, session })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_change_what_is_read() {
        let kin = parse("7 (a) R 1 2 (b)) S 3 4 5 0 -1 4194304");
        assert_eq!(
            kin,
            Some(Kin {
                parent: 3,
                session: 5
            })
        );
        assert_eq!(parse("7 (a"), None);
    }

    #[test]
    fn a_family_is_descendants_and_the_session_unless_its_number_is_another_s() {
        let mut all = HashMap::new();
        for (pid, parent, session) in [
            (1, 0, 1),
            (10, 1, 9),
            (11, 10, 11),
            (12, 11, 11),
            (13, 1, 9),
            (14, 1, 14),
        ] {
            all.insert(pid, Kin { parent, session });
        }
        let sorted = |all: &HashMap<i32, Kin>| {
            let mut found = relatives(all, 10, 9);
            found.sort_unstable();
            found
        };
        assert_eq!(sorted(&all), [11, 12, 13]);
        all.insert(
            9,
            Kin {
                parent: 1,
                session: 9,
            },
        );
        assert_eq!(sorted(&all), [11, 12]);
    }
}
