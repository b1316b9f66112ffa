//! The edge of a box: its network namespace, made so that only our listeners can be reached.

mod addresses;
mod control;
mod plan;
mod refusals;
mod rules;
mod untracked;
mod uplink;

use sandkeep_netlink as netlink;

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    os::fd::{AsFd, OwnedFd},
    thread,
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use sandkeep_model::{Error, Result};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use self::{
    netlink::NetlinkSocket,
    rules::{Ground, Place},
};

pub use addresses::{BOX_V4, BOX_V6, INSIDE_V4};
pub use control::Control;
pub use plan::{Kinds, Plan};
pub use refusals::{Heard, Refusals};

/// Above the range programs get their own ports from, so that it is rarely in use.
const FIRST_PORT: u16 = 61_613;
const PORTS_TRIED: u16 = 64;
const BACKLOG: i32 = 1024;

/// Our sockets inside the namespace of a box. Closing them closes the box off.
#[derive(Debug)]
pub struct Listeners {
    pub tcp: Vec<TcpListener>,
    pub udp: Vec<UdpSocket>,
}

/// The edge of one sandbox.
#[derive(Debug)]
pub struct Edge {
    pub listeners: Listeners,
    pub control: Control,
    /// Where the kernel can tell.
    pub refusals: Option<Refusals>,
}

/// Makes the edge in this namespace and opens the listeners. Doing it again on the same
/// namespace, after a restart of the server, replaces what is there.
pub async fn build(namespace: OwnedFd, plan: Plan, given: HashMap<IpAddr, Kinds>) -> Result<Edge> {
    let (answer, wait) = tokio::sync::oneshot::channel();
    // The thread ends inside the box's namespace and is never used again: nothing has to be put
    // back, and no worker of the runtime can be left in the wrong one.
    thread::Builder::new()
        .name("moat-edge".to_owned())
        .stack_size(256 * 1024)
        .spawn(move || {
            let built = enter(&namespace).and_then(|()| build_here(plan, given));
            // A caller that went away has no use for the answer.
            drop(answer.send(built));
        })
        .map_err(|error| {
            Error::host_not_ready(format!("no thread could be started for the moat: {error}"))
        })?;
    wait.await
        .map_err(|_| Error::internal("the thread that makes the moat ended early"))?
}

fn enter(namespace: &OwnedFd) -> Result<()> {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).map_err(
        |error| {
            Error::host_not_ready(format!(
                "the network namespace of the box can not be entered: {error}"
            ))
            .hint("the server needs CAP_SYS_ADMIN for the moat")
        },
    )
}

fn build_here(plan: Plan, given: HashMap<IpAddr, Kinds>) -> Result<Edge> {
    let (place, port, listeners) = if uplink::is_here() {
        let (port, listeners) = uplink_listeners().map_err(no_listeners)?;
        uplink::refuse_at_once();
        (Place::Uplink, port, listeners)
    } else {
        let (port, listeners) = inner_listeners()?;
        (Place::Inner, port, listeners)
    };
    let refusals = Refusals::listen().ok();
    let ground = Ground {
        place,
        port,
        told: refusals.is_some(),
    };
    let control = NetlinkSocket::open(libc::NETLINK_NETFILTER)
        .and_then(|socket| Control::take(socket, ground, plan, given))
        .map_err(no_rules)?;
    Ok(Edge {
        listeners,
        refusals: refusals.filter(|_| control.tells()),
        control,
    })
}

fn inner_listeners() -> Result<(u16, Listeners)> {
    let v6 = addresses::set_up().map_err(|error| {
        Error::host_not_ready(format!("the box's addresses could not be set: {error}"))
    })?;
    // A redirected packet goes to loopback, and its answer must come from there: sockets on any
    // address would answer from the wrong one.
    let mut at = vec![IpAddr::from(Ipv4Addr::LOCALHOST)];
    if v6 {
        at.push(Ipv6Addr::LOCALHOST.into());
    }
    listen(&at).map_err(no_listeners)
}

/// For a box with a network stack of its own.
fn uplink_listeners() -> io::Result<(u16, Listeners)> {
    let mut at = uplink::addresses();
    listen(&at).or_else(|error| match error.kind() {
        // A host without IPv6.
        io::ErrorKind::AddrNotAvailable => {
            at.retain(IpAddr::is_ipv4);
            listen(&at)
        }
        _ => Err(error),
    })
}

#[allow(clippy::needless_pass_by_value)] // for map_err
fn no_listeners(error: io::Error) -> Error {
    Error::host_not_ready(format!("the moat can not listen in the box: {error}"))
}

#[allow(clippy::needless_pass_by_value)] // for map_err
fn no_rules(error: io::Error) -> Error {
    Error::host_not_ready(format!("the packet rules of the moat were refused: {error}"))
        .hint("the kernel needs nf_tables with inet, nat, redirect, reject, ct and sets; without them sandboxes have no network")
}

/// A program of the box may hold a port, on purpose or not: take the next one.
fn listen(at: &[IpAddr]) -> io::Result<(u16, Listeners)> {
    let mut last = io::ErrorKind::AddrInUse.into();
    for port in FIRST_PORT..FIRST_PORT + PORTS_TRIED {
        match listen_on(port, at) {
            Ok(listeners) => return Ok((port, listeners)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

fn listen_on(port: u16, at: &[IpAddr]) -> io::Result<Listeners> {
    let mut listeners = Listeners {
        tcp: Vec::new(),
        udp: Vec::new(),
    };
    for address in at {
        let address = SocketAddr::new(*address, port);
        let socket = bound(address, Type::STREAM, Protocol::TCP)?;
        socket.listen(BACKLOG)?;
        listeners.tcp.push(socket.into());
        listeners
            .udp
            .push(bound(address, Type::DGRAM, Protocol::UDP)?.into());
    }
    Ok(listeners)
}

fn bound(address: SocketAddr, kind: Type, protocol: Protocol) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), kind, Some(protocol))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    if kind == Type::STREAM {
        // Connections of the server before this one may still be closing.
        socket.set_reuse_address(true)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Where a redirected connection wanted to go. An error when it was not redirected: then a
/// program of the box found the listener itself.
pub fn original_destination(stream: &tokio::net::TcpStream) -> io::Result<SocketAddr> {
    let own = stream.local_addr()?;
    let socket = SockRef::from(stream);
    let found = if own.is_ipv4() {
        socket.original_dst_v4()?
    } else {
        socket.original_dst_v6()?
    };
    let wanted = found
        .as_socket()
        .ok_or_else(|| io::Error::other("the destination is no internet address"))?;
    if wanted == own || wanted.ip().is_loopback() {
        return Err(io::ErrorKind::AddrNotAvailable.into());
    }
    Ok(wanted)
}
