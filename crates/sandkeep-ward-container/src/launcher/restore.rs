//! Bringing a box back from the disk.
//!
//! CRIU runs in the cgroups and the network namespace that the box is to have, so that its
//! processes are born there. When all of them are there and none has run yet, it asks us; the
//! box only goes on after it was looked at.

use super::{
    ghosts, limits, mounts,
    own::Own,
    protocol::{self, Started},
    repair,
    room::{self, Room},
    run::{Beside, Run, Seen, Task},
    seccomp_image, table, userns, userns_image,
    verify::{self, Expected},
    wipe, words,
    worker::{Place, listen_in},
};
use crate::{
    cgroup::{Cgroups, layout::Layout},
    failure::{Doing, Failure},
    proc,
    sys::{self, Cloned, set_mount_attributes},
};
use rustix::{
    fs::{CWD, Mode, OFlags, mkfifoat, open},
    mount::mount_bind,
    process::{Pid, PidfdFlags, pidfd_open},
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};
use sandkeep_host::idmap;
use sandkeep_netlink::{self as netlink, AllHere};
use std::{
    ffi::OsString,
    fs,
    io::{self, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::fs::PermissionsExt as _,
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

const QUESTION: &str = "question";
const ANSWER: &str = "answer";
const SCRIPT: &str = "/run/ask";
/// Run by CRIU at every step; the last one is when everything is there and nothing runs.
const ASK: &str = "#!/bin/sh\n\
    [ \"$CRTOOLS_SCRIPT_ACTION\" = pre-resume ] || exit 0\n\
    echo \"$CRTOOLS_INIT_PID\" > /run/question && read -r go < /run/answer\n";
const END_DEADLINE: Duration = Duration::from_secs(10);

/// What a restore needs beside the job.
pub struct Restoring<'a> {
    pub place: &'a Place<'a>,
    pub directory: &'a OwnedFd,
    pub reply: &'a OwnedFd,
}

/// Where CRIU runs, and what was handed in there.
struct Around {
    room: Room,
    /// The file system of the agent, as `mountinfo` has it.
    agent: String,
}

/// The box runs when this returns, or nothing of it is left.
pub fn restore(
    job: &protocol::Restore,
    here: &Restoring<'_>,
) -> Result<(Started, Cloned), Failure> {
    let home = Home::of(here);
    let made = bring_back(job, here, Purpose::ToRun);
    if made.is_err() {
        leave_nothing(here, home);
    }
    made
}

/// Whether it would be brought back. Nothing of the box has run when this returns, and nothing of it
/// is left.
pub fn try_out(job: &protocol::Restore, here: &Restoring<'_>) -> Result<(), Failure> {
    let home = Home::of(here);
    let made = bring_back(job, here, Purpose::Trial);
    leave_nothing(here, home);
    made.map(drop)
}

fn leave_nothing(here: &Restoring<'_>, home: Option<Home>) {
    clear(here.place.cgroups);
    if let Some(home) = home {
        home.back();
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    ToRun,
    /// To see whether it could.
    Trial,
}

/// Where this process was before it went into the cgroup of the box, on a host with cgroup2
/// alone: a cgroup with a process in it can not be removed.
struct Home {
    namespace: fs::File,
    procs: PathBuf,
}

impl Home {
    fn of(here: &Restoring<'_>) -> Option<Self> {
        if here.place.cgroups.needs_attach() {
            return None;
        }
        Self::here()
    }

    fn here() -> Option<Self> {
        let mount = Layout::of_this_host().ok()?.v2?.mount;
        let text = fs::read_to_string("/proc/self/cgroup").ok()?;
        let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
        Some(Self {
            namespace: fs::File::open("/proc/self/ns/cgroup").ok()?,
            procs: mount.join(path).join("cgroup.procs"),
        })
    }

    /// As far as possible: the process ends soon anyway.
    fn back(self) {
        let entered = move_into_link_name_space(
            self.namespace.as_fd(),
            Some(LinkNameSpaceType::ControlGroup),
        );
        if entered.is_ok() {
            let _moved = fs::write(self.procs, own_pid().to_string());
        }
    }
}

fn bring_back(
    job: &protocol::Restore,
    here: &Restoring<'_>,
    purpose: Purpose,
) -> Result<(Started, Cloned), Failure> {
    let start = &job.start;
    seccomp_image::check(&job.image, here.place.filters)?;
    if !job.criu.careful
        && let Some(path) = ghosts::any(&job.image)?
    {
        return Err(io::Error::from(io::ErrorKind::PermissionDenied)).doing(ghosts::why(&path));
    }
    // CRIU makes the user namespace, and brings the other limits of processes back.
    limits::of_namespaces_to_be()?;
    here.place.own.set_boot_id(&start.boot_id)?;
    here.place.cgroups.set_limits(&start.limits)?;
    if !here.place.cgroups.needs_attach() {
        here.place.cgroups.attach(own_pid())?;
    }
    // SAFETY: a cgroup namespace touches neither memory nor descriptors. Only now: its root
    // is the cgroup of this moment.
    unsafe { unshare_unsafe(UnshareFlags::NEWCGROUP) }.doing("making the cgroup namespace")?;
    let listener = listen_in(here.directory).doing("making the socket of the agent")?;
    let namespace = idmap::user_namespace(start.first_id)?;
    let root = mounts::prepare_root(&start.root, namespace.as_fd())?;
    let to = start.agent_is_readable.then(|| namespace.as_fd());
    let agent = (here.place.agents).for_sandbox(here.directory, to, start.first_id)?;
    let image = mounts::detached(CWD, &job.image).doing("opening the image")?;
    set_mount_attributes(image.as_fd(), mounts::STILL, None).doing("opening the image")?;
    let mut room = Room::enter(&job.criu)?;
    room::attach(&root, table::ROOT, false)?;
    room::attach(&agent.mount, table::AGENT_FILE, true)?;
    room::attach(&image, room::IMAGE, false)?;
    userns_image::put_over(Path::new(room::IMAGE), start.first_id)?;
    own_files(here.place.own)?;
    connections_of_the_past()?;
    // Nor are the addresses there, and what is connected must lead somewhere.
    let all_here = netlink::index_of("lo")
        .and_then(AllHere::begin)
        .doing("letting connections of the box lead somewhere")?;
    for fifo in [QUESTION, ANSWER] {
        mkfifoat(
            CWD,
            Path::new("/run").join(fifo),
            Mode::from_raw_mode(0o600),
        )
        .doing("making a way to ask")?;
    }
    fs::write(SCRIPT, ASK)
        .and_then(|()| fs::set_permissions(SCRIPT, fs::Permissions::from_mode(0o700)))
        .doing("making a way to ask")?;
    // As the agent made the one it had, whose place it takes.
    rustix::io::ioctl_fionbio(&listener, true).doing("handing in the socket")?;
    // Exec keeps it.
    rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty())
        .doing("handing in the socket")?;
    let words = words_for(job.listener, &listener);
    // Both ends, so that it does not end when the script closes its own.
    let question = room.open(QUESTION, OFlags::RDWR | OFlags::NONBLOCK)?;
    let mut criu = Run::start(&words, Task::Restore)?;
    if purpose == Purpose::Trial {
        criu.must_get_on(here.place.cgroups.clone());
    }
    room.leave()?;
    let around = Around {
        room,
        agent: agent.device,
    };
    let beside = Beside {
        caller: here.reply.as_fd(),
        question: question.as_fd(),
    };
    let outcome = attend(job, here, &around, &mut criu, beside, (all_here, purpose));
    if outcome.is_err() || purpose == Purpose::Trial {
        end_unrun(&mut criu, here.place.cgroups);
    }
    outcome
}

fn words_for(inode: u64, listener: &OwnedFd) -> Vec<OsString> {
    let mut words: Vec<OsString> = ["restore", "--restore-detached", "--root", table::ROOT]
        .map(OsString::from)
        .to_vec();
    words.extend(["--action-script".into(), SCRIPT.into()]);
    words.extend([
        "--inherit-fd".into(),
        format!("fd[{}]:socket:[{inode}]", listener.as_raw_fd()).into(),
    ]);
    for external in table::externals() {
        words.extend([
            "--external".into(),
            format!("mnt[{}]:{}", external.point, external.source).into(),
        ]);
    }
    words
}

fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// The files a sandbox has of its own, twice: CRIU takes mounts with the flags they have here.
fn own_files(own: &Own) -> Result<(), Failure> {
    let doing = "mounting the files of the sandbox";
    fs::create_dir(table::OWN).doing(doing)?;
    let target = open(
        table::OWN,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .doing(doing)?;
    own.attach(&target).doing(doing)?;
    room::attach(&own.part(".", mounts::STILL)?, table::OWN_STILL, false)
}

/// Connections to the world outside come back with the address they had, to be told that they
/// are over; the moat gives the box its addresses only after it is there.
fn connections_of_the_past() -> Result<(), Failure> {
    for file in ["ipv4/ip_nonlocal_bind", "ipv6/ip_nonlocal_bind"] {
        let path = Path::new("/proc/sys/net").join(file);
        if path.exists() {
            fs::write(&path, "1").doing("letting old connections have their address")?;
        }
    }
    Ok(())
}

/// Until CRIU is done, or nothing more is wanted of it. Whatever is there then and is not to run is
/// the caller's to end.
fn attend(
    job: &protocol::Restore,
    here: &Restoring<'_>,
    around: &Around,
    criu: &mut Run,
    beside: Beside<'_>,
    (all_here, purpose): (AllHere, Purpose),
) -> Result<(Started, Cloned), Failure> {
    let mut found = None;
    let mut all_here = Some(all_here);
    loop {
        match criu.wait(Some(beside))? {
            Seen::Asked => {
                let whole = asked(beside.question).and_then(|pid| look(pid, job, here, around))?;
                all_here
                    .take()
                    .map_or(Ok(()), AllHere::end)
                    .doing("giving the box its own addresses alone")?;
                if purpose == Purpose::Trial {
                    around.room.remember(&job.criu);
                    return Ok(whole);
                }
                found = Some(whole);
                (around.room)
                    .open(ANSWER, OFlags::WRONLY)?
                    .write_all(b"go\n")
                    .doing("answering CRIU")?;
            }
            Seen::Ended(status) => {
                around.room.remember(&job.criu);
                return match found.take() {
                    Some(found) if status.success() => Ok(found),
                    _ => {
                        let why = words::reason(&around.room.log());
                        Err(io::Error::other(why)).doing(format_args!("CRIU ended with {status}"))
                    }
                };
            }
            Seen::GiveUp => {
                return Err(io::Error::from(io::ErrorKind::TimedOut))
                    .doing("bringing the box back");
            }
        }
    }
}

/// Ends what came back before any of it runs. CRIU holds its processes, and would let them go if it
/// ended first.
fn end_unrun(criu: &mut Run, cgroups: &Cgroups) {
    cgroups
        .processes()
        .into_iter()
        .filter(|pid| *pid != own_pid() && *pid != criu.pid())
        .for_each(proc::kill);
    criu.kill();
}

fn asked(question: BorrowedFd<'_>) -> Result<i32, Failure> {
    let mut text = [0_u8; 32];
    let length = rustix::io::read(question, &mut text).doing("listening to CRIU")?;
    std::str::from_utf8(&text[..length])
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
        .doing("listening to CRIU")
}

/// Everything of the box is there and nothing of it has run.
fn look(
    pid: i32,
    job: &protocol::Restore,
    here: &Restoring<'_>,
    around: &Around,
) -> Result<(Started, Cloned), Failure> {
    let pidfd = Pid::from_raw(pid)
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
        .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from))
        .doing("watching the box")?;
    let expected = Expected {
        first_id: job.start.first_id,
        room: around.room.name(),
        cgroups: here.place.cgroups,
        filters: here.place.filters.count(),
        own: here.place.own.device()?,
        agent: around.agent.clone(),
    };
    let processes = verify::confined(pid, &expected).map_err(|why| Failure {
        doing: format!("the box that came back is not confined: {why}"),
        source: io::ErrorKind::PermissionDenied.into(),
    })?;
    repair::end(&processes)?;
    if !job.criu.careful {
        wipe::wipe(&processes).doing("wiping what copies must not share")?;
    }
    let namespace = userns::open(pid)?;
    let owner = sys::owner_of(namespace.as_fd()).doing("looking at the user namespace")?;
    if job.criu.careful && owner != job.start.first_id {
        return Err(Failure {
            doing: format!("the box that came back counts as user {owner} of the host"),
            source: io::ErrorKind::PermissionDenied.into(),
        });
    }
    limits::of_user_namespace(&namespace)?;
    name(pid, &job.start.hostname)?;
    let start_ticks = proc::start_ticks(pid).doing("reading the start of the box")?;
    let started = Started {
        pid,
        start_ticks,
        cgroups: here.place.cgroups.clone(),
    };
    Ok((started, Cloned { pid, pidfd }))
}

/// The host name is set from outside: nobody in a box may do it.
fn name(pid: i32, hostname: &str) -> Result<(), Failure> {
    let namespace =
        fs::File::open(format!("/proc/{pid}/ns/uts")).doing("opening the host name of the box")?;
    move_into_link_name_space(
        namespace.as_fd(),
        Some(LinkNameSpaceType::HostNameAndNISDomainName),
    )
    .doing("entering the host name of the box")?;
    rustix::system::sethostname(hostname.as_bytes()).doing("setting the host name")
}

/// Kills whatever there is in the cgroups beside this process.
fn clear(cgroups: &Cgroups) {
    let until = Instant::now() + END_DEADLINE;
    loop {
        let others: Vec<i32> = cgroups
            .processes()
            .into_iter()
            .filter(|pid| *pid != own_pid())
            .collect();
        if others.is_empty() || Instant::now() >= until {
            return;
        }
        others.into_iter().for_each(proc::kill);
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Puts one file over another in this mount namespace.
pub fn cover(with: &str, what: &Path) -> Result<(), Failure> {
    mount_bind(with, what).doing(format_args!("covering {}", what.display()))
}
