//! What boxes use, now and over the last twenty minutes.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use sandkeep_model::{Limits, Result, Sample, SandboxId, Timestamp, Usage};
use tokio::time::{Instant, MissedTickBehavior};

use crate::{core::Core, registry::Entry, sync::lock};

const EVERY: Duration = Duration::from_secs(5);
/// Disk usage changes slowly and costs more to ask for.
const DISK_EVERY: u32 = 6;
const KEPT: usize = 240;

/// The samples of one box.
#[derive(Default)]
pub struct Trail {
    ring: VecDeque<Sample>,
    /// When CPU time was read last, and what it was.
    cpu: Option<(Instant, u64)>,
    disk: Option<u64>,
}

impl Trail {
    /// The next reading is a first one: the counters began anew.
    pub fn forget_cpu(&mut self) {
        self.cpu = None;
    }

    fn push(&mut self, at: Instant, usage: &Usage, disk: Option<u64>, limits: &Limits) {
        self.disk = disk.or(self.disk);
        let sample = Sample {
            at: Timestamp::now(),
            cpu_count: limits.cpu_count(),
            cpu_used_pct: self
                .cpu
                .map_or(0.0, |before| busy(before, (at, usage.cpu_usec))),
            memory_used: usage.memory_bytes,
            memory_cache: usage.cache_bytes,
            memory_total: limits.memory_bytes(),
            disk_used: self.disk.unwrap_or(0),
            disk_total: limits.disk_bytes(),
        };
        self.cpu = Some((at, usage.cpu_usec));
        if self.ring.len() == KEPT {
            self.ring.pop_front();
        }
        self.ring.push_back(sample);
    }
}

/// Percent of one core between two readings.
fn busy(before: (Instant, u64), after: (Instant, u64)) -> f64 {
    let wall = after.0.saturating_duration_since(before.0).as_secs_f64();
    let cpu = Duration::from_micros(after.1.saturating_sub(before.1)).as_secs_f64();
    if wall > 0.0 { cpu / wall * 100.0 } else { 0.0 }
}

impl Core {
    /// Reads all running boxes now and then, for ever.
    pub async fn sample(self: Arc<Self>) {
        let mut tick = tokio::time::interval(EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
        for round in 0_u32.. {
            tokio::select! {
                () = self.closing.cancelled() => return,
                _ = tick.tick() => {}
            }
            for entry in self.registry.running() {
                let busy = self
                    .take_sample(&entry, round.is_multiple_of(DISK_EVERY))
                    .await;
                if let Some(busy) = busy {
                    self.look_idle(&entry, busy);
                }
                self.look_due(&entry);
                if self.closing.is_cancelled() {
                    return;
                }
            }
        }
    }

    /// Says how busy the box was; `None` when it can not be read.
    async fn take_sample(&self, entry: &Entry, with_disk: bool) -> Option<f64> {
        // One that is ending is told of by whoever ends it.
        let usage = entry.ward.usage(&entry.id).await.ok()?;
        let at = Instant::now();
        let first = lock(&entry.trail).disk.is_none();
        let disk = if with_disk || first {
            self.vault.disk_usage(&entry.id).await.ok()
        } else {
            None
        };
        let limits = entry.with(|sandbox| sandbox.limits);
        let mut trail = lock(&entry.trail);
        // A first reading tells nothing about what it does.
        let known = trail.cpu.is_some();
        trail.push(at, &usage, disk, &limits);
        let last = trail.ring.back().map(|sample| sample.cpu_used_pct);
        last.filter(|_| known)
    }

    /// What a box uses right now.
    pub async fn usage(&self, entry: &Entry) -> Option<Usage> {
        let (usage, disk) = tokio::join!(
            entry.ward.usage(&entry.id),
            self.vault.disk_usage(&entry.id)
        );
        Some(Usage {
            disk_bytes: disk.unwrap_or(0),
            ..usage.ok()?
        })
    }

    pub async fn samples(
        &self,
        id: &SandboxId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<Vec<Sample>> {
        let entry = self.registry.owned(id)?;
        // A box younger than the first round still has something to show.
        let none_yet = lock(&entry.trail).ring.is_empty();
        if none_yet {
            self.take_sample(&entry, true).await;
        }
        let trail = lock(&entry.trail);
        Ok(trail
            .ring
            .iter()
            .filter(|sample| from.is_none_or(|from| sample.at >= from))
            .filter(|sample| to.is_none_or(|to| sample.at <= to))
            .copied()
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_is_told_from_differences_and_the_ring_is_bounded() {
        let mut trail = Trail::default();
        let limits = Limits::default();
        let start = Instant::now();
        for n in 0..300_u64 {
            let usage = Usage {
                cpu_usec: n * 2_500_000,
                memory_bytes: n,
                ..Usage::default()
            };
            trail.push(
                start + EVERY * u32::try_from(n).unwrap(),
                &usage,
                Some(n),
                &limits,
            );
        }
        assert_eq!(trail.ring.len(), KEPT);
        let last = trail.ring.back().unwrap();
        assert!((last.cpu_used_pct - 50.0).abs() < 1e-6);
        assert_eq!(last.memory_used, 299);
        assert_eq!(last.disk_used, 299);
    }

    #[test]
    fn a_first_reading_or_a_counter_set_back_is_no_load() {
        let now = Instant::now();
        assert!(busy((now, 5), (now, 9)).abs() < f64::EPSILON);
        assert!(busy((now, 9), (now + EVERY, 5)).abs() < f64::EPSILON);
    }
}
