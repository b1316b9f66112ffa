//! What the keeper counts for `/metrics`.

use std::time::Duration;

use metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

const BOXES: &str = "sandkeep_boxes";
const CREATES: &str = "sandkeep_creates_total";
const CREATE_SECONDS: &str = "sandkeep_create_seconds";
const POOL_SIZE: &str = "sandkeep_pool_size";
const POOL_WANTED: &str = "sandkeep_pool_wanted";
const GONE: &str = "sandkeep_gone_total";
const OOM_KILLS: &str = "sandkeep_oom_kills_total";
const CLEANUP_FAILURES: &str = "sandkeep_cleanup_failures_total";
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
