//! A worker: waits in fresh cgroups and a fresh network namespace for one box to start.
//!
//! Moving a process into cgroups of version 1 takes about 11 ms. A worker has done it before
//! it is needed, and the box it clones is born where the worker is.

use super::{
    agents::Agents,
    child::{self, Inheritance},
    limits, mounts, netns,
    own::Own,
    processors::Processors,
    protocol::{self, Answer, Job, Packet, Setup, Start, Started},
    restore::{self, Restoring},
    save::{self, NotSaved},
    userns,
};
use crate::{
    cgroup::Cgroups,
    failure::{Doing, Failure},
    proc,
    seccomp::Filters,
    sys::{self, Cloned},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{Mode, OFlags, open},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with},
};
use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
    time::Duration,
};

/// The name of the socket in the directory of a box.
pub const SOCKET: &str = "agent.sock";
/// A box that is not up by then never will be.
const CHILD_DEADLINE: Duration = Duration::from_secs(10);
const BACKLOG: i32 = 1024;

/// Clone flags of a box; its network namespace is the worker's.
const NAMESPACES: u64 = (libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS) as u64;
const NEWTIME: u64 = 0x80;

/// What all workers have from the launcher.
pub struct Tools<'a> {
    pub filters: &'a Filters,
    pub processors: &'a Processors,
    pub agents: &'a Agents,
}

/// The life of a worker process.
pub fn run(setup: &Setup, tools: &Tools<'_>, name: &str, launcher: &OwnedFd) {
    let cgroups = setup.tree.child(name);
    let ready = cgroups.create().and_then(|()| {
        if cgroups.needs_attach() {
            cgroups.attach(own_pid())?;
        }
        netns::enter_fresh()?;
        Own::make(tools.processors)
    });
    let own = match ready {
        Ok(own) => own,
        Err(failure) => {
            // The launcher hands us a job all the same, to have somebody told.
            refuse_next(launcher, &failure);
            leave(setup, &cgroups);
            return;
        }
    };
    if protocol::send(launcher, b"ready", &[]).is_err() {
        leave(setup, &cgroups);
        return;
    }
    match protocol::receive(launcher) {
        Ok(Some(packet)) => {
            let place = Place {
                setup,
                filters: tools.filters,
                agents: tools.agents,
                cgroups: &cgroups,
                own: &own,
            };
            serve(&place, packet, launcher);
        }
        // The launcher has ended: nobody will send work any more.
        Ok(None) | Err(_) => leave(setup, &cgroups),
    }
}

fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

fn refuse_next(launcher: &OwnedFd, failure: &Failure) {
    let told = protocol::send(launcher, b"ready", &[]).and_then(|()| protocol::receive(launcher));
    if let Ok(Some(packet)) = told
        && let Some(reply) = packet.fds.first()
    {
        answer_failure(reply, failure);
    }
}

fn answer_failure(reply: &OwnedFd, failure: &Failure) {
    let answer = Answer::Failed {
        message: failure.to_string(),
        errno: failure.source.raw_os_error(),
    };
    tell(reply, &answer);
}

/// When the server is gone there is nobody to tell.
fn tell(reply: &OwnedFd, answer: &Answer) {
    if let Ok(bytes) = protocol::encode(answer) {
        let _told = protocol::send(reply, &bytes, &[]);
    }
}

/// Gives the cgroups back; what can not be removed now is swept at the next start.
fn leave(setup: &Setup, cgroups: &Cgroups) {
    if cgroups.needs_attach() {
        setup.tree.attach_as_far_as_possible(own_pid());
    }
    let _removed = cgroups.remove(CHILD_DEADLINE);
}

/// The launcher cleans up after a worker that ends without this.
fn done(launcher: &OwnedFd) {
    // When it has ended there is nobody to tell.
    let _told = protocol::send(launcher, b"done", &[]);
}

/// What a worker has before it has a job.
pub struct Place<'a> {
    pub setup: &'a Setup,
    pub filters: &'a Filters,
    pub agents: &'a Agents,
    pub cgroups: &'a Cgroups,
    pub own: &'a Own,
}

fn serve(place: &Place<'_>, packet: Packet, launcher: &OwnedFd) {
    let (setup, cgroups) = (place.setup, place.cgroups);
    let job = packet.parse::<Job>();
    let mut fds = packet.fds.into_iter();
    let (Some(reply), Some(directory), writing) = (fds.next(), fds.next(), fds.next()) else {
        leave(setup, cgroups);
        done(launcher);
        return;
    };
    let made = match job.doing("reading the job") {
        Ok(Job::Start(job)) => start(place, &job, &directory),
        Ok(Job::Restore(job)) => restore::restore(
            &job,
            &Restoring {
                place,
                directory: &directory,
                reply: &reply,
            },
        ),
        Ok(Job::Try(job)) => {
            let here = Restoring {
                place,
                directory: &directory,
                reply: &reply,
            };
            let tried = restore::try_out(&job, &here);
            // Free before anybody is told that it is.
            leave(setup, cgroups);
            done(launcher);
            return match tried {
                Ok(()) => tell(&reply, &Answer::ComesBack),
                Err(failure) => answer_failure(&reply, &failure),
            };
        }
        Ok(Job::Save(job)) => {
            let saved = writing
                .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
                .doing("reading the job")
                .map_err(NotSaved::from)
                // Free before anybody is told that it is.
                .and_then(|writing| save::save(&job, cgroups, &writing));
            leave(setup, cgroups);
            done(launcher);
            return answer_save(&reply, saved);
        }
        Err(failure) => Err(failure),
    };
    match made {
        Ok((started, cloned)) => {
            // Before anybody knows of the box: what is theirs must not be cleaned up.
            done(launcher);
            let told = protocol::encode(&Answer::Started(started))
                .and_then(|bytes| protocol::send(&reply, &bytes, &[cloned.pidfd.as_fd()]));
            if told.is_err() {
                // The server has given up or died before it knew of this box.
                destroy(&cloned);
                leave(setup, cgroups);
            }
        }
        Err(failure) => {
            leave(setup, cgroups);
            done(launcher);
            answer_failure(&reply, &failure);
        }
    }
}

fn answer_save(reply: &OwnedFd, saved: Result<(), NotSaved>) {
    let answer = match saved {
        Ok(()) => Answer::Saved,
        Err(NotSaved::Refused(why)) => Answer::Refused { why },
        Err(NotSaved::Failed(failure)) => return answer_failure(reply, &failure),
    };
    tell(reply, &answer);
}

fn start(
    place: &Place<'_>,
    job: &Start,
    directory: &OwnedFd,
) -> Result<(Started, Cloned), Failure> {
    let cgroups = place.cgroups;
    let listener = listen_in(directory).doing("making the socket of the agent")?;
    cgroups.set_limits(&job.limits)?;
    limits::of_processes(&job.limits)?;
    place.own.set_boot_id(&job.boot_id)?;
    raise_oom_score();
    let (ours, theirs) = protocol::pair().doing("making a socket pair")?;
    let v2 = match cgroups.v2() {
        Some(dir) if !cgroups.needs_attach() => Some(
            open(
                dir,
                OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )
            .doing("opening the cgroup of the box")?,
        ),
        _ => None,
    };
    let Some(cloned) =
        clone_box(job.first_id, v2.as_ref().map(AsFd::as_fd)).doing("making the namespaces")?
    else {
        drop(ours);
        child::run(Inheritance {
            sync: theirs,
            listener,
            filters: place.filters,
            own: place.own,
            hostname: &job.hostname,
            memory: job.limits.memory_bytes(),
        });
    };
    drop(theirs);
    let finished = finish(place, job, directory, &cloned, &ours);
    match finished {
        Ok(started) => Ok((started, cloned)),
        Err(failure) => {
            destroy(&cloned);
            Err(failure)
        }
    }
}

/// A kernel without time namespaces refuses the flag; everything else must work.
fn clone_box(owner: u32, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Option<Cloned>> {
    match sys::clone_owned_by(owner, NAMESPACES | NEWTIME, cgroup) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            sys::clone_owned_by(owner, NAMESPACES, cgroup)
        }
        other => other,
    }
}

fn finish(
    place: &Place<'_>,
    job: &Start,
    directory: &OwnedFd,
    cloned: &Cloned,
    child: &OwnedFd,
) -> Result<Started, Failure> {
    let start_ticks = proc::start_ticks(cloned.pid).doing("reading the start of the box")?;
    userns::map_ids(cloned.pid, job.first_id)?;
    let namespace = userns::open(cloned.pid)?;
    let root = mounts::prepare_root(&job.root, namespace.as_fd())?;
    let to = job.agent_is_readable.then(|| namespace.as_fd());
    let agent = place.agents.for_sandbox(directory, to, job.first_id)?;
    protocol::send(child, b"go", &[root.as_fd(), agent.mount.as_fd()]).doing("waking the box")?;
    wait_readable(child.as_fd(), CHILD_DEADLINE).doing("waiting for the agent to start")?;
    // Exec closes the child's end; anything it says is why it did not get there.
    let last_words = protocol::receive(child).doing("waiting for the agent to start")?;
    match last_words.map(|packet| packet.parse::<Answer>()) {
        None => {}
        Some(Ok(Answer::Failed { message, errno })) => {
            return Err(Failure {
                doing: message,
                source: io::Error::from_raw_os_error(errno.unwrap_or(libc::EIO)),
            });
        }
        Some(_) => return Err(io::Error::from(io::ErrorKind::InvalidData)).doing("starting"),
    }
    // The end is closed by a death, too.
    if wait_readable(cloned.pidfd.as_fd(), Duration::ZERO).is_ok() {
        return Err(io::Error::from(io::ErrorKind::BrokenPipe)).doing("the box ended at once");
    }
    Ok(Started {
        pid: cloned.pid,
        start_ticks,
        cgroups: place.cgroups.clone(),
    })
}

fn destroy(cloned: &Cloned) {
    // PID 1 takes its whole namespace along.
    let _sent = rustix::process::pidfd_send_signal(&cloned.pidfd, rustix::process::Signal::KILL);
    let _ended = wait_readable(cloned.pidfd.as_fd(), CHILD_DEADLINE);
}

/// `TimedOut` when nothing came.
fn wait_readable(fd: BorrowedFd<'_>, deadline: Duration) -> io::Result<()> {
    let timeout = Timespec::try_from(deadline).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    match poll(&mut fds, Some(&timeout))? {
        0 => Err(io::ErrorKind::TimedOut.into()),
        _ => Ok(()),
    }
}

/// The socket lives in the box's network namespace and on the host's file system. Its path
/// may be longer than an address holds, so it is named by the directory's descriptor.
pub fn listen_in(directory: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd());
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // A launcher that died over this box may have left one.
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// A server that is protected from the kernel's killer must not pass that on to boxes.
fn raise_oom_score() {
    let path = "/proc/self/oom_score_adj";
    let protected = fs::read_to_string(path)
        .ok()
        .and_then(|text| text.trim().parse::<i32>().ok())
        .is_some_and(|score| score < 0);
    if protected && let Err(error) = fs::write(path, "0") {
        tracing::warn!(%error, "the box keeps the server's protection from the OOM killer");
    }
}
