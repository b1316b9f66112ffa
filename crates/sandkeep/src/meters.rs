//! What the program itself counts for `/metrics`, and the words for what its parts count.

use std::{fs, time::Duration};

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram, gauge};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use sandkeep_audit::Audit;
use sandkeep_model::{Error, Result};

pub const DENIALS: &str = "sandkeep_denials_total";
const MEMORY: &str = "sandkeep_memory_bytes";
const AUDIT_RECORDS: &str = "sandkeep_audit_records";
const AUDIT_HEALTHY: &str = "sandkeep_audit_healthy";
const EVERY: Duration = Duration::from_secs(5);
/// Seconds: from what a warm pool takes to what a large image takes.
const SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0,
];

/// Histograms, so that those of several servers can be added up.
pub fn install() -> Result<PrometheusHandle> {
    let starting =
        |error: &dyn std::fmt::Display| Error::internal(format!("starting the metrics: {error}"));
    let handle = PrometheusBuilder::new()
        .set_buckets(SECONDS)
        .map_err(|error| starting(&error))?
        .install_recorder()
        .map_err(|error| starting(&error))?;
    describe_counter!(
        "sandkeep_http_requests_total",
        "Requests to the API by method, route and status"
    );
    describe_histogram!(
        "sandkeep_http_request_seconds",
        Unit::Seconds,
        "How long the API took to answer, by method and route"
    );
    describe_counter!(
        "sandkeep_gateway_requests_total",
        "Requests passed on to sandboxes, by kind and class of status"
    );
    describe_counter!(
        "sandkeep_connections_refused_total",
        "Connections refused because the server had no place for them"
    );
    describe_counter!(
        DENIALS,
        "Lookups, connections and requests of sandboxes that their policy refused"
    );
    describe_gauge!(
        MEMORY,
        Unit::Bytes,
        "Memory: what the server itself holds (server), and what the host has (host_total, host_available)"
    );
    describe_gauge!(AUDIT_RECORDS, "Records in the audit log");
    describe_gauge!(
        AUDIT_HEALTHY,
        "1 while everything that is to be in the audit log gets there"
    );
    Ok(handle)
}

/// Looks now and then at what nobody counts as it happens, for ever.
pub async fn upkeep(handle: PrometheusHandle, audit: Audit) {
    let mut interval = tokio::time::interval(EVERY);
    loop {
        interval.tick().await;
        handle.run_upkeep();
        memory();
        gauge!(AUDIT_HEALTHY).set(f64::from(u8::from(audit.healthy())));
        #[expect(clippy::cast_precision_loss, reason = "a count for people")]
        gauge!(AUDIT_RECORDS).set(audit.head().seq as f64);
    }
}

fn memory() {
    let of_host = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let of_server = fs::read_to_string("/proc/self/status").unwrap_or_default();
    for (kind, text, name) in [
        ("server", &of_server, "VmRSS:"),
        ("host_total", &of_host, "MemTotal:"),
        ("host_available", &of_host, "MemAvailable:"),
    ] {
        if let Some(bytes) = kib(text, name) {
            gauge!(MEMORY, "kind" => kind).set(bytes);
        }
    }
}

fn kib(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let number: u32 = line.split_whitespace().next()?.parse().ok()?;
    Some(f64::from(number) * 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel_are_read() {
        let text = "VmPeak:\t 9 kB\nVmRSS:\t  2048 kB\n";
        assert_eq!(kib(text, "VmRSS:"), Some(2_097_152.0));
        assert_eq!(kib(text, "VmSwap:"), None);
    }
}
