//! What the routes of this thread's namespace say: which addresses are its own.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use crate::messages::{DUMP, Messages, NetlinkSocket, attributes};

const NEW_ROUTE: u16 = 24;
const GET_ROUTE: u16 = 26;
const DESTINATION: u16 = 1;
const TABLE_LOCAL: u8 = 255;
/// The length of the fixed part of a message about a route, and where its type stands in it.
const FIXED: usize = 12;
const TYPE_AT: usize = 7;

const UNICAST: u8 = 1;
const LOCAL: u8 = 2;
const BROADCAST: u8 = 3;
const ANYCAST: u8 = 4;
const MULTICAST: u8 = 5;

const ADDRESSES_V4: u32 = 0x10;
const ADDRESSES_V6: u32 = 0x100;

/// Where a packet to an address would go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    Elsewhere,
    /// It would be delivered on this machine, or to every machine of a network it is in.
    Ours,
    Nowhere,
}

/// Asks the kernel where it would send a packet now. Also right for addresses that no interface
/// has but that a route makes local.
pub fn route_to(address: IpAddr) -> io::Result<Found> {
    let socket = NetlinkSocket::open(libc::NETLINK_ROUTE)?;
    let mut messages = Messages::default();
    let octets = octets(address);
    let bits = u8::try_from(octets.len() * 8).expect("an address has at most 128 bits");
    let mut fixed = [0_u8; FIXED];
    (fixed[0], fixed[1]) = (family(address), bits);
    messages.begin(GET_ROUTE, 0, &fixed);
    messages.attribute(DESTINATION, &octets);
    let mut found = Found::Nowhere;
    let asked = messages.ask_on(&socket, |kind, body| {
        if kind == NEW_ROUTE {
            found = match body.get(TYPE_AT) {
                Some(&UNICAST) => Found::Elsewhere,
                Some(&(LOCAL | BROADCAST | ANYCAST | MULTICAST)) => Found::Ours,
                _ => Found::Nowhere,
            };
        }
    });
    match asked {
        Ok(()) => Ok(found),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable
            ) || error.raw_os_error() == Some(libc::EINVAL) =>
        {
            Ok(Found::Nowhere)
        }
        Err(error) => Err(error),
    }
}

/// The networks that are delivered here: every own address, broadcast and anycast ones, and
/// whatever the local table says besides. Each with the number of its leading bits.
pub fn local_networks() -> io::Result<Vec<(IpAddr, u8)>> {
    let mut networks = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let mut messages = Messages::default();
        let mut fixed = [0_u8; FIXED];
        fixed[0] = u8::try_from(family).expect("address families are small numbers");
        fixed[4] = TABLE_LOCAL;
        messages.begin(GET_ROUTE, DUMP, &fixed);
        let listed = messages.dump(libc::NETLINK_ROUTE, |kind, body| {
            if kind == NEW_ROUTE
                && let Some(network) = local_network(family, body)
            {
                networks.push(network);
            }
        });
        match listed {
            // A kernel without IPv6.
            Err(_) if family == libc::AF_INET6 => {}
            other => other?,
        }
    }
    Ok(networks)
}

fn local_network(family: i32, body: &[u8]) -> Option<(IpAddr, u8)> {
    let (fixed, rest) = body.split_at_checked(FIXED)?;
    if fixed[4] != TABLE_LOCAL || !matches!(fixed[TYPE_AT], LOCAL | BROADCAST | ANYCAST) {
        return None;
    }
    let destination = attributes(rest).find(|(kind, _)| *kind == DESTINATION);
    let address = match (family, destination.map(|(_, value)| value)) {
        (libc::AF_INET, None) => Ipv4Addr::UNSPECIFIED.into(),
        (_, None) => Ipv6Addr::UNSPECIFIED.into(),
        (libc::AF_INET, Some(value)) => IpAddr::from(<[u8; 4]>::try_from(value).ok()?),
        (_, Some(value)) => IpAddr::from(<[u8; 16]>::try_from(value).ok()?),
    };
    Some((address, fixed[1]))
}

/// A socket that hears of every address this namespace gets and loses.
pub fn address_changes() -> io::Result<NetlinkSocket> {
    NetlinkSocket::listening(libc::NETLINK_ROUTE, ADDRESSES_V4 | ADDRESSES_V6)
}

fn family(address: IpAddr) -> u8 {
    let family = match address {
        IpAddr::V4(_) => libc::AF_INET,
        IpAddr::V6(_) => libc::AF_INET6,
    };
    u8::try_from(family).expect("address families are small numbers")
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_ours_and_in_the_list() {
        let home = IpAddr::from([127, 0, 0, 1]);
        assert_eq!(route_to(home).unwrap(), Found::Ours);
        assert_eq!(route_to(IpAddr::from([127, 9, 9, 9])).unwrap(), Found::Ours);
        let networks = local_networks().unwrap();
        assert!(
            networks
                .iter()
                .any(|(address, bits)| *address == IpAddr::from([127, 0, 0, 0]) && *bits == 8),
            "{networks:?}"
        );
    }
}
