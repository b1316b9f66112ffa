//! The network of a box: one namespace of the host's with both ends of a cable in it.
//!
//! `eth0` is the box's end: `runsc` takes its addresses away and moves frames between it and
//! the network stack of the box. `up0` is the host's end: what the box sends arrives there and
//! is answered by our listeners, or not at all. Nothing else is in the namespace, so there is
//! no way out of it. The addresses are the same in every box: a copy needs no new ones.

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use sandkeep_agent_api::channel;
use sandkeep_host::failure::{Doing as _, Failure};
use sandkeep_model::{Error, Result};
use sandkeep_netlink::{
    self as cable, ACK, BOX_V4, BOX_V6, CREATE, EXCLUSIVE, HOST_V4, HOST_V6, Messages, REPLACE,
};
use std::{
    fs, io,
    net::SocketAddr,
    os::fd::{AsFd as _, OwnedFd},
    thread,
};
use tokio::{net::TcpStream, sync::oneshot};

// The moat knows the agent's answers by it.
const _: () = assert!(cable::AGENT_PORT == channel::PORT);
const BITS_V4: u8 = 24;
const BITS_V6: u8 = 64;

const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
const NEW_ROUTE: u16 = 24;
const LO: u32 = 1;
const BOX_END: (u32, &str, [u8; 6]) = (2, cable::BOX_END, [2, 0, 10, 0, 0, 2]);
const HOST_END: (u32, &str, [u8; 6]) = (3, cable::HOST_END, [2, 0, 10, 0, 0, 1]);

/// A fresh namespace, ready to be given to `runsc`.
pub async fn make() -> Result<OwnedFd> {
    on_a_thread(|| {
        // SAFETY: a new network namespace does not touch memory or descriptors, and the thread
        // ends in it.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.doing("making the network namespace")?;
        lay_cable().doing("making the network of the box")?;
        fs::File::open("/proc/thread-self/ns/net")
            .map(OwnedFd::from)
            .doing("keeping the network namespace")
    })
    .await
}

/// Switches the host's end on. Before `runsc` has taken the box's end it would take both.
pub async fn open(namespace: &OwnedFd) -> Result<()> {
    inside(namespace, || {
        let mut messages = Messages::default();
        address(&mut messages, HOST_END.0, &HOST_V4.octets(), BITS_V4);
        up(&mut messages, HOST_END.0);
        messages
            .send(libc::NETLINK_ROUTE)
            .doing("switching the network of the box on")?;
        let mut messages = Messages::default();
        address(&mut messages, HOST_END.0, &HOST_V6.octets(), BITS_V6);
        if let Err(error) = messages.send(libc::NETLINK_ROUTE) {
            tracing::debug!(%error, "boxes have no IPv6 on this host");
        }
        Ok(())
    })
    .await
}

/// A connection to the agent. The socket belongs to the namespace it was made in; dialling is
/// done by the runtime.
pub async fn dial(namespace: &OwnedFd) -> Result<TcpStream> {
    let socket = inside(namespace, || {
        tokio::net::TcpSocket::new_v4().doing("making a socket in the network of the box")
    })
    .await?;
    let agent = SocketAddr::from((BOX_V4, channel::PORT));
    let stream = socket.connect(agent).await.map_err(Error::from)?;
    stream.set_nodelay(true).map_err(Error::from)?;
    Ok(stream)
}

async fn inside<T: Send + 'static>(
    namespace: &OwnedFd,
    work: impl FnOnce() -> std::result::Result<T, Failure> + Send + 'static,
) -> Result<T> {
    let namespace = namespace
        .try_clone()
        .doing("entering the network of the box")?;
    on_a_thread(move || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .doing("entering the network of the box")?;
        work()
    })
    .await
}

/// The thread ends where it went and is never used again: no worker of the runtime can be
/// left in the wrong namespace.
async fn on_a_thread<T: Send + 'static>(
    work: impl FnOnce() -> std::result::Result<T, Failure> + Send + 'static,
) -> Result<T> {
    let (tell, told) = oneshot::channel();
    thread::Builder::new()
        .name("gvisor-network".to_owned())
        .stack_size(256 * 1024)
        .spawn(move || drop(tell.send(work())))
        .doing("starting a thread")?;
    told.await
        .map_err(|_| Error::internal("the thread in the network of the box ended early"))?
        .map_err(Error::from)
}

fn lay_cable() -> io::Result<()> {
    // Addresses that nobody asked for would be answered by the host's kernel.
    let _without_v6 = fs::write("/proc/sys/net/ipv6/conf/default/addr_gen_mode", "1");
    let _without_v6 = fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "0");
    let _without_v6 = fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "0");
    let _without_v6 = fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "0");
    // New namespaces may inherit what the host does.
    fs::write("/proc/sys/net/ipv4/ip_forward", "0")?;
    let mut messages = Messages::default();
    up(&mut messages, LO);
    lay(&mut messages);
    address(&mut messages, BOX_END.0, &BOX_V4.octets(), BITS_V4);
    up(&mut messages, BOX_END.0);
    default_route(&mut messages, BOX_END.0, &HOST_V4.octets());
    messages.send(libc::NETLINK_ROUTE)?;
    let mut messages = Messages::default();
    address(&mut messages, BOX_END.0, &BOX_V6.octets(), BITS_V6);
    default_route(&mut messages, BOX_END.0, &HOST_V6.octets());
    if let Err(error) = messages.send(libc::NETLINK_ROUTE) {
        tracing::debug!(%error, "boxes have no IPv6 on this host");
    }
    Ok(())
}

/// The fixed part of a message about a device.
fn device(index: u32, flags: u32) -> Vec<u8> {
    let mut fixed = vec![0; 4];
    fixed.extend_from_slice(&index.to_ne_bytes());
    fixed.extend_from_slice(&flags.to_ne_bytes());
    fixed.extend_from_slice(&flags.to_ne_bytes());
    fixed
}

fn up(messages: &mut Messages, index: u32) {
    messages.begin(NEW_LINK, ACK, &device(index, libc::IFF_UP as u32));
}

fn lay(messages: &mut Messages) {
    const MAC: u16 = 1;
    const NAME: u16 = 3;
    const INFO: u16 = 18;
    const KIND: u16 = 1;
    const DATA: u16 = 2;
    const PEER: u16 = 1;
    let named = |messages: &mut Messages, (_, name, mac): (u32, &str, [u8; 6])| {
        messages.text(NAME, name);
        messages.attribute(MAC, &mac);
    };
    messages.begin(NEW_LINK, ACK | CREATE | EXCLUSIVE, &device(BOX_END.0, 0));
    named(messages, BOX_END);
    messages.nested(INFO, |m| {
        m.text(KIND, "veth");
        m.nested(DATA, |m| {
            m.nested(PEER, |m| {
                m.raw(&device(HOST_END.0, 0));
                named(m, HOST_END);
            });
        });
    });
}

fn family(address: &[u8]) -> u8 {
    let family = if address.len() == 4 {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    u8::try_from(family).expect("address families are small numbers")
}

fn address(messages: &mut Messages, index: u32, own: &[u8], bits: u8) {
    const ADDRESS: u16 = 1;
    const LOCAL: u16 = 2;
    /// Do not look for a duplicate: the address shall be there at once.
    const NO_DAD: u8 = 2;
    let mut fixed = vec![family(own), bits, NO_DAD, 0];
    fixed.extend_from_slice(&index.to_ne_bytes());
    messages.begin(NEW_ADDRESS, ACK | CREATE | REPLACE, &fixed);
    messages.attribute(LOCAL, own);
    messages.attribute(ADDRESS, own);
}

fn default_route(messages: &mut Messages, index: u32, gateway: &[u8]) {
    const DEVICE: u16 = 4;
    const GATEWAY: u16 = 5;
    const TABLE_MAIN: u8 = 254;
    const STATIC: u8 = 4;
    const EVERYWHERE: u8 = 0;
    const UNICAST: u8 = 1;
    let mut fixed = vec![
        family(gateway),
        0,
        0,
        0,
        TABLE_MAIN,
        STATIC,
        EVERYWHERE,
        UNICAST,
    ];
    fixed.extend_from_slice(&0_u32.to_ne_bytes());
    messages.begin(NEW_ROUTE, ACK | CREATE | REPLACE, &fixed);
    messages.attribute(GATEWAY, gateway);
    messages.attribute(DEVICE, &index.to_ne_bytes());
}
