//! The network of a box: a namespace of the host's with one end of a cable in it.
//!
//! The other end is the network card of the machine: QEMU holds it. What the machine sends
//! arrives at the host's end and is answered by our listeners, or not at all. Nothing else is
//! in the namespace, so there is no way out of it. The addresses are the same in every box: a
//! copy needs no new ones.

use rustix::fs::{Mode, OFlags};
use sandkeep_host::{
    failure::{Doing as _, Failure},
    netns,
};
use sandkeep_model::Result;
use sandkeep_netlink as cable;
use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
};

const LO: u32 = 1;

/// A fresh namespace and QEMU's end of the cable.
pub async fn make() -> Result<(OwnedFd, OwnedFd)> {
    netns::make(lay_cable).await
}

fn lay_cable() -> std::result::Result<OwnedFd, Failure> {
    let card = open_tap().doing("making the network card of the box")?;
    let index = cable::index_of(cable::HOST_END).doing("finding the network card of the box")?;
    cable::guard().doing("guarding the cable of the sandbox")?;
    cable::set_mac(index, cable::HOST_MAC)
        .and_then(|()| cable::configure(LO, index, &cable::HOST_SIDE))
        .doing("switching the network of the box on")?;
    Ok(card)
}

/// It is gone with the last descriptor of it.
fn open_tap() -> io::Result<OwnedFd> {
    // _IOW('T', 202, int)
    const SET_INTERFACE: libc::Ioctl = 0x4004_54ca;
    let tap = rustix::fs::open(
        c"/dev/net/tun",
        OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    )?;
    // SAFETY: plain data for which zeroes are a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in request.ifr_name.iter_mut().zip(cable::HOST_END.bytes()) {
        *place = byte.cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = i16::try_from(flags).map_err(io::Error::other)?;
    // SAFETY: the kernel reads and writes one `ifreq`, which lives until the call returns.
    let made = unsafe { libc::ioctl(tap.as_raw_fd(), SET_INTERFACE, &raw mut request) };
    if made != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(tap)
}
