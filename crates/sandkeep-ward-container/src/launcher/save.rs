//! Writing a frozen box to disk.

use super::{
    ghosts,
    mounts::{self, NODEV, NOEXEC, NOSUID},
    protocol, repair,
    room::{self, Room},
    run::{Run, Seen, Task},
    table, whole, words,
};
use crate::{
    cgroup::Cgroups,
    failure::{Doing, Failure},
    sys::set_mount_attributes,
    writing,
};
use rustix::io::FdFlags;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::{
    ffi::OsString,
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
    os::unix::process::ExitStatusExt as _,
    path::Path,
    time::Duration,
};

/// Where the worker has the cgroup that freezes the box.
const FREEZER: &str = "/run/freezer";
const FREEZE_DEADLINE: Duration = Duration::from_secs(10);
/// Files that are deleted but open go into the image up to this size.
const MOST_DELETED: &str = "256M";
/// How CRIU's log tells that there is no room.
const FULL: &str = "No space left on device";
/// With less than this a disk is full: the file system keeps some for itself.
const LEAST_ROOM: u64 = 16 << 20;

/// Why there is no image.
pub enum NotSaved {
    /// The box holds something that can not be written.
    Refused(String),
    Failed(Failure),
}

impl From<Failure> for NotSaved {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// The box is there and frozen when this returns, whatever came of it. Done to the end even if
/// nobody waits for it any more; `writing` tells others for how long. `here` are the cgroups of
/// this process.
pub fn save(job: &protocol::Save, here: &Cgroups, writing: &OwnedFd) -> Result<(), NotSaved> {
    writing::note_worker(writing, here)?;
    // CRIU gets it, too: should we be killed, it goes on.
    rustix::io::fcntl_setfd(writing, FdFlags::empty()).doing("handing the lock to CRIU")?;
    let outcome = write(job, writing);
    if outcome.is_err() {
        // CRIU does both itself, unless somebody killed it.
        writing::end_others(writing)?;
        repair::end(&job.cgroups.processes())?;
    }
    // It puts the box to sleep again just before it lets go, but does not wait for it.
    job.cgroups.freeze(FREEZE_DEADLINE)?;
    outcome
}

fn write(job: &protocol::Save, writing: &OwnedFd) -> Result<(), NotSaved> {
    let image = mounts::detached(rustix::fs::CWD, &job.image).doing("opening the image")?;
    set_mount_attributes(image.as_fd(), NOSUID | NODEV | NOEXEC, None)
        .doing("opening the image")?;
    let freezer =
        mounts::detached(rustix::fs::CWD, freezer(job)?).doing("opening the freezer of the box")?;
    let network = fs::File::open(format!("/proc/{}/ns/net", job.pid))
        .doing("opening the network namespace of the box")?;
    let mut room = Room::enter(&job.criu)?;
    room::attach(&image, room::IMAGE, false)?;
    room::attach(&freezer, FREEZER, false)?;
    // From inside, the network of the box is the host's business and no part of the image.
    move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))
        .doing("entering the network namespace of the box")?;
    let mut run = Run::start(&words_for(job), Task::Save { writing })?;
    room.leave()?;
    let status = match run.wait(None)? {
        Seen::Ended(status) => status,
        Seen::Asked | Seen::GiveUp => {
            run.kill();
            return Err(NotSaved::Failed(Failure {
                doing: "writing the box to disk".to_owned(),
                source: io::ErrorKind::TimedOut.into(),
            }));
        }
    };
    room.remember(&job.criu);
    if status.success() {
        if !job.criu.careful
            && let Some(path) = ghosts::any(&job.image)?
        {
            return Err(NotSaved::Refused(ghosts::why(&path)));
        }
        return comes_back(job, &room);
    }
    if let Some(signal) = status.signal() {
        return Err(NotSaved::Failed(Failure {
            doing: format!("writing the box to disk: CRIU was ended by signal {signal}"),
            source: io::ErrorKind::Interrupted.into(),
        }));
    }
    let log = room.log();
    if log.contains(FULL) || is_full(&image) {
        return Err(NotSaved::Failed(Failure {
            doing: "writing the box to disk".to_owned(),
            source: rustix::io::Errno::NOSPC.into(),
        }));
    }
    Err(NotSaved::Refused(words::obstacle(&log)))
}

/// Looks whether what was written can be read again, as long as nothing is lost if not.
fn comes_back(job: &protocol::Save, room: &Room) -> Result<(), NotSaved> {
    // It has gone on after errors, and said that all is well.
    if let Some(obstacle) = words::unheard(&room.log()) {
        return Err(NotSaved::Refused(obstacle));
    }
    match whole::missing(&job.image, job.criu.careful)? {
        Some(missing) => Err(NotSaved::Refused(missing)),
        None => Ok(()),
    }
}

/// What CRIU has others write (the files in memory) fails without a reason in its log.
fn is_full(image: &OwnedFd) -> bool {
    rustix::fs::fstatvfs(image).is_ok_and(|disk| disk.f_bavail * disk.f_frsize < LEAST_ROOM)
}

fn freezer(job: &protocol::Save) -> Result<&Path, Failure> {
    job.cgroups
        .freezer()
        .map(|(_, directory)| directory)
        .ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))
        .doing("finding the freezer of the box")
}

fn words_for(job: &protocol::Save) -> Vec<OsString> {
    let mut words: Vec<OsString> = ["dump", "--leave-running", "--ghost-limit", MOST_DELETED]
        .map(OsString::from)
        .to_vec();
    words.extend(["--tree".into(), job.pid.to_string().into()]);
    words.extend(["--freeze-cgroup".into(), FREEZER.into()]);
    for external in table::externals() {
        // A place is its own name.
        let point = external.point;
        words.extend(["--external".into(), format!("mnt[{point}]:{point}").into()]);
    }
    words
}
