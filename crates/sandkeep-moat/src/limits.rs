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
    /// To `sandkeep.internal` and 169.254.169.254.
    pub most_inside: u32,
    pub dns_per_second: u32,
}

/// Connections a box may have however many others have, while there are any left.
const FAIR: u32 = 16;

/// The connections of all boxes together: each takes descriptors and memory of the server.
#[derive(Debug)]
pub struct Budget {
    most: u32,
    used: AtomicU32,
}

impl Budget {
    pub fn new(most: u32) -> Arc<Self> {
        Arc::new(Self {
            most,
            used: AtomicU32::new(0),
        })
    }

    /// A place for one more connection of a box that has `own` already. When three quarters are
    /// taken, those who have many get no more, so that the others still get some.
    pub fn place(self: &Arc<Self>, own: u32) -> Option<PlaceTaken> {
        let most = if own < FAIR {
            self.most
        } else {
            self.most - self.most / 4
        };
        let before = self.used.fetch_add(1, Ordering::Relaxed);
        // Given back at once when there was none.
        let place = PlaceTaken(Arc::clone(self));
        (before < most).then_some(place)
    }

    pub fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }
}

/// Given back when dropped.
#[derive(Debug)]
pub struct PlaceTaken(Arc<Budget>);

impl Drop for PlaceTaken {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How often a box is told no by us: each no costs the server a little. Beyond this its loop
/// rests, and what it sends waits in the kernel or is dropped there.
const REFUSALS_PER_SECOND: f64 = 200.0;
const DATAGRAMS_PER_SECOND: f64 = 2000.0;

#[derive(Debug)]
pub struct Limiter {
    bounds: Bounds,
    budget: Arc<Budget>,
    active: AtomicU32,
    inside: AtomicU32,
    used: AtomicU64,
    connections: Mutex<Bucket>,
    bytes: Mutex<Bucket>,
    dns: Mutex<Bucket>,
    refusals: Mutex<Bucket>,
    datagrams: Mutex<Bucket>,
}

/// One connection counted; given back when dropped.
#[derive(Debug)]
pub struct Permit {
    limiter: Arc<Limiter>,
    of: Counted,
    _place: PlaceTaken,
}

#[derive(Debug, Clone, Copy)]
enum Counted {
    Outside,
    Inside,
}

impl Permit {
    /// To ourselves: that costs the sandbox nothing of what its policy gives it.
    pub fn is_inside(&self) -> bool {
        matches!(self.of, Counted::Inside)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.limiter.count(self.of).fetch_sub(1, Ordering::Relaxed);
    }
}

impl Limiter {
    /// `spent`: what the sandbox had of its bytes before.
    pub fn new(limits: &EgressLimits, bounds: Bounds, budget: Arc<Budget>, spent: u64) -> Self {
        let rate = |value: Option<f64>| Mutex::new(Bucket::new(value.unwrap_or(0.0)));
        Self {
            bounds,
            budget,
            active: AtomicU32::new(0),
            inside: AtomicU32::new(0),
            refusals: rate(Some(REFUSALS_PER_SECOND)),
            datagrams: rate(Some(DATAGRAMS_PER_SECOND)),
            used: AtomicU64::new(spent),
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
        let permit = self.counted(Counted::Outside, most)?;
        if let Some(rate) = limits.new_connections_per_second
            && !lock(&self.connections).take_one(rate.into())
        {
            return Err(format!("this box may open {rate} connections in a second"));
        }
        Ok(permit)
    }

    /// One to ourselves.
    pub fn inside(self: &Arc<Self>) -> Result<Permit, String> {
        self.counted(Counted::Inside, self.bounds.most_inside)
    }

    fn count(&self, of: Counted) -> &AtomicU32 {
        match of {
            Counted::Outside => &self.active,
            Counted::Inside => &self.inside,
        }
    }

    fn counted(self: &Arc<Self>, of: Counted, most: u32) -> Result<Permit, String> {
        let own = self.active() + self.inside.load(Ordering::Relaxed);
        let Some(place) = self.budget.place(own) else {
            return Err(
                "the sandboxes of this server have as many connections open as it bears".to_owned(),
            );
        };
        let before = self.count(of).fetch_add(1, Ordering::Relaxed);
        // Given back also when the check fails.
        let permit = Permit {
            limiter: Arc::clone(self),
            of,
            _place: place,
        };
        if before >= most {
            return Err(format!("this box has {most} connections open already"));
        }
        Ok(permit)
    }

    /// A place for what has no permit, like a query over TCP.
    pub fn place(&self) -> Option<PlaceTaken> {
        self.budget.place(self.active())
    }

    /// How long to rest after having refused so many.
    pub fn after_refusals(&self, count: usize) -> Duration {
        lock(&self.refusals).overdraw(count as f64, REFUSALS_PER_SECOND)
    }

    /// How long to rest after having taken so many datagrams.
    pub fn after_datagrams(&self, count: usize) -> Duration {
        lock(&self.datagrams).overdraw(count as f64, DATAGRAMS_PER_SECOND)
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

    pub fn spent(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
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
        most_inside: 2,
        dns_per_second: 10,
    };

    fn limiter(limits: &EgressLimits, budget: &Arc<Budget>) -> Arc<Limiter> {
        Arc::new(Limiter::new(limits, BOUNDS, Arc::clone(budget), 0))
    }

    #[test]
    fn bytes_beyond_the_rate_wait_and_beyond_the_total_end() {
        let limits = EgressLimits {
            bytes_per_second: Some(1000),
            total_bytes: Some(10_000),
            ..EgressLimits::default()
        };
        let limiter = limiter(&limits, &Budget::new(100));
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
        let limiter = limiter(&limits, &Budget::new(100));
        let first = limiter.connection(&limits).unwrap();
        let _second = limiter.connection(&limits).unwrap();
        assert!(limiter.connection(&limits).is_err());
        drop(first);
        assert!(limiter.connection(&limits).is_ok());
        assert_eq!(limiter.active(), 1);
    }
    #[test]
    fn connections_to_ourselves_are_counted_apart() {
        let limits = EgressLimits::default();
        let limiter = limiter(&limits, &Budget::new(100));
        let held: Vec<_> = (0..2).map(|_| limiter.inside().unwrap()).collect();
        assert!(limiter.inside().is_err());
        assert!(limiter.connection(&limits).is_ok());
        drop(held);
        assert!(limiter.inside().is_ok());
    }

    #[test]
    fn one_box_takes_no_place_that_another_needs() {
        let limits = EgressLimits::default();
        let budget = Budget::new(120);
        let wide = Bounds {
            most_connections: 1000,
            ..BOUNDS
        };
        let greedy = Arc::new(Limiter::new(&limits, wide, Arc::clone(&budget), 0));
        let held: Vec<_> = (0..1000)
            .filter_map(|_| greedy.connection(&limits).ok())
            .collect();
        assert_eq!(held.len(), 90);
        let late = limiter(&limits, &budget);
        let own: Vec<_> = (0..10).map(|_| late.connection(&limits)).collect();
        assert!(own.iter().all(Result::is_ok));
        drop((held, own));
        assert_eq!(budget.used(), 0);
    }
}
