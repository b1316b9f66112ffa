//! How much the box uses.
//!
//! The numbers are those of the box's own cgroup if it can be seen, else those of the machine the
//! box runs on (which is the box itself in a virtual machine).

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::{Response, StatusCode};
use sandkeep_agent_api::Timestamp;
use sandkeep_agent_api::host::Metrics;
use sandkeep_agent_api::machine;

use crate::connect::json_response;
use crate::users::read_bounded;
use crate::{Body, State};

const MIB: u64 = 1 << 20;
/// A share measured over less time than this says nothing.
const MIN_INTERVAL: Duration = Duration::from_millis(50);
/// What the kernel calls a clock tick in /proc/stat.
const TICKS_PER_SECOND: u64 = 100;

/// Answers `GET /metrics`.
pub(crate) fn answer(state: &State) -> Response<Body> {
    let cpus = cpu_count();
    let memory = memory();
    let (disk_used, disk_total) = disk();
    let metrics = Metrics {
        ts: Timestamp::now().seconds,
        cpu_count: cpus,
        cpu_used_pct: state.cpu().used_percent(cpus),
        mem_total: memory.total,
        mem_used: memory.used,
        mem_cache: memory.cache,
        mem_total_mib: memory.total / MIB,
        mem_used_mib: memory.used / MIB,
        disk_used,
        disk_total,
    };
    json_response(StatusCode::OK, &metrics)
}

/// Measures the share of CPU between two questions.
#[derive(Debug)]
pub(crate) struct CpuMeter(Mutex<Sample>);

#[derive(Debug, Clone, Copy)]
struct Sample {
    at: Instant,
    used: Duration,
    percent: f32,
}

impl CpuMeter {
    /// Measures nothing yet: reading costs time that a start does not have.
    pub(crate) fn start() -> Self {
        Self(Mutex::new(Sample {
            at: Instant::now(),
            used: Duration::ZERO,
            percent: 0.0,
        }))
    }

    fn used_percent(&self, cpus: u32) -> f32 {
        let used = cpu_used();
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let interval = last.at.elapsed();
        if interval >= MIN_INTERVAL {
            // Before the first question nothing is known, and a machine's count began long ago.
            let percent = match last.used {
                Duration::ZERO => 0.0,
                before => {
                    let share = used.saturating_sub(before).as_secs_f32() / interval.as_secs_f32();
                    (share * 100.0 / cpus.max(1) as f32).clamp(0.0, 100.0)
                }
            };
            *last = Sample {
                at: Instant::now(),
                used,
                percent: (percent * 100.0).round() / 100.0,
            };
        }
        last.percent
    }
}

fn read(path: &str) -> Option<String> {
    read_bounded(Path::new(path)).ok()
}

/// The number after a word at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(|c: char| c == ':' || c.is_ascii_whitespace())?;
        (key == name)
            .then(|| value.split_ascii_whitespace().next()?.parse().ok())
            .flatten()
    })
}

fn number(path: &str) -> Option<u64> {
    read(path)?.trim().parse().ok()
}

pub(crate) fn cpu_used() -> Duration {
    if let Some(micros) =
        read("/sys/fs/cgroup/cpu.stat").and_then(|text| field(&text, "usage_usec"))
    {
        return Duration::from_micros(micros);
    }
    let accounted = [
        "/sys/fs/cgroup/cpuacct/cpuacct.usage",
        "/sys/fs/cgroup/cpu,cpuacct/cpuacct.usage",
    ];
    if let Some(nanos) = accounted.into_iter().find_map(number) {
        return Duration::from_nanos(nanos);
    }
    let ticks = read("/proc/stat").map_or(0, |text| busy_ticks(&text));
    Duration::from_millis(ticks * (1000 / TICKS_PER_SECOND))
}

/// All ticks but those idle or waiting (fields 4 and 5); guest time (9, 10) is in user time.
fn busy_ticks(stat: &str) -> u64 {
    let Some(line) = stat.lines().find_map(|line| line.strip_prefix("cpu ")) else {
        return 0;
    };
    line.split_ascii_whitespace()
        .take(8)
        .enumerate()
        .filter(|(index, _)| !matches!(index, 3 | 4))
        .filter_map(|(_, ticks)| ticks.parse::<u64>().ok())
        .sum()
}

fn cpu_count() -> u32 {
    let limit = read("/sys/fs/cgroup/cpu.max").and_then(|text| quota(&text));
    let present = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
    limit.map_or(present, |limit| limit.min(present))
}

/// `max 100000` or `150000 100000`, rounded up to whole CPUs.
fn quota(text: &str) -> Option<u32> {
    let (quota, period) = text.trim().split_once(' ')?;
    let (quota, period): (u64, u64) = (quota.parse().ok()?, period.parse().ok()?);
    u32::try_from(quota.div_ceil(period.max(1)).max(1)).ok()
}

struct Memory {
    total: u64,
    used: u64,
    cache: u64,
}

fn memory() -> Memory {
    let info = read("/proc/meminfo").unwrap_or_default();
    let kib = |name| field(&info, name).unwrap_or(0) * 1024;
    let machine = kib("MemTotal");
    // The one of a virtual machine first: the root of the hierarchy has no such files there.
    let unified = [machine::GROUP, "/sys/fs/cgroup"]
        .into_iter()
        .find_map(|base| {
            let usage = format!("{base}/memory.current");
            let (used, cache) = group_memory(&usage, &format!("{base}/memory.stat"), "file")?;
            Some((used, cache, number(&format!("{base}/memory.max"))))
        });
    let group = unified.or_else(|| {
        let base = "/sys/fs/cgroup/memory";
        let usage = format!("{base}/memory.usage_in_bytes");
        let (used, cache) = group_memory(&usage, &format!("{base}/memory.stat"), "total_cache")?;
        Some((
            used,
            cache,
            number(&format!("{base}/memory.limit_in_bytes")),
        ))
    });
    match group {
        Some((charged, cache, limit)) => Memory {
            total: limit.unwrap_or(machine).min(machine),
            // Cache is given back when memory is needed, so it does not count as used.
            used: charged.saturating_sub(cache),
            cache,
        },
        None => Memory {
            total: machine,
            used: machine.saturating_sub(kib("MemAvailable")),
            cache: kib("Cached"),
        },
    }
}

/// What a virtual machine has of files and could read again; files in memory alone are not among it.
pub(crate) fn files_in_memory() -> u64 {
    let stat = read(&format!("{}/memory.stat", machine::GROUP)).unwrap_or_default();
    ["active_file", "inactive_file"]
        .into_iter()
        .filter_map(|list| field(&stat, list))
        .sum()
}

fn group_memory(usage: &str, stat: &str, cache: &str) -> Option<(u64, u64)> {
    let stat = read(stat).unwrap_or_default();
    Some((number(usage)?, field(&stat, cache).unwrap_or(0)))
}

fn disk() -> (u64, u64) {
    rustix::fs::statvfs("/").map_or((0, 0), |disk| {
        let total = disk.f_blocks * disk.f_frsize;
        (total.saturating_sub(disk.f_bfree * disk.f_frsize), total)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_tables_are_read() {
        assert_eq!(field("usage_usec 12\nuser_usec 7\n", "user_usec"), Some(7));
        assert_eq!(field("MemTotal:       16 kB\n", "MemTotal"), Some(16));
        assert_eq!(field("MemTotal: x\n", "MemTotal"), None);
        assert_eq!(busy_ticks("cpu  1 2 4 100 200 8 16 32 64 64\ncpu0 9\n"), 63);
        assert_eq!(quota("150000 100000\n"), Some(2));
        assert_eq!(quota("max 100000\n"), None);
    }
}
