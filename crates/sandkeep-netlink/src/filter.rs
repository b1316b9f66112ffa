//! What may arrive at the host's end of a cable: frames from the card and the addresses of its
//! sandbox, and nothing that makes anything else known. Written for nf_tables:
//!
//! ```text
//! table netdev sandkeep-cable {
//!   chain arrives { type filter hook ingress device up0 priority -500; policy drop
//!     ether saddr BOX_MAC  ip  saddr BOX_V4  accept
//!     ether saddr BOX_MAC  arp from BOX_MAC and BOX_V4, for HOST_V4  accept
//!     ether saddr BOX_MAC  ip6 saddr BOX_V6  l4proto != icmpv6  accept
//!     ether saddr BOX_MAC  ip6 saddr BOX_V6  icmpv6 errors, echo, neighbours  accept
//!     ether saddr BOX_MAC  ip6 saddr BOX_LINK_LOCAL  icmpv6 neighbours  accept
//!   }
//! }
//! ```
//!
//! The neighbour tables of Linux are bounded for all network namespaces together. Without this a
//! guest makes an entry with each frame from a new address, until no namespace finds a neighbour
//! any more, the host its gateway included. Routers, redirects, multicast groups, tagged frames
//! and everything that is neither IP nor ARP have no meaning on this cable.

use crate::{
    BOX_LINK_LOCAL, BOX_MAC, BOX_V4, BOX_V6, HOST_END, HOST_V4, Messages,
    nft::{
        self, Chain, HOOK_INGRESS, Table,
        expressions::{self as e, Family},
    },
};
use std::io;

const TABLE: Table = Table::netdev("sandkeep-cable");
const CHAIN: &str = "arrives";
const PRIORITY: i32 = -500;

const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;
/// Ethernet, IPv4, and the lengths of their addresses.
const ARP_FOR_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];

/// Types of ICMPv6 that mean something here: errors, echo, and neighbours finding each other.
const ERRORS: (u8, u8) = (1, 4);
const ECHO: (u8, u8) = (128, 129);
const NEIGHBOURS: (u8, u8) = (135, 136);

/// Guards the host's end of the cable in the namespace of this thread, from the first frame on:
/// for a device that was just made.
pub fn guard() -> io::Result<()> {
    let all = nft::transaction(|m| {
        TABLE.make(m);
        rules(m);
    });
    all.send(libc::NETLINK_NETFILTER)
}

/// The same for a cable that may be guarded already, by this server or by one before it.
pub fn guard_again() -> io::Result<()> {
    let all = nft::transaction(|m| {
        TABLE.make_anew(m);
        rules(m);
    });
    all.send(libc::NETLINK_NETFILTER)
}

fn rules(m: &mut Messages) {
    let chain = Chain {
        name: CHAIN,
        kind: "filter",
        hook: HOOK_INGRESS,
        priority: PRIORITY,
        policy: nft::DROP,
        device: Some(HOST_END),
    };
    TABLE.chain(m, chain);
    accept(m, |m| {
        e::frame_from(m, BOX_MAC, IPV4);
        e::source_is(m, Family::V4, &BOX_V4.octets());
    });
    accept(m, |m| {
        e::frame_from(m, BOX_MAC, ARP);
        e::packet_has(m, 0, &ARP_FOR_IPV4);
        let sender = [&BOX_MAC[..], &BOX_V4.octets()].concat();
        e::packet_has(m, 8, &sender);
        e::packet_has(m, 24, &HOST_V4.octets());
    });
    let own = BOX_V6.octets();
    accept(m, |m| {
        e::frame_from(m, BOX_MAC, IPV6);
        e::source_is(m, Family::V6, &own);
        e::is_not_icmpv6(m);
    });
    let link = BOX_LINK_LOCAL.octets();
    for (address, types) in [
        (&own, ERRORS),
        (&own, ECHO),
        (&own, NEIGHBOURS),
        (&link, NEIGHBOURS),
    ] {
        accept(m, |m| {
            e::frame_from(m, BOX_MAC, IPV6);
            e::source_is(m, Family::V6, address);
            e::is_icmpv6(m);
            e::icmp_type_within(m, types);
        });
    }
}

fn accept(m: &mut Messages, matches: impl FnOnce(&mut Messages)) {
    TABLE.rule(m, CHAIN, |m| {
        matches(m);
        e::accept(m);
    });
}
