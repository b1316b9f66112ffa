//! Switching network devices on and giving them addresses.

use crate::{ACK, BOX_V4, BOX_V6, CREATE, HOST_V4, HOST_V6, Messages, REPLACE};
use std::{ffi::CString, io};

pub const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
const NEW_ROUTE: u16 = 24;
const DELETE_ROUTE: u16 = 25;
const BITS_V4: u8 = 24;
const BITS_V6: u8 = 64;

/// The addresses of one end of the cable, and whom it sends everything else to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Side {
    own_v4: [u8; 4],
    own_v6: [u8; 16],
    gateway: Option<([u8; 4], [u8; 16])>,
}

pub const BOX_SIDE: Side = Side {
    own_v4: BOX_V4.octets(),
    own_v6: BOX_V6.octets(),
    gateway: Some((HOST_V4.octets(), HOST_V6.octets())),
};

pub const HOST_SIDE: Side = Side {
    own_v4: HOST_V4.octets(),
    own_v6: HOST_V6.octets(),
    gateway: None,
};

/// The number of a device by its name.
pub fn index_of(name: &str) -> io::Result<u32> {
    let name = CString::new(name)?;
    // SAFETY: the name is a terminated string that lives until the call returns.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(io::Error::last_os_error()),
        index => Ok(index),
    }
}

/// Switches the loopback device and one end of the cable on. IPv6 is a bonus: without it in
/// the kernel there is none.
pub fn configure(loopback: u32, device: u32, side: &Side) -> io::Result<()> {
    let mut messages = Messages::default();
    up(&mut messages, loopback);
    address(&mut messages, device, &side.own_v4, BITS_V4);
    up(&mut messages, device);
    if let Some((gateway, _)) = &side.gateway {
        default_route(&mut messages, device, gateway);
    }
    messages.send(libc::NETLINK_ROUTE)?;
    let mut messages = Messages::default();
    address(&mut messages, device, &side.own_v6, BITS_V6);
    if let Some((_, gateway)) = &side.gateway {
        default_route(&mut messages, device, gateway);
    }
    let _without_v6 = messages.send(libc::NETLINK_ROUTE);
    Ok(())
}

/// Switches a device off; [`configure`] makes it what it was.
pub fn switch_off(index: u32) -> io::Result<()> {
    let mut messages = Messages::default();
    let mut fixed = device(index, 0);
    // The second half names the flags that are meant.
    fixed.truncate(12);
    fixed.extend_from_slice(&(libc::IFF_UP as u32).to_ne_bytes());
    messages.begin(NEW_LINK, ACK, &fixed);
    messages.send(libc::NETLINK_ROUTE)
}

/// As long as this lives, every address there is belongs to this machine: it can be connected to
/// and from before a cable and its addresses are there.
#[derive(Debug)]
pub struct AllHere {
    loopback: u32,
    with_v6: bool,
}

impl AllHere {
    /// IPv6 is a bonus, as in [`configure`].
    pub fn begin(loopback: u32) -> io::Result<Self> {
        let flags = CREATE | REPLACE;
        all_here(NEW_ROUTE, flags, loopback, libc::AF_INET)?;
        let with_v6 = all_here(NEW_ROUTE, flags, loopback, libc::AF_INET6).is_ok();
        Ok(Self { loopback, with_v6 })
    }

    pub fn end(self) -> io::Result<()> {
        all_here(DELETE_ROUTE, 0, self.loopback, libc::AF_INET)?;
        if self.with_v6 {
            all_here(DELETE_ROUTE, 0, self.loopback, libc::AF_INET6)?;
        }
        Ok(())
    }
}

fn all_here(kind: u16, flags: u16, loopback: u32, family: i32) -> io::Result<()> {
    let mut messages = Messages::default();
    local_route(&mut messages, kind, flags, loopback, family);
    messages.send(libc::NETLINK_ROUTE)
}

/// That everything of a family is local.
fn local_route(messages: &mut Messages, kind: u16, flags: u16, loopback: u32, family: i32) {
    const DEVICE: u16 = 4;
    const TABLE_LOCAL: u8 = 255;
    const STATIC: u8 = 4;
    const HOST: u8 = 254;
    const LOCAL: u8 = 2;
    let family = u8::try_from(family).expect("address families are small numbers");
    let mut fixed = vec![family, 0, 0, 0, TABLE_LOCAL, STATIC, HOST, LOCAL];
    fixed.extend_from_slice(&0_u32.to_ne_bytes());
    messages.begin(kind, ACK | flags, &fixed);
    messages.attribute(DEVICE, &loopback.to_ne_bytes());
}

/// The fixed part of a message about a device.
pub fn device(index: u32, flags: u32) -> Vec<u8> {
    let mut fixed = vec![0; 4];
    fixed.extend_from_slice(&index.to_ne_bytes());
    fixed.extend_from_slice(&flags.to_ne_bytes());
    fixed.extend_from_slice(&flags.to_ne_bytes());
    fixed
}

fn up(messages: &mut Messages, index: u32) {
    messages.begin(NEW_LINK, ACK, &device(index, libc::IFF_UP as u32));
}

/// Gives a device the address of its hardware, by which the other end knows it.
pub fn set_mac(index: u32, mac: [u8; 6]) -> io::Result<()> {
    const MAC: u16 = 1;
    let mut messages = Messages::default();
    messages.begin(NEW_LINK, ACK, &device(index, 0));
    messages.attribute(MAC, &mac);
    messages.send(libc::NETLINK_ROUTE)
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
