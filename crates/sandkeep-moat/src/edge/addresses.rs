//! The addresses and routes of a box: everything is local, so nothing has a way out.

use std::{
    fs, io,
    net::{Ipv4Addr, Ipv6Addr},
};

use super::netlink::{ACK, CREATE, Messages, REPLACE};

/// The same in every box, so that a copy of a box needs no new address.
pub const BOX_V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
pub const BOX_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xa, 0, 0, 0, 0, 0, 2);
/// Where `sandkeep.internal` and the resolver of the base template are.
pub const INSIDE_V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
const NEW_ROUTE: u16 = 24;
/// The loopback device is the first of every namespace.
const LO: u32 = 1;
const ADDRESS_ATTRIBUTE: u16 = 1;
const LOCAL_ATTRIBUTE: u16 = 2;
const ROUTE_DEVICE: u16 = 4;
const ROUTE_SOURCE: u16 = 7;
/// Do not look for a duplicate: the address shall be there at once.
const NO_DAD: u8 = 2;
const SCOPE_HOST: u8 = 254;
const TABLE_LOCAL: u8 = 255;
const STATIC: u8 = 4;
const TYPE_LOCAL: u8 = 2;

/// Sets up the loopback device of the namespace this thread is in. Says whether IPv6 is there.
pub fn set_up() -> io::Result<bool> {
    let mut messages = Messages::default();
    bring_up(&mut messages);
    address(&mut messages, libc::AF_INET, &BOX_V4.octets());
    default_route(&mut messages, libc::AF_INET, &BOX_V4.octets());
    messages.send(libc::NETLINK_ROUTE)?;
    match set_up_v6() {
        Ok(()) => Ok(true),
        // Hosts that switched IPv6 off for new namespaces; ours may have it.
        Err(_) if fs::write("/proc/sys/net/ipv6/conf/lo/disable_ipv6", "0").is_ok() => {
            Ok(set_up_v6().is_ok())
        }
        Err(_) => Ok(false),
    }
}

fn set_up_v6() -> io::Result<()> {
    let mut messages = Messages::default();
    address(&mut messages, libc::AF_INET6, &BOX_V6.octets());
    default_route(&mut messages, libc::AF_INET6, &BOX_V6.octets());
    messages.send(libc::NETLINK_ROUTE)
}

fn bring_up(messages: &mut Messages) {
    let up = (libc::IFF_UP as u32).to_ne_bytes();
    let mut fixed = vec![0; 4];
    fixed.extend_from_slice(&LO.to_ne_bytes());
    fixed.extend_from_slice(&up);
    fixed.extend_from_slice(&up);
    messages.begin(NEW_LINK, ACK, &fixed);
}

fn family_of(family: i32) -> u8 {
    u8::try_from(family).expect("address families are small numbers")
}

fn address(messages: &mut Messages, family: i32, own: &[u8]) {
    let bits = u8::try_from(own.len() * 8).expect("an address has at most 128 bits");
    let mut fixed = vec![family_of(family), bits, NO_DAD, 0];
    fixed.extend_from_slice(&LO.to_ne_bytes());
    messages.begin(NEW_ADDRESS, ACK | CREATE | REPLACE, &fixed);
    messages.attribute(LOCAL_ATTRIBUTE, own);
    messages.attribute(ADDRESS_ATTRIBUTE, own);
}

/// Every address of the world is here: what no rule takes up ends in this namespace.
fn default_route(messages: &mut Messages, family: i32, source: &[u8]) {
    let mut fixed = vec![
        family_of(family),
        0,
        0,
        0,
        TABLE_LOCAL,
        STATIC,
        SCOPE_HOST,
        TYPE_LOCAL,
    ];
    fixed.extend_from_slice(&0_u32.to_ne_bytes());
    messages.begin(NEW_ROUTE, ACK | CREATE | REPLACE, &fixed);
    messages.attribute(ROUTE_DEVICE, &LO.to_ne_bytes());
    messages.attribute(ROUTE_SOURCE, source);
}
