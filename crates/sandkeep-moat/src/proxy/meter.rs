//! Counting what passes, and what was let through.

use std::{
    net::IpAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use sandkeep_model::Timestamp;

use crate::{
    denials::Via,
    hooks::{ConnectionRecord, Phase},
    limits::{Charge, Permit},
    policy::{Host, Reason, Refusal},
    state::{Attempt, BoxState},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Out,
    In,
}

/// The bytes of one connection.
#[derive(Debug)]
pub struct Meter {
    state: Arc<BoxState>,
    sent: AtomicU64,
    received: AtomicU64,
    permit: Permit,
}

impl Meter {
    pub fn new(state: Arc<BoxState>, permit: Permit) -> Self {
        Self {
            state,
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            permit,
        }
    }

    pub fn charge(&self, way: Way, count: usize) -> Charge {
        if self.permit.is_inside() {
            return Charge::Go;
        }
        let wide = u64::try_from(count).unwrap_or(u64::MAX);
        match way {
            Way::Out => {
                self.sent.fetch_add(wide, Ordering::Relaxed);
                self.state.traffic.sent(wide);
            }
            Way::In => {
                self.received.fetch_add(wide, Ordering::Relaxed);
                self.state.traffic.received(wide);
            }
        }
        let limits = &self.state.policy().limits;
        let charge = self.state.limiter.charge(count, limits);
        if limits.total_bytes.is_some() {
            // Before they are passed on: whoever kills the server gives nothing back.
            self.state.write_numbers();
        }
        if charge == Charge::UsedUp {
            self.state.deny(
                &Attempt {
                    via: Via::Tcp,
                    host: "*".to_owned(),
                    port: 0,
                },
                Refusal::new(
                    Reason::Limit,
                    "this sandbox has used all the bytes its policy gives it",
                    "ask for a larger `limits.total_bytes` in the policy of this sandbox",
                ),
            );
        }
        charge
    }

    /// How much to move at once: with a rate, pieces are small enough to keep it even; and never
    /// more than the box may still have.
    pub fn piece(&self, most: usize) -> usize {
        if self.permit.is_inside() {
            return most;
        }
        let limits = &self.state.policy().limits;
        let even = match limits.bytes_per_second {
            None => most,
            Some(rate) => usize::try_from(rate / 8)
                .unwrap_or(most)
                .max(1024)
                .min(most),
        };
        let left = self.state.limiter.left(limits);
        let left = left.map_or(most, |left| usize::try_from(left).unwrap_or(most));
        // Nothing would look like the end of the connection.
        even.min(left.max(1))
    }
}

/// A connection that was let through: told when it opens and, by being dropped, when it ends.
#[derive(Debug)]
pub struct Flow {
    meter: Arc<Meter>,
    via: Via,
    host: Host,
    port: u16,
    rule: String,
    intercepted: bool,
    address: OnceLock<IpAddr>,
    since: Instant,
}

impl Flow {
    pub fn open(
        meter: &Arc<Meter>,
        via: Via,
        host: Host,
        port: u16,
        rule: String,
        intercepted: bool,
    ) -> Self {
        let flow = Self {
            meter: Arc::clone(meter),
            via,
            host,
            port,
            rule,
            intercepted,
            address: OnceLock::new(),
            since: Instant::now(),
        };
        meter.state.traffic.connection();
        flow.tell(Phase::Opened);
        flow
    }

    /// Takes down what was dialled first.
    pub fn dialled(&self, address: IpAddr) {
        self.address.get_or_init(|| address);
    }

    fn tell(&self, phase: Phase) {
        let state = &self.meter.state;
        state.shared.hooks.connection(&ConnectionRecord {
            id: state.id.clone(),
            phase,
            at: Timestamp::now(),
            via: self.via,
            host: self.host.clone(),
            address: self.address.get().copied(),
            port: self.port,
            rule: self.rule.clone(),
            intercepted: self.intercepted,
            bytes_sent: self.meter.sent.load(Ordering::Relaxed),
            bytes_received: self.meter.received.load(Ordering::Relaxed),
            milliseconds: u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX),
        });
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.tell(Phase::Closed);
        self.meter.state.write_numbers();
    }
}
