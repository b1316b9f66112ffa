//! The bounds of a policy, kept by counting.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use crate::policy::EgressLimits;

/// A bucket that fills at a rate and may go into debt: who overdraws it waits.
#[derive(Debug)]
struct Bucket {
    level: f64,
    at: Instant,
}

impl Bucket {
    fn new(rate: f64) -> Self {
        Self {
            level: rate,
            at: Instant::now(),
        }
    }

    /// One second's worth may come at once.
    fn fill(&mut self, rate: f64) {
        let now = Instant::now();
        let gained = now.duration_since(self.at).as_secs_f64() * rate;
        self.level = (self.level + gained).min(rate);
        self.at = now;
    }

    fn take_one(&mut self, rate: f64) -> bool {
        self.fill(rate);
        let there = self.level >= 1.0;
        if there {
            self.level -= 1.0;
        }
        there
    }

    fn overdraw(&mut self, count: f64, rate: f64) -> Duration {
        self.fill(rate);
        self.level -= count;
        if self.level >= 0.0 {
            return Duration::ZERO;
        }
        Duration::try_from_secs_f64(-self.level / rate).unwrap_or(Duration::MAX)
    }
}

/// What becomes of bytes that were moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Charge {
    Go,
    Wait(Duration),
    /// The box has had all the bytes its policy gives it.
    UsedUp,
}

/// What holds for every box, whatever its policy says.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    pub most_connections: u32,
    pub dns_per_second: u32,
}

#[derive(Debug)]
pub struct Limiter {
    bounds: Bounds,
    active: AtomicU32,
    used: AtomicU64,
    connections: Mutex<Bucket>,
    bytes: Mutex<Bucket>,
    dns: Mutex<Bucket>,
}

/// One connection counted; given back when dropped.
#[derive(Debug)]
pub struct Permit(Arc<Limiter>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Limiter {
    pub fn new(limits: &EgressLimits, bounds: Bounds) -> Self {
        let rate = |value: Option<f64>| Mutex::new(Bucket::new(value.unwrap_or(0.0)));
        Self {
            bounds,
            active: AtomicU32::new(0),
            used: AtomicU64::new(0),
            connections: rate(limits.new_connections_per_second.map(f64::from)),
            bytes: rate(limits.bytes_per_second.map(|rate| rate as f64)),
            dns: rate(Some(bounds.dns_per_second.into())),
        }
    }

    /// A new policy starts with full buckets and nothing used.
    pub fn restart(&self, limits: &EgressLimits) {
        self.used.store(0, Ordering::Relaxed);
        if let Some(rate) = limits.new_connections_per_second {
            *lock(&self.connections) = Bucket::new(rate.into());
        }
        if let Some(rate) = limits.bytes_per_second {
            *lock(&self.bytes) = Bucket::new(rate as f64);
        }
    }

    pub fn connection(self: &Arc<Self>, limits: &EgressLimits) -> Result<Permit, String> {
        if let Some(total) = limits.total_bytes
            && self.used.load(Ordering::Relaxed) >= total
        {
            return Err(format!("this box has used all of its {total} bytes"));
        }
        let bound = self.bounds.most_connections;
        let most = limits
            .concurrent_connections
            .map_or(bound, |own| own.min(bound));
        let before = self.active.fetch_add(1, Ordering::Relaxed);
        // Given back also when one of the checks below fails.
        let permit = Permit(Arc::clone(self));
        if before >= most {
            return Err(format!("this box has {most} connections open already"));
        }
        if let Some(rate) = limits.new_connections_per_second
            && !lock(&self.connections).take_one(rate.into())
        {
            return Err(format!("this box may open {rate} connections in a second"));
        }
        Ok(permit)
    }

    /// How many bytes of its policy the box has not had yet.
    pub fn left(&self, limits: &EgressLimits) -> Option<u64> {
        let total = limits.total_bytes?;
        Some(total.saturating_sub(self.used.load(Ordering::Relaxed)))
    }

    /// What reaches the last byte is paid for, and is the last.
    pub fn charge(&self, count: usize, limits: &EgressLimits) -> Charge {
        if let Some(total) = limits.total_bytes {
            let count = u64::try_from(count).unwrap_or(u64::MAX);
            if self
                .used
                .fetch_add(count, Ordering::Relaxed)
                .saturating_add(count)
                >= total
            {
                return Charge::UsedUp;
            }
        }
        match limits.bytes_per_second {
            None => Charge::Go,
            Some(rate) => match lock(&self.bytes).overdraw(count as f64, (rate as f64).max(1.0)) {
                Duration::ZERO => Charge::Go,
                wait => Charge::Wait(wait),
            },
        }
    }

    pub fn dns_query(&self) -> bool {
        lock(&self.dns).take_one(self.bounds.dns_per_second.into())
    }

    pub fn active(&self) -> u32 {
        self.active.load(Ordering::Relaxed)
    }
}

fn lock(bucket: &Mutex<Bucket>) -> std::sync::MutexGuard<'_, Bucket> {
    bucket.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds {
        most_connections: 10,
        dns_per_second: 10,
    };

    #[test]
    fn bytes_beyond_the_rate_wait_and_beyond_the_total_end() {
        let limits = EgressLimits {
            bytes_per_second: Some(1000),
            total_bytes: Some(10_000),
            ..EgressLimits::default()
        };
        let limiter = Limiter::new(&limits, BOUNDS);
        let begun = Instant::now();
        assert_eq!(limiter.charge(1000, &limits), Charge::Go);
        let Charge::Wait(wait) = limiter.charge(2000, &limits) else {
            panic!("no wait");
        };
        // Two seconds' worth too many, less what was gained since.
        let all = Duration::from_secs(2);
        assert!(wait <= all && wait + begun.elapsed() >= all, "{wait:?}");
        assert_eq!(limiter.left(&limits), Some(7000));
        // The last byte ends it: there is never one too many.
        assert_eq!(limiter.charge(7000, &limits), Charge::UsedUp);
        assert_eq!(limiter.left(&limits), Some(0));
    }

    #[test]
    fn connections_are_counted_and_given_back() {
        let limits = EgressLimits {
            concurrent_connections: Some(2),
            ..EgressLimits::default()
        };
        let limiter = Arc::new(Limiter::new(&limits, BOUNDS));
        let first = limiter.connection(&limits).unwrap();
        let _second = limiter.connection(&limits).unwrap();
        assert!(limiter.connection(&limits).is_err());
        drop(first);
        assert!(limiter.connection(&limits).is_ok());
        assert_eq!(limiter.active(), 1);
    }
}
