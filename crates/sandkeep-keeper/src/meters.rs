//! What the keeper counts for `/metrics`.

use std::time::Duration;

use metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use sandkeep_vault::StorageState;

const BOXES: &str = "sandkeep_boxes";
const CREATES: &str = "sandkeep_creates_total";
const CREATE_SECONDS: &str = "sandkeep_create_seconds";
const POOL_SIZE: &str = "sandkeep_pool_size";
const POOL_WANTED: &str = "sandkeep_pool_wanted";
const GONE: &str = "sandkeep_gone_total";
const OOM_KILLS: &str = "sandkeep_oom_kills_total";
const CLEANUP_FAILURES: &str = "sandkeep_cleanup_failures_total";
const STORAGE: &str = "sandkeep_storage_bytes";
const STORAGE_LOW: &str = "sandkeep_storage_low";
const STORAGE_READ_ONLY: &str = "sandkeep_storage_read_only";
const STORAGE_OVERCOMMITTED: &str = "sandkeep_storage_overcommitted";
const STATE_DISK_FULL: &str = "sandkeep_state_disk_full";
const HELD: &str = "sandkeep_sandboxes_held";
const ADOPTED: &str = "sandkeep_adopted_total";

/// Where a box came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    Pool,
    Cold,
}

impl Path {
    const fn name(self) -> &'static str {
        match self {
            Self::Pool => "pool",
            Self::Cold => "cold",
        }
    }
}

pub fn describe() {
    describe_gauge!(BOXES, "Boxes by state; `pooled` ones wait for an owner");
    describe_counter!(CREATES, "Creations by path (pool, cold) and result");
    describe_histogram!(
        CREATE_SECONDS,
        Unit::Seconds,
        "Time from the accepted request to a box that answers"
    );
    describe_gauge!(POOL_SIZE, "Boxes that wait in the warm pool");
    describe_gauge!(POOL_WANTED, "Boxes the warm pool is meant to hold");
    describe_counter!(GONE, "Boxes that ended, by reason");
    describe_counter!(
        OOM_KILLS,
        "Processes in boxes killed by the kernel for want of memory"
    );
    describe_counter!(
        CLEANUP_FAILURES,
        "Attempts to end a box that failed and will be repeated"
    );
    describe_gauge!(
        STORAGE,
        Unit::Bytes,
        "The storage: total, free, growable (by how much it may still become larger), below_free (free on the disk of the state directory)"
    );
    describe_gauge!(
        STORAGE_LOW,
        "1 while the storage is nearly full: writers are held, nothing new is begun"
    );
    describe_gauge!(
        STORAGE_READ_ONLY,
        "1 while nothing can be written to the storage"
    );
    describe_gauge!(
        STORAGE_OVERCOMMITTED,
        "1 while the disk below has not got all that the storage was promised"
    );
    describe_gauge!(
        STATE_DISK_FULL,
        "1 while the disk of the state directory is full"
    );
    describe_gauge!(
        HELD,
        "Sandboxes that stand still because the storage is nearly full"
    );
    describe_counter!(ADOPTED, "Boxes found alive after a restart of the server");
}

pub fn moved(from: Option<&'static str>, to: Option<&'static str>) {
    if from == to {
        return;
    }
    if let Some(from) = from {
        gauge!(BOXES, "state" => from).decrement(1.0);
    }
    if let Some(to) = to {
        gauge!(BOXES, "state" => to).increment(1.0);
    }
}

pub fn created(path: Path, took: Duration) {
    counter!(CREATES, "path" => path.name(), "result" => "ok").increment(1);
    histogram!(CREATE_SECONDS, "path" => path.name()).record(took.as_secs_f64());
}

pub fn create_failed(path: Path) {
    counter!(CREATES, "path" => path.name(), "result" => "error").increment(1);
}

#[expect(clippy::cast_precision_loss, reason = "a count of boxes")]
pub fn pool(size: usize, wanted: usize) {
    gauge!(POOL_SIZE).set(size as f64);
    gauge!(POOL_WANTED).set(wanted as f64);
}

pub fn gone(reason: &'static str) {
    counter!(GONE, "reason" => reason).increment(1);
}

pub fn oom_kills(count: u64) {
    counter!(OOM_KILLS).increment(count);
}

pub fn cleanup_failed() {
    counter!(CLEANUP_FAILURES).increment(1);
}

pub fn adopted(count: usize) {
    counter!(ADOPTED).increment(u64::try_from(count).unwrap_or(u64::MAX));
}

#[expect(clippy::cast_precision_loss, reason = "sizes of disks")]
pub fn storage(state: &StorageState, held: usize) {
    for (kind, bytes) in [
        ("total", state.total_bytes),
        ("free", state.free_bytes),
        ("growable", state.growable_bytes),
        ("below_free", state.below_free_bytes),
    ] {
        gauge!(STORAGE, "kind" => kind).set(bytes as f64);
    }
    for (name, is) in [
        (STORAGE_LOW, state.low),
        (STORAGE_READ_ONLY, state.read_only),
        (STORAGE_OVERCOMMITTED, state.overcommitted),
        (STATE_DISK_FULL, state.below_full),
    ] {
        gauge!(name).set(f64::from(u8::from(is)));
    }
    gauge!(HELD).set(held as f64);
}
