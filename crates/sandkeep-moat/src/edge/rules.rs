//! The packet rules of a box, written for nf_tables:
//!
//! ```text
//! table inet sandkeep {
//!   chain divert { type nat hook output priority -100
//!     <own addresses> accept          # programs of a box talk to each other
//!     meta l4proto tcp redirect to :PORT
//!     udp dport 53 redirect to :PORT
//!   }
//!   chain close { type filter hook output priority 0
//!     <own addresses> accept          # what was redirected goes to loopback now
//!     reject with icmpx admin-prohibited
//!   }
//! }
//! ```

use std::io;

use super::{
    addresses::{BOX_V4, BOX_V6},
    netlink::{ACK, APPEND, CREATE, EXCLUSIVE, Messages},
    untracked,
};

const TABLE: &str = "sandkeep";
pub(super) const DIVERT: &str = "divert";
pub(super) const CLOSE: &str = "close";

const FAMILY_INET: u8 = 1;
pub(super) const FAMILY_V4: u8 = 2;
pub(super) const FAMILY_V6: u8 = 10;
const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
pub(super) const NEW_TABLE: u16 = SUBSYSTEM << 8;
pub(super) const DELETE_TABLE: u16 = SUBSYSTEM << 8 | 2;
const NEW_CHAIN: u16 = SUBSYSTEM << 8 | 3;
const NEW_RULE: u16 = SUBSYSTEM << 8 | 6;

const HOOK_OUTPUT: u32 = 3;
const VERDICT_REGISTER: u32 = 0;
const REGISTER: u32 = 1;
const ACCEPT: u32 = 1;
const META_FAMILY: u32 = 15;
const META_PROTOCOL: u32 = 16;
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
const REJECT_ICMPX: u32 = 2;
const ADMIN_PROHIBITED: u8 = 3;
pub(super) const PORT_UNREACHABLE: u8 = 1;

/// Writes the rules into the namespace of this thread, in the place of older ones that a server
/// before this one may have left. All of it is one transaction: there is no moment without rules.
pub fn install(port: u16) -> io::Result<()> {
    batch(port).send(libc::NETLINK_NETFILTER)
}

fn batch(port: u16) -> Messages {
    let mut messages = Messages::default();
    begin(&mut messages);
    // Made if it is not there, so that deleting it can not fail: a transaction that is broken off
    // costs the kernel tens of milliseconds.
    table(&mut messages, NEW_TABLE, CREATE);
    table(&mut messages, DELETE_TABLE, 0);
    table(&mut messages, NEW_TABLE, CREATE | EXCLUSIVE);
    chain(&mut messages, DIVERT, "nat", -100);
    chain(&mut messages, CLOSE, "filter", 0);
    for name in [DIVERT, CLOSE] {
        own_addresses(&mut messages, name);
    }
    divert_to(&mut messages, port);
    reject_rest(&mut messages, ADMIN_PROHIBITED);
    untracked::add(&mut messages, untracked::Place::Here(port));
    end(&mut messages);
    messages
}

const BOUNDARY: [u8; 4] = [0, 0, 0, SUBSYSTEM as u8];

pub(super) fn begin(messages: &mut Messages) {
    messages.begin(BATCH_BEGIN, 0, &BOUNDARY);
}

pub(super) fn end(messages: &mut Messages) {
    messages.begin(BATCH_END, 0, &BOUNDARY);
}

/// TCP and DNS go to our listeners.
pub(super) fn divert_to(messages: &mut Messages, port: u16) {
    rule(messages, DIVERT, |m| {
        meta_is(m, META_PROTOCOL, libc::IPPROTO_TCP as u8);
        redirect(m, port);
    });
    rule(messages, DIVERT, |m| {
        meta_is(m, META_PROTOCOL, libc::IPPROTO_UDP as u8);
        payload_is(m, TRANSPORT_HEADER, 2, &53_u16.to_be_bytes());
        redirect(m, port);
    });
}

pub(super) fn reject_rest(messages: &mut Messages, why: u8) {
    rule(messages, CLOSE, |m| reject(m, why));
}

/// Lets TCP through that comes from a port.
pub(super) fn accept_from_port(messages: &mut Messages, chain: &str, port: u16) {
    rule(messages, chain, |m| {
        meta_is(m, META_PROTOCOL, libc::IPPROTO_TCP as u8);
        payload_is(m, TRANSPORT_HEADER, 0, &port.to_be_bytes());
        accept(m);
    });
}

/// Lets through what goes to an address that begins so.
pub(super) fn accept_to(messages: &mut Messages, chain: &str, family: u8, at: u32, start: &[u8]) {
    rule(messages, chain, |m| {
        meta_is(m, META_FAMILY, family);
        payload_is(m, NETWORK_HEADER, at, start);
        accept(m);
    });
}

const FIXED: [u8; 4] = [FAMILY_INET, 0, 0, 0];

pub(super) fn table(messages: &mut Messages, kind: u16, flags: u16) {
    messages.begin(kind, flags | ACK, &FIXED);
    messages.text(1, TABLE);
}

fn chain(messages: &mut Messages, name: &str, kind: &str, priority: i32) {
    chain_at(messages, name, kind, HOOK_OUTPUT, priority);
}

pub(super) fn chain_at(messages: &mut Messages, name: &str, kind: &str, hook: u32, priority: i32) {
    messages.begin(NEW_CHAIN, CREATE | EXCLUSIVE, &FIXED);
    messages.text(1, TABLE);
    messages.text(3, name);
    messages.nested(4, |m| {
        m.number(1, hook);
        m.attribute(2, &priority.to_be_bytes());
    });
    messages.number(5, ACCEPT);
    messages.text(7, kind);
}

fn rule(messages: &mut Messages, chain: &str, expressions: impl FnOnce(&mut Messages)) {
    messages.begin(NEW_RULE, CREATE | APPEND, &FIXED);
    messages.text(1, TABLE);
    messages.text(2, chain);
    messages.nested(4, expressions);
}

pub(super) const V4_DESTINATION: u32 = 16;
pub(super) const V6_DESTINATION: u32 = 24;

fn own_addresses(messages: &mut Messages, chain: &str) {
    let loopback_v6 = std::net::Ipv6Addr::LOCALHOST.octets();
    let (own_v4, own_v6) = (BOX_V4.octets(), BOX_V6.octets());
    for (family, at, start) in [
        // 127.0.0.0/8 by its first byte.
        (FAMILY_V4, V4_DESTINATION, &[127_u8][..]),
        (FAMILY_V4, V4_DESTINATION, &own_v4[..]),
        (FAMILY_V6, V6_DESTINATION, &loopback_v6[..]),
        (FAMILY_V6, V6_DESTINATION, &own_v6[..]),
    ] {
        accept_to(messages, chain, family, at, start);
    }
}

fn expression(messages: &mut Messages, name: &str, fill: impl FnOnce(&mut Messages)) {
    messages.nested(1, |m| {
        m.text(1, name);
        m.nested(2, fill);
    });
}

fn equals(messages: &mut Messages, value: &[u8]) {
    expression(messages, "cmp", |m| {
        m.number(1, REGISTER);
        m.number(2, 0);
        m.nested(3, |m| m.attribute(1, value));
    });
}

fn meta_is(messages: &mut Messages, key: u32, value: u8) {
    expression(messages, "meta", |m| {
        m.number(1, REGISTER);
        m.number(2, key);
    });
    equals(messages, &[value]);
}

fn payload_is(messages: &mut Messages, base: u32, offset: u32, value: &[u8]) {
    expression(messages, "payload", |m| {
        m.number(1, REGISTER);
        m.number(2, base);
        m.number(3, offset);
        m.number(4, u32::try_from(value.len()).expect("at most 16 bytes"));
    });
    equals(messages, value);
}

fn accept(messages: &mut Messages) {
    expression(messages, "immediate", |m| {
        m.number(1, VERDICT_REGISTER);
        m.nested(2, |m| m.nested(2, |m| m.number(1, ACCEPT)));
    });
}

fn redirect(messages: &mut Messages, port: u16) {
    expression(messages, "immediate", |m| {
        m.number(1, REGISTER);
        m.nested(2, |m| m.attribute(1, &port.to_be_bytes()));
    });
    expression(messages, "redir", |m| m.number(1, REGISTER));
}

fn reject(messages: &mut Messages, why: u8) {
    expression(messages, "reject", |m| {
        m.number(1, REJECT_ICMPX);
        m.attribute(2, &[why]);
    });
}
