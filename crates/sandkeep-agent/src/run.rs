//! Starting up: where to listen, the runtime, the end.

use std::ffi::OsString;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::process::ExitCode;
use std::time::Duration;

use rustix::process::{Pid, getpid};
use tokio::signal::unix::{SignalKind, signal};

use crate::{State, oom, server};

/// Names the descriptor of the listening socket the ward hands over.
const LISTEN_FD: &str = "SANDKEEP_LISTEN_FD";
const USAGE: &str = "usage: sandkeep-agent [--listen PATH]\n\
    without --listen the listening socket is inherited, see SANDKEEP_LISTEN_FD\n";

/// Runs the agent until SIGTERM.
pub fn run(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    match listener(arguments).and_then(serve) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            use io::Write;
            // There is no log yet; the ward reads what a dying agent says.
            let _ = writeln!(io::stderr(), "sandkeep-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

fn listener(mut arguments: impl Iterator<Item = OsString>) -> io::Result<UnixListener> {
    match (arguments.next(), arguments.next(), arguments.next()) {
        (Some(option), Some(path), None) if option == "--listen" => UnixListener::bind(path),
        (None, ..) => inherited_listener(),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, USAGE)),
    }
}

fn inherited_listener() -> io::Result<UnixListener> {
    let fd: RawFd = std::env::var(LISTEN_FD)
        .ok()
        .and_then(|text| text.parse().ok())
        .filter(|&fd| fd > 2)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, USAGE))?;
    // SAFETY: by contract with the ward this descriptor is ours alone; nothing else has run yet
    // that could have opened or closed it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // It must not leak into the box's processes. This also proves that it is open.
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
    Ok(UnixListener::from(fd))
}

fn serve(listener: UnixListener) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    // One thread does everything; file calls that may block get helpers, which leave soon after.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(16)
        .thread_keep_alive(Duration::from_secs(2))
        .build()?;
    runtime.block_on(async {
        let listener = tokio::net::UnixListener::from_std(listener)?;
        let state = State::new(oom::protect());
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            result = server::serve(listener, state.clone()) => match result? {},
            result = state.reaper().run() => match result? {},
            _ = terminate.recv() => {}
        }
        end_all(&state);
        Ok(())
    })
}

/// As PID 1 the agent takes the whole box with it, elsewhere only what it started.
fn end_all(state: &State) {
    if getpid() == Pid::INIT {
        // SAFETY: a system call with plain numbers. -1 means everybody but the caller, and in
        // the box's own pid namespace everybody belongs to the box.
        unsafe { libc::kill(-1, libc::SIGKILL) };
    } else {
        state.reaper().kill_all();
    }
}
