//! The expressions rules are made of, as nf_tables wants them: each fills registers or ends the
//! rule when something does not fit.

use super::{ACCEPT, DROP};
use crate::Messages;

const VERDICT_REGISTER: u32 = 0;
const REGISTER: u32 = 1;
const META_DEVICE: u32 = 6;
const META_FAMILY: u32 = 15;
const META_PROTOCOL: u32 = 16;
const LINK_HEADER: u32 = 0;
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
const DESTINATION_PORT: u32 = 2;
const TCP_FLAGS: u32 = 13;
const EQUAL: u32 = 0;
const NOT_EQUAL: u32 = 1;
const NOT_MORE: u32 = 3;
const NOT_LESS: u32 = 5;
const REJECT_RESET: u32 = 1;
const REJECT_ICMPX: u32 = 2;
const CONNTRACK_STATUS: u32 = 2;
const DESTINATION_TRANSLATED: u32 = 1 << 5;

pub const ADMIN_PROHIBITED: u8 = 3;
pub const PORT_UNREACHABLE: u8 = 1;

/// One of the two families of addresses, as nf_tables knows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    const fn number(self) -> u8 {
        match self {
            Self::V4 => 2,
            Self::V6 => 10,
        }
    }

    /// Where the destination stands in its header.
    const fn destination(self) -> u32 {
        match self {
            Self::V4 => 16,
            Self::V6 => 24,
        }
    }

    /// And where the source does.
    const fn source(self) -> u32 {
        match self {
            Self::V4 => 12,
            Self::V6 => 8,
        }
    }

    /// Bytes of an address.
    pub const fn size(self) -> usize {
        match self {
            Self::V4 => 4,
            Self::V6 => 16,
        }
    }
}

fn expression(messages: &mut Messages, name: &str, fill: impl FnOnce(&mut Messages)) {
    messages.nested(1, |m| {
        m.text(1, name);
        m.nested(2, fill);
    });
}

fn compare(messages: &mut Messages, how: u32, value: &[u8]) {
    expression(messages, "cmp", |m| {
        m.number(1, REGISTER);
        m.number(2, how);
        m.nested(3, |m| m.attribute(1, value));
    });
}

fn mask(messages: &mut Messages, mask: &[u8]) {
    expression(messages, "bitwise", |m| {
        m.number(1, REGISTER);
        m.number(2, REGISTER);
        m.number(3, length(mask.len()));
        m.nested(4, |m| m.attribute(1, mask));
        m.nested(5, |m| m.attribute(1, &vec![0; mask.len()]));
    });
}

fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("at most 16 bytes")
}

fn meta(messages: &mut Messages, key: u32) {
    expression(messages, "meta", |m| {
        m.number(1, REGISTER);
        m.number(2, key);
    });
}

fn payload(messages: &mut Messages, base: u32, offset: u32, bytes: usize) {
    expression(messages, "payload", |m| {
        m.number(1, REGISTER);
        m.number(2, base);
        m.number(3, offset);
        m.number(4, length(bytes));
    });
}

pub fn family_is(messages: &mut Messages, family: Family) {
    meta(messages, META_FAMILY);
    compare(messages, EQUAL, &[family.number()]);
}

/// The frame is from this card and of this type. That is read from the frame itself: one with a
/// tag has the type of the tag there.
pub fn frame_from(messages: &mut Messages, card: [u8; 6], kind: u16) {
    const SOURCE: u32 = 6;
    let head = [&card[..], &kind.to_be_bytes()].concat();
    payload(messages, LINK_HEADER, SOURCE, head.len());
    compare(messages, EQUAL, &head);
}

/// These bytes stand at this place behind the head of the frame.
pub fn packet_has(messages: &mut Messages, at: u32, bytes: &[u8]) {
    payload(messages, NETWORK_HEADER, at, bytes.len());
    compare(messages, EQUAL, bytes);
}

/// The source, where the family of the packet is known.
pub fn source_is(messages: &mut Messages, family: Family, address: &[u8]) {
    packet_has(messages, family.source(), address);
}

/// It came by this device.
pub fn came_by(messages: &mut Messages, device: &str) {
    let mut name = [0_u8; 16];
    for (place, byte) in name.iter_mut().zip(device.bytes()) {
        *place = byte;
    }
    meta(messages, META_DEVICE);
    compare(messages, EQUAL, &name);
}

pub fn is_tcp(messages: &mut Messages) {
    protocol(messages, EQUAL, libc::IPPROTO_TCP);
}

pub fn is_udp(messages: &mut Messages) {
    protocol(messages, EQUAL, libc::IPPROTO_UDP);
}

/// Also behind other headers.
pub fn is_icmpv6(messages: &mut Messages) {
    protocol(messages, EQUAL, libc::IPPROTO_ICMPV6);
}

pub fn is_not_icmpv6(messages: &mut Messages) {
    protocol(messages, NOT_EQUAL, libc::IPPROTO_ICMPV6);
}

fn protocol(messages: &mut Messages, how: u32, protocol: i32) {
    meta(messages, META_PROTOCOL);
    // The kernel compares one byte; these are numbers below 256.
    compare(messages, how, &protocol.to_le_bytes()[..1]);
}

/// The type of an ICMP message, from one to another.
pub fn icmp_type_within(messages: &mut Messages, (low, high): (u8, u8)) {
    payload(messages, TRANSPORT_HEADER, 0, 1);
    compare(messages, NOT_LESS, &[low]);
    compare(messages, NOT_MORE, &[high]);
}

/// The first packet of a connection.
pub fn is_syn(messages: &mut Messages) {
    const SYN_AND_ACK: u8 = 0x12;
    const SYN: u8 = 0x02;
    payload(messages, TRANSPORT_HEADER, TCP_FLAGS, 1);
    mask(messages, &[SYN_AND_ACK]);
    compare(messages, EQUAL, &[SYN]);
}

pub fn source_port_is(messages: &mut Messages, port: u16) {
    payload(messages, TRANSPORT_HEADER, 0, 2);
    compare(messages, EQUAL, &port.to_be_bytes());
}

/// From one port to another; says nothing where every port is meant.
pub fn port_within(messages: &mut Messages, (low, high): (u16, u16)) {
    if (low, high) == (0, u16::MAX) {
        return;
    }
    payload(messages, TRANSPORT_HEADER, DESTINATION_PORT, 2);
    if low == high {
        compare(messages, EQUAL, &low.to_be_bytes());
    } else {
        compare(messages, NOT_LESS, &low.to_be_bytes());
        compare(messages, NOT_MORE, &high.to_be_bytes());
    }
}

/// The source begins with these bytes.
pub fn source_starts(messages: &mut Messages, family: Family, start: &[u8]) {
    family_is(messages, family);
    source_is(messages, family, start);
}

/// The destination begins with these bytes.
pub fn destination_starts(messages: &mut Messages, family: Family, start: &[u8]) {
    family_is(messages, family);
    packet_has(messages, family.destination(), start);
}

/// The destination is in a network of so many leading bits.
pub fn destination_within(messages: &mut Messages, family: Family, network: &[u8], bits: u8) {
    family_is(messages, family);
    if bits == 0 {
        return;
    }
    payload(
        messages,
        NETWORK_HEADER,
        family.destination(),
        network.len(),
    );
    if usize::from(bits) < network.len() * 8 {
        let mut masked = vec![0_u8; network.len()];
        for (place, byte) in masked.iter_mut().enumerate() {
            let left = usize::from(bits).saturating_sub(place * 8).min(8);
            *byte = u8::try_from(0xff00_u16 >> left & 0xff).expect("it is masked to one byte");
        }
        mask(messages, &masked);
    }
    compare(messages, EQUAL, network);
}

fn load_destination(messages: &mut Messages, family: Family) {
    payload(
        messages,
        NETWORK_HEADER,
        family.destination(),
        family.size(),
    );
}

/// The destination is in a set.
pub fn destination_in(messages: &mut Messages, family: Family, set: &str) {
    family_is(messages, family);
    load_destination(messages, family);
    expression(messages, "lookup", |m| {
        m.text(1, set);
        m.number(2, REGISTER);
    });
}

/// The destination is in a map, and its value there has this bit.
pub fn destination_marked(messages: &mut Messages, family: Family, map: &str, bit: u32) {
    family_is(messages, family);
    load_destination(messages, family);
    expression(messages, "lookup", |m| {
        m.text(1, map);
        m.number(2, REGISTER);
        m.number(3, REGISTER);
    });
    mask(messages, &bit.to_be_bytes());
    compare(messages, NOT_EQUAL, &[0; 4]);
}

/// The connection was turned to a listener of ours.
pub fn was_diverted(messages: &mut Messages) {
    expression(messages, "ct", |m| {
        m.number(1, REGISTER);
        m.number(2, CONNTRACK_STATUS);
    });
    mask(messages, &DESTINATION_TRANSLATED.to_ne_bytes());
    compare(messages, NOT_EQUAL, &[0; 4]);
}

/// The kernel keeps no note of the flow.
pub fn do_not_track(messages: &mut Messages) {
    expression(messages, "notrack", |_| ());
}

/// There are more of these than so many in a second, and so many at once.
pub fn more_than(messages: &mut Messages, per_second: u64, at_once: u32) {
    const PACKETS: u32 = 0;
    const OVER: u32 = 1;
    expression(messages, "limit", |m| {
        m.attribute(1, &per_second.to_be_bytes());
        m.attribute(2, &1_u64.to_be_bytes());
        m.number(3, at_once);
        m.number(4, PACKETS);
        m.number(5, OVER);
    });
}

/// Tells whoever listens to this group about the packet.
pub fn log_to(messages: &mut Messages, group: u16, bytes: u32) {
    expression(messages, "log", |m| {
        m.attribute(1, &group.to_be_bytes());
        m.number(3, bytes);
    });
}

pub fn accept(messages: &mut Messages) {
    verdict(messages, ACCEPT);
}

pub fn drop(messages: &mut Messages) {
    verdict(messages, DROP);
}

fn verdict(messages: &mut Messages, verdict: u32) {
    expression(messages, "immediate", |m| {
        m.number(1, VERDICT_REGISTER);
        m.nested(2, |m| m.nested(2, |m| m.number(1, verdict)));
    });
}

pub fn redirect(messages: &mut Messages, port: u16) {
    expression(messages, "immediate", |m| {
        m.number(1, REGISTER);
        m.nested(2, |m| m.attribute(1, &port.to_be_bytes()));
    });
    expression(messages, "redir", |m| m.number(1, REGISTER));
}

pub fn reject(messages: &mut Messages, why: u8) {
    expression(messages, "reject", |m| {
        m.number(1, REJECT_ICMPX);
        m.attribute(2, &[why]);
    });
}

/// As if nobody listened there.
pub fn reset(messages: &mut Messages) {
    expression(messages, "reject", |m| m.number(1, REJECT_RESET));
}
