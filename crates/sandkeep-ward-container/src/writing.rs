//! Whoever writes a box to disk is left to finish.
//!
//! CRIU works inside of the processes of a box: killed at the wrong moment it leaves one of them
//! in the middle of code that is not its own, and the box is lost. So it goes on when the server
//! dies, and the next server waits for it before it touches the box. What tells is a lock on a
//! file in the directory of the box: it travels with the job to the worker and from there to CRIU,
//! and is free when the last who had it has ended.

use crate::{
    cgroup::Cgroups,
    failure::{Doing as _, Failure},
    launcher::set_connections_going,
};
use rustix::fs::{FlockOperation, flock};
use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{fd::OwnedFd, unix::fs::OpenOptionsExt as _},
    path::Path,
    thread,
    time::{Duration, Instant},
};

const FILE: &str = "writing";
const LOOK: Duration = Duration::from_millis(10);
/// CRIU is ended by whoever started it before.
pub const DEADLINE: Duration = Duration::from_secs(330);

/// From now on somebody writes the box, until every copy of this descriptor is closed.
pub fn begin(box_dir: &Path) -> Result<OwnedFd, Failure> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(box_dir.join(FILE))
        .doing("noting that the box is written")?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)
        .doing("noting that the box is written")?;
    Ok(file.into())
}

/// It was written by somebody who has said so.
pub fn done(box_dir: &Path) -> Result<(), Failure> {
    match fs::remove_file(box_dir.join(FILE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.doing("noting that the box is not written any more"),
    }
}

/// Waits until nobody writes the box any more, and sets right what one that was killed over it
/// has left. Blocks.
pub fn wait(box_dir: &Path, cgroups: &Cgroups, deadline: Duration) -> Result<(), Failure> {
    let file = match File::open(box_dir.join(FILE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.doing("looking who writes the box")?,
    };
    let until = Instant::now() + deadline;
    let mut said = false;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                if !std::mem::replace(&mut said, true) {
                    tracing::info!(dir = %box_dir.display(), "waiting for CRIU to let go of a box");
                }
                thread::sleep(LOOK);
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(io::Error::from(io::ErrorKind::TimedOut))
                    .doing("waiting for CRIU to let go of the box");
            }
            Err(error) => return Err(error).doing("looking who writes the box"),
        }
    }
    set_connections_going(&cgroups.processes())?;
    done(box_dir)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn the_lock_is_held_by_whoever_has_a_copy() {
        let dir = tempfile::tempdir().unwrap();
        let nobody = Cgroups {
            branches: Vec::new(),
        };
        wait(dir.path(), &nobody, Duration::ZERO).unwrap();
        let ours = begin(dir.path()).unwrap();
        assert!(begin(dir.path()).is_err(), "nobody writes a box twice");
        // The copy of another process, which outlives ours.
        let copy = ours.try_clone().unwrap();
        let mut other = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::from(copy))
            .spawn()
            .unwrap();
        drop(ours);
        let late = wait(dir.path(), &nobody, Duration::from_millis(30)).unwrap_err();
        assert_eq!(late.source.kind(), io::ErrorKind::TimedOut);
        drop(other.stdin.take());
        other.wait().unwrap();
        wait(dir.path(), &nobody, Duration::ZERO).unwrap();
        assert!(!dir.path().join(FILE).exists());
    }
}
