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
    netlink::{
        Messages,
        nft::{
            self, Chain, HOOK_OUTPUT, HOOK_PREROUTING, Table,
            expressions::{self as e, Family},
        },
    },
};

const TABLE: Table = Table::inet("sandkeep-untracked");
const CHAIN: &str = "raw";
/// Flows that may begin in a second, for long, and at once.
const PER_SECOND: u64 = 300;
const AT_ONCE: u32 = 1000;
/// Just before connection tracking looks at packets, which is at -200.
const PRIORITY: i32 = -300;

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
    TABLE.make_anew(messages);
    match place {
        Place::Here(port) => {
            chain(messages, HOOK_OUTPUT);
            between_programs(messages, port);
        }
        Place::Cable => chain(messages, HOOK_PREROUTING),
    }
    rule(messages, |m| {
        e::is_tcp(m);
        e::is_syn(m);
        drop_over_the_rate(m);
    });
    rule(messages, |m| {
        e::is_udp(m);
        drop_over_the_rate(m);
    });
}

fn between_programs(messages: &mut Messages, port: u16) {
    let loopback_v4 = std::net::Ipv4Addr::LOCALHOST.octets();
    let loopback_v6 = std::net::Ipv6Addr::LOCALHOST.octets();
    for (family, own) in [
        (Family::V4, &loopback_v4[..]),
        (Family::V6, &loopback_v6[..]),
    ] {
        rule(messages, |m| {
            e::source_starts(m, family, own);
            e::source_port_is(m, port);
            e::accept(m);
        });
    }
    rule(messages, |m| {
        e::is_udp(m);
        e::port_within(m, (port, port));
        drop_over_the_rate(m);
    });
    for (family, own) in [
        // 127.0.0.0/8 by its first byte.
        (Family::V4, &[127_u8][..]),
        (Family::V4, &BOX_V4.octets()[..]),
        (Family::V6, &loopback_v6[..]),
        (Family::V6, &BOX_V6.octets()[..]),
    ] {
        rule(messages, |m| {
            e::destination_starts(m, family, own);
            e::do_not_track(m);
            e::accept(m);
        });
    }
}

fn chain(messages: &mut Messages, hook: u32) {
    let chain = Chain {
        name: CHAIN,
        kind: "filter",
        hook,
        priority: PRIORITY,
        policy: nft::ACCEPT,
        device: None,
    };
    TABLE.chain(messages, chain);
}

fn rule(messages: &mut Messages, expressions: impl FnOnce(&mut Messages)) {
    TABLE.rule(messages, CHAIN, expressions);
}

fn drop_over_the_rate(messages: &mut Messages) {
    e::more_than(messages, PER_SECOND, AT_ONCE);
    e::drop(messages);
}
