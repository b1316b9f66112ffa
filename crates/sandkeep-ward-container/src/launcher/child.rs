//! PID 1 of a box, from its first instruction to the start of the agent.

use super::{mounts, own::Own, protocol};
use crate::{
    failure::{Doing, Failure},
    launcher::caps,
    seccomp::Filters,
    sys,
};
use rustix::{
    fs::{Mode, OFlags, open},
    io::fcntl_dupfd_cloexec,
    process::setsid,
    stdio::{dup2_stderr, dup2_stdin, dup2_stdout},
    thread::{
        UnshareFlags, set_thread_groups, set_thread_res_gid, set_thread_res_uid, unshare_unsafe,
    },
};
use std::{
    io,
    os::fd::{AsFd, AsRawFd as _, IntoRawFd as _, OwnedFd},
};

/// What the child takes along from the worker.
pub struct Inheritance<'a> {
    pub sync: OwnedFd,
    pub listener: OwnedFd,
    pub filters: &'a Filters,
    pub own: &'a Own,
    pub hostname: &'a str,
    pub memory: u64,
}

/// Becomes the agent, or tells the worker why not and ends.
pub fn run(inheritance: Inheritance<'_>) -> ! {
    let sync = match fcntl_dupfd_cloexec(&inheritance.sync, 100) {
        Ok(sync) => sync,
        Err(_) => end(),
    };
    let Err(failure) = become_agent(inheritance);
    let answer = protocol::Answer::Failed {
        message: failure.doing,
        errno: failure.source.raw_os_error(),
    };
    if let Ok(bytes) = protocol::encode(&answer) {
        // When the worker is gone there is nobody to tell.
        let _told = protocol::send(&sync, &bytes, &[]);
    }
    end()
}

fn end() -> ! {
    // SAFETY: ends this process without running anything of the parent's.
    unsafe { libc::_exit(1) }
}

fn become_agent(inheritance: Inheritance<'_>) -> Result<std::convert::Infallible, Failure> {
    // The worker maps our ids and sends the root and the agent; if it ends, so do we.
    let packet = protocol::receive(&inheritance.sync)
        .and_then(|packet| packet.ok_or_else(|| io::ErrorKind::UnexpectedEof.into()))
        .doing("waiting for the worker")?;
    let Ok([root, agent]) = <[OwnedFd; 2]>::try_from(packet.fds) else {
        return Err(io::Error::from(io::ErrorKind::InvalidData)).doing("taking the root");
    };

    let host = mounts::enter_root(root.as_fd())?;
    become_root()?;
    mounts::populate(&host, inheritance.own, agent.as_fd(), inheritance.memory)?;
    mounts::leave_host(host)?;

    rustix::system::sethostname(inheritance.hostname.as_bytes()).doing("setting the host name")?;
    // SAFETY: a cgroup namespace touches neither memory nor descriptors. Only now: its root
    // is the cgroup of this moment.
    unsafe { unshare_unsafe(UnshareFlags::NEWCGROUP) }.doing("making the cgroup namespace")?;
    setsid().doing("starting a session")?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    sys::reset_signals().doing("resetting signals")?;
    let agent = place_descriptors(inheritance.listener, &agent)?;
    // Needs SYS_ADMIN, which the next step gives up.
    inheritance.filters.install()?;
    caps::reduce()?;
    Err(sys::execute(
        agent.as_fd(),
        &[c"sandkeep-agent"],
        &[
            c"SANDKEEP_LISTEN_FD=3",
            c"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        ],
    ))
    .doing("starting the agent")
}

/// Root of the new user namespace, and member of no group of the host.
fn become_root() -> Result<(), Failure> {
    use rustix::process::{Gid, Uid};
    set_thread_groups(&[]).doing("leaving the host's groups")?;
    set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT).doing("becoming root in the box")?;
    set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).doing("becoming root in the box")
}

/// 0, 1 and 2 are the box's /dev/null, 3 is the listening socket, and exec closes the rest.
/// The agent's file is returned on a number that is out of the way.
fn place_descriptors(listener: OwnedFd, agent: &OwnedFd) -> Result<OwnedFd, Failure> {
    let place = || -> io::Result<OwnedFd> {
        let null = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        dup2_stdin(&null)?;
        dup2_stdout(&null)?;
        dup2_stderr(&null)?;
        drop(null);
        let agent = fcntl_dupfd_cloexec(agent, 100)?;
        let high = fcntl_dupfd_cloexec(&listener, 100)?;
        // It may be number 3 itself, so it must not be closed after this.
        let _stays_open = listener.into_raw_fd();
        // Whatever else was number 3 is not needed any more, or has a copy further up.
        sys::place_at(high.as_raw_fd(), 3)?;
        sys::close_on_exec_from(4)?;
        Ok(agent)
    };
    place().doing("arranging descriptors")
}
