//! Network namespaces of boxes that have a network stack of their own.

use crate::failure::{Doing as _, Failure};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use sandkeep_model::{Error, Result};
use std::{
    fs, io,
    net::SocketAddr,
    os::fd::{AsFd as _, OwnedFd},
    thread,
};
use tokio::{
    net::{TcpSocket, TcpStream},
    sync::oneshot,
};

/// A fresh namespace that forwards nothing and gives itself no addresses, and what `work` made
/// in it.
pub async fn make<T: Send + 'static>(
    work: impl FnOnce() -> std::result::Result<T, Failure> + Send + 'static,
) -> Result<(OwnedFd, T)> {
    on_a_thread(|| {
        // SAFETY: a new network namespace does not touch memory or descriptors, and the thread
        // ends in it.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.doing("making the network namespace")?;
        be_an_end().doing("preparing the network namespace")?;
        let made = work()?;
        let namespace =
            fs::File::open("/proc/thread-self/ns/net").doing("keeping the network namespace")?;
        Ok((namespace.into(), made))
    })
    .await
}

/// Does something in a namespace.
pub async fn inside<T: Send + 'static>(
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

/// A connection from inside a namespace. The socket belongs to the namespace it was made in;
/// dialling is done by the runtime.
pub async fn dial(namespace: &OwnedFd, to: SocketAddr) -> Result<TcpStream> {
    let socket = inside(namespace, || {
        TcpSocket::new_v4().doing("making a socket in the network of the box")
    })
    .await?;
    let stream = socket.connect(to).await.map_err(Error::from)?;
    stream.set_nodelay(true).map_err(Error::from)?;
    Ok(stream)
}

/// The thread ends where it went and is never used again: no worker of the runtime can be
/// left in the wrong namespace.
async fn on_a_thread<T: Send + 'static>(
    work: impl FnOnce() -> std::result::Result<T, Failure> + Send + 'static,
) -> Result<T> {
    let (tell, told) = oneshot::channel();
    thread::Builder::new()
        .name("box-network".to_owned())
        .stack_size(256 * 1024)
        .spawn(move || drop(tell.send(work())))
        .doing("starting a thread")?;
    told.await
        .map_err(|_| Error::internal("the thread in the network of the box ended early"))?
        .map_err(Error::from)
}

fn be_an_end() -> io::Result<()> {
    // Addresses that nobody asked for would be answered by the host's kernel.
    let _without_v6 = fs::write("/proc/sys/net/ipv6/conf/default/addr_gen_mode", "1");
    let _without_v6 = fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "0");
    let _without_v6 = fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "0");
    let _without_v6 = fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "0");
    // New namespaces may inherit what the host does.
    fs::write("/proc/sys/net/ipv4/ip_forward", "0")
}
