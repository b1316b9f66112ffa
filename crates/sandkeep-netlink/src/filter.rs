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
    ACK, APPEND, BOX_LINK_LOCAL, BOX_MAC, BOX_V4, BOX_V6, CREATE, EXCLUSIVE, HOST_END, HOST_V4,
    Messages,
};
use std::io;

const TABLE: &str = "sandkeep-cable";
const CHAIN: &str = "arrives";
const FAMILY_NETDEV: u8 = 5;
const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const NEW_TABLE: u16 = SUBSYSTEM << 8;
const DELETE_TABLE: u16 = SUBSYSTEM << 8 | 2;
const NEW_CHAIN: u16 = SUBSYSTEM << 8 | 3;
const NEW_RULE: u16 = SUBSYSTEM << 8 | 6;
const FIXED: [u8; 4] = [FAMILY_NETDEV, 0, 0, 0];
const BOUNDARY: [u8; 4] = [0, 0, 0, SUBSYSTEM as u8];

const INGRESS: u32 = 0;
const PRIORITY: i32 = -500;
const DROP: u32 = 0;
const ACCEPT: u32 = 1;
const VERDICT_REGISTER: u32 = 0;
const REGISTER: u32 = 1;
const META_PROTOCOL: u32 = 16;

const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;
const ICMPV6: u8 = 58;
/// Ethernet, IPv4, and the lengths of their addresses.
const ARP_FOR_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];

/// Types of ICMPv6 that mean something here: errors, echo, and neighbours finding each other.
const ERRORS: (u8, u8) = (1, 4);
const ECHO: (u8, u8) = (128, 129);
const NEIGHBOURS: (u8, u8) = (135, 136);

#[derive(Clone, Copy)]
enum Base {
    Link = 0,
    Network = 1,
    Transport = 2,
}

#[derive(Clone, Copy)]
enum Compare {
    Equal = 0,
    NotEqual = 1,
    AtMost = 3,
    AtLeast = 5,
}

/// Guards the host's end of the cable in the namespace of this thread, from the first frame on:
/// for a device that was just made.
pub fn guard() -> io::Result<()> {
    let mut messages = Messages::default();
    begin(&mut messages);
    rules(&mut messages);
    end(messages)
}

/// The same for a cable that may be guarded already, by this server or by one before it.
pub fn guard_again() -> io::Result<()> {
    let mut messages = Messages::default();
    begin(&mut messages);
    // Made if it is not there, so that deleting it cannot fail.
    table(&mut messages, NEW_TABLE, CREATE);
    table(&mut messages, DELETE_TABLE, 0);
    rules(&mut messages);
    end(messages)
}

fn begin(messages: &mut Messages) {
    messages.begin(BATCH_BEGIN, 0, &BOUNDARY);
}

fn end(mut messages: Messages) -> io::Result<()> {
    messages.begin(BATCH_END, 0, &BOUNDARY);
    messages.send(libc::NETLINK_NETFILTER)
}

fn table(messages: &mut Messages, kind: u16, flags: u16) {
    messages.begin(kind, flags | ACK, &FIXED);
    messages.text(1, TABLE);
}

fn rules(messages: &mut Messages) {
    table(messages, NEW_TABLE, CREATE | EXCLUSIVE);
    messages.begin(NEW_CHAIN, CREATE | EXCLUSIVE, &FIXED);
    messages.text(1, TABLE);
    messages.text(3, CHAIN);
    messages.nested(4, |m| {
        m.number(1, INGRESS);
        m.attribute(2, &PRIORITY.to_be_bytes());
        m.text(3, HOST_END);
    });
    messages.number(5, DROP);
    messages.text(7, "filter");

    accept(messages, |m| {
        from_the_sandbox(m, IPV4);
        source(m, 12, &BOX_V4.octets());
    });
    accept(messages, |m| {
        from_the_sandbox(m, ARP);
        holds(m, Base::Network, 0, &ARP_FOR_IPV4);
        let sender = [&BOX_MAC[..], &BOX_V4.octets()].concat();
        holds(m, Base::Network, 8, &sender);
        holds(m, Base::Network, 24, &HOST_V4.octets());
    });
    let own = BOX_V6.octets();
    accept(messages, |m| {
        from_the_sandbox(m, IPV6);
        source(m, 8, &own);
        protocol(m, Compare::NotEqual, ICMPV6);
    });
    let link = BOX_LINK_LOCAL.octets();
    for (address, types) in [
        (&own, ERRORS),
        (&own, ECHO),
        (&own, NEIGHBOURS),
        (&link, NEIGHBOURS),
    ] {
        accept(messages, |m| {
            from_the_sandbox(m, IPV6);
            source(m, 8, address);
            // Also behind other headers.
            protocol(m, Compare::Equal, ICMPV6);
            load(m, Base::Transport, 0, 1);
            compare(m, Compare::AtLeast, &[types.0]);
            compare(m, Compare::AtMost, &[types.1]);
        });
    }
}

fn accept(messages: &mut Messages, matches: impl FnOnce(&mut Messages)) {
    messages.begin(NEW_RULE, CREATE | APPEND, &FIXED);
    messages.text(1, TABLE);
    messages.text(2, CHAIN);
    messages.nested(4, |m| {
        matches(m);
        expression(m, "immediate", |m| {
            m.number(1, VERDICT_REGISTER);
            m.nested(2, |m| m.nested(2, |m| m.number(1, ACCEPT)));
        });
    });
}

/// The type is read from the frame itself: one with a tag has that of the tag there.
fn from_the_sandbox(messages: &mut Messages, kind: u16) {
    let head = [&BOX_MAC[..], &kind.to_be_bytes()].concat();
    holds(messages, Base::Link, 6, &head);
}

fn source(messages: &mut Messages, at: u32, address: &[u8]) {
    holds(messages, Base::Network, at, address);
}

fn protocol(messages: &mut Messages, how: Compare, protocol: u8) {
    expression(messages, "meta", |m| {
        m.number(1, REGISTER);
        m.number(2, META_PROTOCOL);
    });
    compare(messages, how, &[protocol]);
}

fn holds(messages: &mut Messages, base: Base, at: u32, value: &[u8]) {
    load(
        messages,
        base,
        at,
        u32::try_from(value.len()).expect("at most 16 bytes"),
    );
    compare(messages, Compare::Equal, value);
}

fn load(messages: &mut Messages, base: Base, at: u32, length: u32) {
    expression(messages, "payload", |m| {
        m.number(1, REGISTER);
        m.number(2, base as u32);
        m.number(3, at);
        m.number(4, length);
    });
}

fn compare(messages: &mut Messages, how: Compare, value: &[u8]) {
    expression(messages, "cmp", |m| {
        m.number(1, REGISTER);
        m.number(2, how as u32);
        m.nested(3, |m| m.attribute(1, value));
    });
}

fn expression(messages: &mut Messages, name: &str, fill: impl FnOnce(&mut Messages)) {
    messages.nested(1, |m| {
        m.text(1, name);
        m.nested(2, fill);
    });
}
