//! What is said to nf_tables: transactions, tables, chains and rules.

pub mod expressions;

use crate::{ACK, APPEND, CREATE, EXCLUSIVE, Messages};

const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const NEW_TABLE: u16 = SUBSYSTEM << 8;
const DELETE_TABLE: u16 = SUBSYSTEM << 8 | 2;
const NEW_CHAIN: u16 = SUBSYSTEM << 8 | 3;
const NEW_RULE: u16 = SUBSYSTEM << 8 | 6;
pub const NEW_SET: u16 = SUBSYSTEM << 8 | 9;
pub const NEW_ELEMENTS: u16 = SUBSYSTEM << 8 | 12;
pub const DELETE_ELEMENTS: u16 = SUBSYSTEM << 8 | 14;

const FAMILY_INET: u8 = 1;
const FAMILY_NETDEV: u8 = 5;

/// Where a chain of a network device hooks in.
pub const HOOK_INGRESS: u32 = 0;
pub const HOOK_PREROUTING: u32 = 0;
pub const HOOK_OUTPUT: u32 = 3;

pub const DROP: u32 = 0;
pub const ACCEPT: u32 = 1;

/// One transaction: all of it holds, or nothing.
pub fn transaction(fill: impl FnOnce(&mut Messages)) -> Messages {
    let mut messages = Messages::default();
    boundary(&mut messages, BATCH_BEGIN);
    fill(&mut messages);
    boundary(&mut messages, BATCH_END);
    messages
}

fn boundary(m: &mut Messages, kind: u16) {
    m.begin(kind, 0, &[0, 0, 0, SUBSYSTEM as u8]);
}

#[derive(Debug, Clone, Copy)]
pub struct Table {
    family: u8,
    name: &'static str,
}

/// A chain that hooks in somewhere.
#[derive(Debug, Clone, Copy)]
pub struct Chain<'a> {
    pub name: &'a str,
    pub kind: &'a str,
    pub hook: u32,
    pub priority: i32,
    /// For packets that no rule says anything of.
    pub policy: u32,
    /// Where it hooks in at a device.
    pub device: Option<&'a str>,
}

impl Table {
    /// For packets of both versions of IP.
    pub const fn inet(name: &'static str) -> Self {
        Self {
            family: FAMILY_INET,
            name,
        }
    }

    /// For frames of devices.
    pub const fn netdev(name: &'static str) -> Self {
        Self {
            family: FAMILY_NETDEV,
            name,
        }
    }

    /// Begins a message about something in this table.
    pub fn about(self, m: &mut Messages, kind: u16, flags: u16) {
        m.begin(kind, flags, &[self.family, 0, 0, 0]);
        m.text(1, self.name);
    }

    /// An empty table; there must be none.
    pub fn make(self, m: &mut Messages) {
        self.about(m, NEW_TABLE, CREATE | EXCLUSIVE | ACK);
    }

    /// An empty table in the place of the one that is there, if any.
    pub fn make_anew(self, m: &mut Messages) {
        // Made if it is not there, so that deleting it cannot fail: a transaction that is broken
        // off costs the kernel tens of milliseconds.
        self.about(m, NEW_TABLE, CREATE | ACK);
        self.about(m, DELETE_TABLE, ACK);
        self.make(m);
    }

    pub fn chain(self, m: &mut Messages, chain: Chain<'_>) {
        self.about(m, NEW_CHAIN, CREATE | EXCLUSIVE);
        m.text(3, chain.name);
        m.nested(4, |m| {
            m.number(1, chain.hook);
            m.attribute(2, &chain.priority.to_be_bytes());
            if let Some(device) = chain.device {
                m.text(3, device);
            }
        });
        m.number(5, chain.policy);
        m.text(7, chain.kind);
    }

    pub fn rule(self, m: &mut Messages, chain: &str, expressions: impl FnOnce(&mut Messages)) {
        self.about(m, NEW_RULE, CREATE | APPEND);
        m.text(2, chain);
        m.nested(4, expressions);
    }
}
