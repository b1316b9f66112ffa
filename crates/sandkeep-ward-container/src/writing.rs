//! Whoever writes a box to disk is left to finish.
//!
//! CRIU works inside of the processes of a box: killed at the wrong moment it leaves one of them
//! in the middle of code that is not its own, and the box is lost. So it goes on when the server
//! dies, and the next server waits for it before it touches the box. What tells is a lock on a
//! file in the directory of the box: it travels with the job to the worker and from there to CRIU,
//! and is free when the last who had it has ended. In the file stands who they are, so that
//! what a killed CRIU has left behind is not taken for CRIU.

use crate::{
    cgroup::Cgroups,
    failure::{Doing as _, Failure},
    launcher::set_connections_going,
};
use rustix::fs::{FlockOperation, flock};
use sandkeep_host::{proc, work::blocking};
use sandkeep_model::Result;
use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

const FILE: &str = "writing";
const LOOK: Duration = Duration::from_millis(10);
/// How often it is looked who has the lock: that reads the descriptors of all processes.
const LOOK_FOR_HOLDERS: Duration = Duration::from_millis(250);
/// CRIU is ended by whoever started it before, if that one lives.
pub const DEADLINE: Duration = Duration::from_secs(330);
/// For those that were killed to be gone.
const KILLED_DEADLINE: Duration = Duration::from_secs(10);

/// From now on somebody writes the box, until every copy of this descriptor is closed.
pub fn begin(box_dir: &Path) -> Result<OwnedFd, Failure> {
    let doing = "noting that the box is written";
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(box_dir.join(FILE))
        .doing(doing)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).doing(doing)?;
    file.set_len(0).doing(doing)?;
    Ok(file.into())
}

/// Those who write a box, as they have noted it in the file that they have locked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Writers {
    /// The process that was given the job, with the name of its cgroups.
    worker: Option<(i32, String)>,
    criu: Option<i32>,
}

impl Writers {
    /// Who is noted for a box; nobody where it is not written.
    pub fn of(box_dir: &Path) -> Self {
        fs::read_to_string(box_dir.join(FILE))
            .map(|text| Self::parse(&text))
            .unwrap_or_default()
    }

    fn parse(text: &str) -> Self {
        let mut found = Self::default();
        for line in text.lines() {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            match words[..] {
                ["worker", pid, cgroups] => {
                    found.worker = pid.parse().ok().map(|pid| (pid, cgroups.to_owned()));
                }
                ["criu", pid] => found.criu = pid.parse().ok(),
                _ => {}
            }
        }
        found
    }

    /// The name of the cgroups in which they work.
    pub fn cgroups(&self) -> Option<&str> {
        self.worker.as_ref().map(|(_, cgroups)| cgroups.as_str())
    }

    fn includes(&self, pid: i32) -> bool {
        self.criu == Some(pid)
            || self
                .worker
                .as_ref()
                .is_some_and(|(worker, _)| *worker == pid)
    }
}

/// The worker notes itself.
pub fn note_worker(writing: &OwnedFd, cgroups: &Cgroups) -> Result<(), Failure> {
    let name = cgroups.name().unwrap_or("-");
    note(writing, &format!("worker {} {name}\n", std::process::id()))
        .doing("noting who writes the box")
}

/// CRIU is noted by the process that is about to become it: nobody can be killed in between.
pub fn note_criu(writing: impl AsFd) -> io::Result<()> {
    note(writing, &format!("criu {}\n", std::process::id()))
}

fn note(writing: impl AsFd, line: &str) -> io::Result<()> {
    // A line this short is written at once or not at all.
    let written = rustix::io::write(writing, line.as_bytes())?;
    if written == line.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

/// Ends all others who have the lock: what is left of a CRIU that has ended.
pub fn end_others(writing: &OwnedFd) -> Result<(), Failure> {
    let until = Instant::now() + KILLED_DEADLINE;
    loop {
        let others = holders(writing).doing("looking for what CRIU left behind")?;
        if others.is_empty() {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(io::Error::from(io::ErrorKind::TimedOut))
                .doing("ending what CRIU left behind");
        }
        others.into_iter().for_each(proc::kill);
        thread::sleep(LOOK);
    }
}

/// Waits until nobody writes the box any more, and sets right what one that was killed over it
/// has left. What a killed CRIU started and left is ended, and at the deadline CRIU itself.
/// Says who they were.
pub async fn wait(box_dir: &Path, cgroups: &Cgroups, deadline: Duration) -> Result<Writers> {
    let path = box_dir.join(FILE);
    let file = match File::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Writers::default()),
        other => Arc::new(other.doing("looking who writes the box")?),
    };
    let began = Instant::now();
    let mut looked = began;
    let mut strays = Vec::new();
    while !is_free(&file)? {
        let now = Instant::now();
        if now >= began + deadline + KILLED_DEADLINE {
            return Err(io::Error::from(io::ErrorKind::TimedOut))
                .doing("waiting for CRIU to let go of the box")?;
        }
        if now >= looked + LOOK_FOR_HOLDERS {
            if looked == began {
                tracing::info!(dir = %box_dir.display(), "waiting for CRIU to let go of a box");
            }
            looked = now;
            let too_late = now >= began + deadline;
            let (file, seen, box_dir) = (Arc::clone(&file), strays, box_dir.to_owned());
            strays = blocking(move || {
                let there = holders(&file).doing("looking who writes the box")?;
                Ok(end_strays(there, &seen, &Writers::of(&box_dir), too_late))
            })
            .await?;
        }
        tokio::time::sleep(LOOK).await;
    }
    let writers = Writers::of(box_dir);
    let cgroups = cgroups.clone();
    blocking(move || {
        set_connections_going(&cgroups.processes())?;
        match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other.doing("noting that the box is not written any more")?,
        }
        Ok(writers)
    })
    .await
}

fn is_free(file: &File) -> Result<bool, Failure> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error).doing("looking who writes the box"),
    }
}

/// Kills those who have the lock but are not the ones to have it, once they were `seen` before
/// (somebody may be about to become CRIU), and all of them when it is `too_late`. Gives who is
/// to be killed if it is there the next time.
///
/// Before there was a CRIU nobody has his hands in the box, and whoever has the lock will see
/// that its server is gone.
fn end_strays(there: Vec<i32>, seen: &[i32], writers: &Writers, too_late: bool) -> Vec<i32> {
    if writers.criu.is_none() {
        return Vec::new();
    }
    if too_late {
        there.iter().copied().for_each(proc::kill);
        return there;
    }
    if there.iter().any(|pid| writers.includes(*pid)) {
        return Vec::new();
    }
    there
        .iter()
        .copied()
        .filter(|pid| seen.contains(pid))
        .for_each(proc::kill);
    there
}

/// The other processes that have this file and hand it on to whatever they start: the worker,
/// CRIU, and those that CRIU started. Servers and launchers that have it keep it to themselves, and
/// must never be among those who are ended.
fn holders(file: impl AsFd) -> io::Result<Vec<i32>> {
    let ours = rustix::fs::fstat(file)?;
    let own = std::process::id();
    let has_it = |pid: u32| {
        // Gone by now, or about to be.
        let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else {
            return false;
        };
        entries.flatten().any(|entry| {
            // The name first: to ask for more may take long with the files of others.
            fs::read_link(entry.path()).is_ok_and(|target| target.ends_with(FILE))
                && fs::metadata(entry.path())
                    .is_ok_and(|meta| meta.dev() == ours.st_dev && meta.ino() == ours.st_ino)
                && is_handed_on(pid, &entry.file_name())
        })
    };
    Ok(fs::read_dir("/proc")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| *pid != own && has_it(*pid))
        .filter_map(|pid| i32::try_from(pid).ok())
        .collect())
}

/// Whether a descriptor of a process stays open when that becomes another program.
fn is_handed_on(pid: u32, descriptor: &OsStr) -> bool {
    let path = format!("/proc/{pid}/fdinfo/{}", descriptor.display());
    let flags = fs::read_to_string(path).ok().and_then(|text| {
        let flags = text.lines().find_map(|line| line.strip_prefix("flags:"))?;
        libc::c_int::from_str_radix(flags.trim(), 8).ok()
    });
    flags.is_some_and(|flags| flags & libc::O_CLOEXEC == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    fn nobody() -> Cgroups {
        Cgroups {
            branches: Vec::new(),
        }
    }

    /// A process that has a copy of the lock, until it is ended.
    fn holder(lock: &OwnedFd) -> Child {
        Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::from(lock.try_clone().unwrap()))
            .spawn()
            .unwrap()
    }

    #[tokio::test]
    async fn the_lock_is_held_by_whoever_has_a_copy() {
        let dir = tempfile::tempdir().unwrap();
        let free = wait(dir.path(), &nobody(), Duration::ZERO).await.unwrap();
        assert_eq!(free, Writers::default());
        let ours = begin(dir.path()).unwrap();
        assert!(begin(dir.path()).is_err(), "nobody writes a box twice");
        // The copy of another process, which outlives ours, and is CRIU.
        let mut other = holder(&ours);
        note(&ours, &format!("worker 1 tag-7\ncriu {}\n", other.id())).unwrap();
        drop(ours);
        let nobody = nobody();
        let waiting = wait(dir.path(), &nobody, DEADLINE);
        let waited = tokio::time::timeout(Duration::from_secs(2), waiting).await;
        assert!(waited.is_err(), "it did not wait");
        assert!(other.try_wait().unwrap().is_none(), "it was ended");
        drop(other.stdin.take());
        other.wait().unwrap();
        let told = wait(dir.path(), &nobody, DEADLINE).await.unwrap();
        assert_eq!(told.cgroups(), Some("tag-7"));
        assert!(!dir.path().join(FILE).exists());
    }

    #[tokio::test]
    async fn what_a_killed_criu_left_kept_a_server_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let ours = begin(dir.path()).unwrap();
        let mut stray = holder(&ours);
        let mut criu = holder(&ours);
        note(&ours, &format!("criu {}\n", criu.id())).unwrap();
        criu.kill().unwrap();
        criu.wait().unwrap();
        drop(ours);
        wait(dir.path(), &nobody(), DEADLINE).await.unwrap();
        assert!(!stray.wait().unwrap().success());
    }

    #[tokio::test]
    async fn a_criu_that_never_ends_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let ours = begin(dir.path()).unwrap();
        let mut criu = holder(&ours);
        note(&ours, &format!("criu {}\n", criu.id())).unwrap();
        drop(ours);
        wait(dir.path(), &nobody(), Duration::from_millis(10))
            .await
            .unwrap();
        assert!(!criu.wait().unwrap().success());
    }

    #[test]
    fn a_worker_ends_what_its_criu_left() {
        let dir = tempfile::tempdir().unwrap();
        let ours = begin(dir.path()).unwrap();
        let mut stray = holder(&ours);
        end_others(&ours).unwrap();
        assert!(!stray.wait().unwrap().success());
        assert!(begin(dir.path()).is_err(), "it is ours as before");
    }

    #[test]
    fn a_server_was_ended_that_waited_for_its_own_box() {
        let dir = tempfile::tempdir().unwrap();
        let ours = begin(dir.path()).unwrap();
        let mut stray = holder(&ours);
        let mut all = vec![std::process::id(), stray.id()];
        // Seen from somewhere else, so that this process is one of the others.
        all.retain(|pid| {
            let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
            let mut its = entries
                .filter(|entry| fs::read_link(entry.path()).is_ok_and(|to| to.ends_with(FILE)));
            its.any(|entry| is_handed_on(*pid, &entry.file_name()))
        });
        assert_eq!(all, [stray.id()]);
        drop(stray.stdin.take());
        stray.wait().unwrap();
    }

    #[test]
    fn nobody_is_ended_before_there_was_a_criu() {
        let worker = Writers::parse("worker 4711 tag-1\n");
        assert!(end_strays(vec![1], &[1], &worker, true).is_empty());
        assert_eq!(worker.cgroups(), Some("tag-1"));
        assert!(worker.includes(4711) && !worker.includes(1));
    }
}
