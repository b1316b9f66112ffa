//! What the kernel does not have to remember of the packets of a sandbox.
//!
//! Connection tracking keeps a note of every flow in memory that no cgroup counts. Programs of a
//! sandbox talk to each other without it, and what is diverted to us may begin only so many flows
//! in a second, so that the notes of one sandbox stay few. A table of its own, before tracking:
//!
//! ```text
//! table inet sandkeep-untracked {
//!   chain raw { type filter hook output priority -300
//!     saddr <loopback> sport PORT accept       # our answers must find back what was diverted
//!     udp dport PORT limit over RATE drop      # to us without being diverted
//!     daddr <own addresses> notrack accept
//!     tcp syn limit over RATE drop             # the kernel asks again a little later
//!     udp limit over RATE drop
//!   }
//! }
//! ```
//!
//! At the end of a cable (sandboxes with a network stack of their own) the last two are all.

use super::{
    addresses::{BOX_V4, BOX_V6},
    netlink::{ACK, APPEND, CREATE, EXCLUSIVE, Messages},
};

const TABLE: &str = "sandkeep-untracked";
const CHAIN: &str = "raw";
/// Flows that may begin in a second, for long, and at once.
const PER_SECOND: u64 = 300;
const AT_ONCE: u32 = 1000;
/// Just before connection tracking looks at packets, which is at -200.
const PRIORITY: i32 = -300;

const FAMILY_INET: u8 = 1;
const V4: u8 = 2;
const V6: u8 = 10;
const SUBSYSTEM: u16 = 10;
const NEW_TABLE: u16 = SUBSYSTEM << 8;
const DELETE_TABLE: u16 = SUBSYSTEM << 8 | 2;
const NEW_CHAIN: u16 = SUBSYSTEM << 8 | 3;
const NEW_RULE: u16 = SUBSYSTEM << 8 | 6;
const HOOK_PREROUTING: u32 = 0;
const HOOK_OUTPUT: u32 = 3;
const VERDICT_REGISTER: u32 = 0;
const REGISTER: u32 = 1;
const DROP: u32 = 0;
const ACCEPT: u32 = 1;
const META_FAMILY: u32 = 15;
const META_PROTOCOL: u32 = 16;
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
const TCP_FLAGS: u32 = 13;
const SYN: u8 = 2;
const SYN_ACK: u8 = 0x12;
const LIMIT_OVER: u32 = 1;

/// Where the sandbox's packets come by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Its programs are in this namespace; our listeners have this port.
    Here(u16),
    /// It is at the other end of a cable.
    Cable,
}

/// Adds the table to a transaction of others, in the place of an older one. A transaction of its
/// own would take as long as the other one.
pub fn add(messages: &mut Messages, place: Place) {
    // Made if it is not there, so that deleting it can not fail.
    table(messages, NEW_TABLE, CREATE);
    table(messages, DELETE_TABLE, 0);
    table(messages, NEW_TABLE, CREATE | EXCLUSIVE);
    match place {
        Place::Here(port) => {
            chain(messages, HOOK_OUTPUT);
            between_programs(messages, port);
        }
        Place::Cable => chain(messages, HOOK_PREROUTING),
    }
    rule(messages, |m| {
        meta_is(m, META_PROTOCOL, libc::IPPROTO_TCP as u8);
        load(m, TRANSPORT_HEADER, TCP_FLAGS, 1);
        mask(m, SYN_ACK);
        equals(m, &[SYN]);
        drop_over_the_rate(m);
    });
    rule(messages, |m| {
        meta_is(m, META_PROTOCOL, libc::IPPROTO_UDP as u8);
        drop_over_the_rate(m);
    });
}

fn between_programs(messages: &mut Messages, port: u16) {
    let loopback_v4 = std::net::Ipv4Addr::LOCALHOST.octets();
    let loopback_v6 = std::net::Ipv6Addr::LOCALHOST.octets();
    for (family, source, own) in [(V4, 12, &loopback_v4[..]), (V6, 8, &loopback_v6[..])] {
        rule(messages, |m| {
            begins_with(m, family, source, own);
            load(m, TRANSPORT_HEADER, 0, 2);
            equals(m, &port.to_be_bytes());
            verdict(m, ACCEPT);
        });
    }
    rule(messages, |m| {
        meta_is(m, META_PROTOCOL, libc::IPPROTO_UDP as u8);
        load(m, TRANSPORT_HEADER, 2, 2);
        equals(m, &port.to_be_bytes());
        drop_over_the_rate(m);
    });
    for (family, destination, own) in [
        // 127.0.0.0/8 by its first byte.
        (V4, 16, &[127_u8][..]),
        (V4, 16, &BOX_V4.octets()[..]),
        (V6, 24, &loopback_v6[..]),
        (V6, 24, &BOX_V6.octets()[..]),
    ] {
        rule(messages, |m| {
            begins_with(m, family, destination, own);
            expression(m, "notrack", |_| ());
            verdict(m, ACCEPT);
        });
    }
}

const FIXED: [u8; 4] = [FAMILY_INET, 0, 0, 0];

fn table(messages: &mut Messages, kind: u16, flags: u16) {
    messages.begin(kind, flags | ACK, &FIXED);
    messages.text(1, TABLE);
}

fn chain(messages: &mut Messages, hook: u32) {
    messages.begin(NEW_CHAIN, CREATE | EXCLUSIVE | ACK, &FIXED);
    messages.text(1, TABLE);
    messages.text(3, CHAIN);
    messages.nested(4, |m| {
        m.number(1, hook);
        m.attribute(2, &PRIORITY.to_be_bytes());
    });
    messages.number(5, ACCEPT);
    messages.text(7, "filter");
}

fn rule(messages: &mut Messages, expressions: impl FnOnce(&mut Messages)) {
    messages.begin(NEW_RULE, CREATE | APPEND | ACK, &FIXED);
    messages.text(1, TABLE);
    messages.text(2, CHAIN);
    messages.nested(4, expressions);
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

fn load(messages: &mut Messages, base: u32, offset: u32, length: u32) {
    expression(messages, "payload", |m| {
        m.number(1, REGISTER);
        m.number(2, base);
        m.number(3, offset);
        m.number(4, length);
    });
}

fn begins_with(messages: &mut Messages, family: u8, at: u32, start: &[u8]) {
    meta_is(messages, META_FAMILY, family);
    load(
        messages,
        NETWORK_HEADER,
        at,
        u32::try_from(start.len()).expect("at most 16 bytes"),
    );
    equals(messages, start);
}

fn mask(messages: &mut Messages, bits: u8) {
    expression(messages, "bitwise", |m| {
        m.number(1, REGISTER);
        m.number(2, REGISTER);
        m.number(3, 1);
        m.nested(4, |m| m.attribute(1, &[bits]));
        m.nested(5, |m| m.attribute(1, &[0]));
    });
}

fn drop_over_the_rate(messages: &mut Messages) {
    expression(messages, "limit", |m| {
        m.attribute(1, &PER_SECOND.to_be_bytes());
        m.attribute(2, &1_u64.to_be_bytes());
        m.number(3, AT_ONCE);
        m.number(4, 0);
        m.number(5, LIMIT_OVER);
    });
    verdict(messages, DROP);
}

fn verdict(messages: &mut Messages, code: u32) {
    expression(messages, "immediate", |m| {
        m.number(1, VERDICT_REGISTER);
        m.nested(2, |m| m.nested(2, |m| m.number(1, code)));
    });
}
