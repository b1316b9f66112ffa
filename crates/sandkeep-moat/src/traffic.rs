//! What a box moved, in numbers.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

/// The numbers at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Traffic {
    /// From the box to the outside.
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub connections: u64,
    pub open_connections: u64,
    pub denied: u64,
    pub dns_queries: u64,
    pub dns_blocked: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    sent: AtomicU64,
    received: AtomicU64,
    connections: AtomicU64,
    denied: AtomicU64,
    dns_queries: AtomicU64,
    dns_blocked: AtomicU64,
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Counters {
    pub fn sent(&self, count: u64) {
        add(&self.sent, count);
    }

    pub fn received(&self, count: u64) {
        add(&self.received, count);
    }

    pub fn connection(&self) {
        add(&self.connections, 1);
    }

    pub fn denied_unseen(&self, count: u64) {
        add(&self.denied, count);
    }

    pub fn denied(&self) {
        add(&self.denied, 1);
    }

    pub fn dns_query(&self) {
        add(&self.dns_queries, 1);
    }

    pub fn dns_blocked(&self) {
        add(&self.dns_blocked, 1);
    }

    pub fn read(&self, open: u32) -> Traffic {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            bytes_sent: of(&self.sent),
            bytes_received: of(&self.received),
            connections: of(&self.connections),
            open_connections: open.into(),
            denied: of(&self.denied),
            dns_queries: of(&self.dns_queries),
            dns_blocked: of(&self.dns_blocked),
        }
    }
}
