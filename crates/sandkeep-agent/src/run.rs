//! Starting up: where to listen, the runtime, the end.

use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, getpid};
use sandkeep_agent_api::channel;
use sandkeep_agent_api::machine::{OPTION, Order};
use tokio::signal::unix::{SignalKind, signal};

use crate::fence::Fence;
use crate::gate::Gate;
use crate::server::{self, Door};
use crate::{State, machine, oom, resident};

/// Names the descriptor of the listening socket the ward hands over.
const LISTEN_FD: &str = "SANDKEEP_LISTEN_FD";
const USAGE: &str = "usage: sandkeep-agent [--listen PATH | --network HOST | --machine HOST]\n\
    --listen   a unix socket to make\n\
    --network  listen on the network for HOST alone, which proves itself by the token that\n\
               was written to our standard input; for a box with a kernel of its own\n\
    --machine  be the init of a virtual machine, told by HOST on its serial port\n\
    without either the listening socket is inherited, see SANDKEEP_LISTEN_FD\n";

/// Runs the agent until SIGTERM.
pub fn run(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.collect();
    match entrance(&arguments).and_then(serve) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            use io::Write;
            // There is no log yet; the ward reads what a dying agent says.
            let _ = writeln!(io::stderr(), "sandkeep-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The way in, before there is a runtime.
enum Entrance {
    Socket(UnixListener),
    Network(TcpListener, IpAddr),
    Machine(TcpListener, IpAddr, machine::Port, Box<Order>),
}

fn entrance(arguments: &[OsString]) -> io::Result<Entrance> {
    let usage = || io::Error::new(io::ErrorKind::InvalidInput, USAGE);
    match arguments {
        [] => inherited_listener().map(Entrance::Socket),
        [option, path] if option == "--listen" => UnixListener::bind(path).map(Entrance::Socket),
        [option, host] if option == "--network" => {
            let host = address(host).ok_or_else(usage)?;
            resident::settle(arguments)?;
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, channel::PORT))?;
            Ok(Entrance::Network(listener, host))
        }
        [option, host] if option == OPTION => {
            let host = address(host).ok_or_else(usage)?;
            let (port, order) = machine::boot()?;
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, channel::PORT))?;
            Ok(Entrance::Machine(listener, host, port, Box::new(order)))
        }
        _ => Err(usage()),
    }
}

fn address(word: &OsString) -> Option<IpAddr> {
    word.to_str()?.parse().ok()
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

fn serve(entrance: Entrance) -> io::Result<()> {
    // One thread does everything; file calls that may block get helpers, which leave soon after.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(16)
        .thread_keep_alive(Duration::from_secs(2))
        .build()?;
    runtime.block_on(async {
        let mut port = None;
        let (door, fence) = match entrance {
            Entrance::Socket(listener) => {
                listener.set_nonblocking(true)?;
                let listener = tokio::net::UnixListener::from_std(listener)?;
                (Door::Socket(listener), Fence::default())
            }
            Entrance::Network(listener, host) => {
                let gate = Arc::new(Gate::new(host));
                (Door::Network(listener, gate), Fence::in_gvisor())
            }
            Entrance::Machine(listener, host, told, order) => {
                let gate = Arc::new(Gate::new(host));
                port = Some((told, order, Arc::clone(&gate)));
                (Door::Network(listener, gate), Fence::in_machine())
            }
        };
        let state = State::new(oom::protect(), fence);
        if let Some((port, order, gate)) = port {
            machine::attend(port, &order, gate, state.clone())?;
        }
        if getpid() != Pid::INIT {
            // As PID 1 it inherits the processes it starts from who led their sessions.
            rustix::process::set_child_subreaper(Some(getpid()))?;
        }
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            result = server::serve(door, state.clone()) => match result? {},
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
