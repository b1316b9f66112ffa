//! What a box uses.

use serde::{Deserialize, Serialize};

use crate::Timestamp;

/// Counters of one box as its ward reads them, outside the box.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// CPU time since the start, in microseconds.
    pub cpu_usec: u64,
    /// Memory charged to the box, page cache included.
    pub memory_bytes: u64,
    /// The part of it that is page cache and can be taken back.
    pub cache_bytes: u64,
    pub pids: u64,
    /// How often the kernel killed a process of the box for want of memory.
    pub oom_kills: u64,
    /// Written beyond the template.
    pub disk_bytes: u64,
}

/// One point of a box's metrics.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    pub at: Timestamp,
    pub cpu_count: u32,
    /// Of one core: 100 is one core busy all the time.
    pub cpu_used_pct: f64,
    pub memory_used: u64,
    pub memory_cache: u64,
    pub memory_total: u64,
    pub disk_used: u64,
    pub disk_total: u64,
}
