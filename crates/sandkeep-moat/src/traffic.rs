//! What a box moved, in numbers.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use tokio::sync::Notify;

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
    /// What it was before this server, or this attachment.
    before: Traffic,
    changed: Notify,
}

impl Counters {
    pub fn after(before: Traffic) -> Self {
        Self {
            before,
            ..Self::default()
        }
    }

    fn add(&self, counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
        self.changed.notify_one();
    }

    /// Until something was counted since this returned last.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    pub fn sent(&self, count: u64) {
        self.add(&self.sent, count);
    }

    pub fn received(&self, count: u64) {
        self.add(&self.received, count);
    }

    pub fn connection(&self) {
        self.add(&self.connections, 1);
    }

    pub fn denied_unseen(&self, count: u64) {
        self.add(&self.denied, count);
    }

    pub fn denied(&self) {
        self.add(&self.denied, 1);
    }

    pub fn dns_query(&self) {
        self.add(&self.dns_queries, 1);
    }

    pub fn dns_blocked(&self) {
        self.add(&self.dns_blocked, 1);
    }

    pub fn read(&self, open: u32) -> Traffic {
        let of = |counter: &AtomicU64, before: u64| {
            counter.load(Ordering::Relaxed).saturating_add(before)
        };
        let before = &self.before;
        Traffic {
            bytes_sent: of(&self.sent, before.bytes_sent),
            bytes_received: of(&self.received, before.bytes_received),
            connections: of(&self.connections, before.connections),
            open_connections: open.into(),
            denied: of(&self.denied, before.denied),
            dns_queries: of(&self.dns_queries, before.dns_queries),
            dns_blocked: of(&self.dns_blocked, before.dns_blocked),
        }
    }
}
