//! The room verify works in: process, mount and network namespaces of its own. When its first
//! process ends, for whatever reason, the kernel ends everything in it: the private server, its
//! sandboxes, their mounts, their networks.

use std::{ffi::CStr, io, ptr};

use crate::{
    fault::{Doing as _, Fault, Result},
    stop::Stop,
};

/// Runs `work` in a room and gives its exit code. This process must have one thread.
///
/// `work` gets SIGINT, SIGTERM and SIGHUP as this process does; the third ends it by force.
pub fn in_a_room(work: impl FnOnce(&Stop) -> u8) -> Result<u8> {
    let signals = Signals::block()?;
    // SAFETY: only children are affected, and there are none yet.
    check(unsafe { libc::unshare(libc::CLONE_NEWPID) }).doing("making a process namespace")?;
    // SAFETY: this process has one thread, so the child may do what it likes.
    let child = check(unsafe { libc::fork() }).doing("starting the room")?;
    if child == 0 {
        let code = match furnish()
            .and_then(|()| Stop::watch())
            .and_then(|stop| signals.restore().map(|()| stop))
        {
            Ok(stop) => work(&stop),
            Err(fault) => {
                let _ = io::Write::write_all(
                    &mut io::stderr().lock(),
                    format!("error: {fault}\n").as_bytes(),
                );
                2
            }
        };
        std::process::exit(code.into());
    }
    let code = wait(child, &signals);
    signals.restore()?;
    code
}

/// In the child: what belongs to the room.
fn furnish() -> Result<()> {
    // SAFETY: plain calls; there is one thread.
    unsafe {
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))
            .doing("asking to end with the caller")?;
        check(libc::unshare(libc::CLONE_NEWNS)).doing("making a mount namespace")?;
    }
    mount(c"none", c"/", None, libc::MS_REC | libc::MS_PRIVATE).doing("keeping mounts private")?;
    let quiet = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    mount(c"proc", c"/proc", Some(c"proc"), quiet).doing("mounting /proc")
}

/// Leaves the host's network for one of its own. This process must still have one thread.
pub fn leave_the_network() -> Result<()> {
    // SAFETY: a new network namespace touches neither memory nor descriptors.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) })
        .doing("making a network namespace")
        .map(drop)
}

fn mount(from: &CStr, to: &CStr, kind: Option<&CStr>, flags: libc::c_ulong) -> io::Result<()> {
    let kind = kind.map_or(ptr::null(), CStr::as_ptr);
    // SAFETY: all pointers are null or C strings that live as long as the call.
    check(unsafe { libc::mount(from.as_ptr(), to.as_ptr(), kind, flags, ptr::null()) }).map(drop)
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Waits for the room's first process and hands on what users want of it.
fn wait(child: libc::pid_t, signals: &Signals) -> Result<u8> {
    let mut asked = 0;
    loop {
        let (signal, from_a_program) = signals.next()?;
        if signal != libc::SIGCHLD {
            asked += 1;
            let sent = if asked > 2 { libc::SIGKILL } else { signal };
            // A terminal tells the whole group; a program told only us.
            if from_a_program || sent == libc::SIGKILL {
                // SAFETY: it is our child and was not waited for yet.
                let _gone = unsafe { libc::kill(child, sent) };
            }
            continue;
        }
        let mut status = 0;
        // SAFETY: `status` is ours.
        let ended = check(unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) })
            .doing("waiting for the room")?;
        if ended != child {
            continue;
        }
        if libc::WIFEXITED(status) {
            return Ok(u8::try_from(libc::WEXITSTATUS(status)).unwrap_or(2));
        }
        return Err(Fault::Cannot(format!(
            "the battery was ended by signal {}",
            libc::WTERMSIG(status)
        )));
    }
}

/// Signals that are taken one by one instead of as they come.
struct Signals {
    set: libc::sigset_t,
    before: libc::sigset_t,
}

impl Signals {
    fn block() -> Result<Self> {
        // SAFETY: signal sets are plain data, made by the calls that follow.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            check(libc::sigemptyset(&raw mut set)).doing("making a signal set")?;
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGCHLD] {
                check(libc::sigaddset(&raw mut set, signal)).doing("making a signal set")?;
            }
            check(libc::sigprocmask(
                libc::SIG_BLOCK,
                &raw const set,
                &raw mut before,
            ))
            .doing("taking signals")?;
            Ok(Self { set, before })
        }
    }

    fn restore(&self) -> Result<()> {
        // SAFETY: `before` came from the kernel.
        check(unsafe {
            libc::sigprocmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut())
        })
        .doing("taking signals as before")
        .map(drop)
    }

    /// The next one, and whether a program sent it (and not the terminal).
    fn next(&self) -> Result<(libc::c_int, bool)> {
        loop {
            // SAFETY: `info` is plain data that the call fills.
            let (signal, info) = unsafe {
                let mut info: libc::siginfo_t = std::mem::zeroed();
                let signal = libc::sigwaitinfo(&raw const self.set, &raw mut info);
                (signal, info)
            };
            if signal > 0 {
                return Ok((signal, info.si_code <= 0));
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error).doing("waiting for signals");
            }
        }
    }
}
