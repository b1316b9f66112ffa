//! Calls for the host alone, and the plain HTTP answers of the agent.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// `POST`, answers 204. May be called again, for instance after a restore.
pub const INIT_PATH: &str = "/sandkeep.host/init";
/// `POST`, answers 204: reads into the page cache what a first command needs.
pub const WARM_PATH: &str = "/sandkeep.host/warm";
/// `POST` [`TrustRequest`], answers 204. May be called again: the last one holds.
pub const TRUST_PATH: &str = "/sandkeep.host/trust";
/// `GET`, answers [`PortsResponse`].
pub const PORTS_PATH: &str = "/sandkeep.host/ports";
/// `GET ?after=N`, answers [`LogsResponse`].
pub const LOGS_PATH: &str = "/sandkeep.host/logs";
/// `POST` [`SignalRequest`], answers 204.
pub const SIGNAL_PATH: &str = "/sandkeep.host/signal";

/// `POST`, answers 204 when everything written so far is on the disk of the box.
pub const SETTLE_PATH: &str = "/sandkeep.host/settle";

/// `POST`, answers 204 when every program of a machine stands still: before it is written down.
pub const HOLD_PATH: &str = "/sandkeep.host/hold";
/// `POST`, answers 204: the programs of the machine that was written down go on.
pub const RELEASE_PATH: &str = "/sandkeep.host/release";

/// `POST` [`ClockRequest`], answers [`ClockResponse`]. Of a machine alone: other sandboxes have the
/// clock of the host.
pub const CLOCK_PATH: &str = "/sandkeep.host/clock";

/// Moves the clock of a machine. By how much and not to when: what is on its way for long comes late,
/// and is as right as it was.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClockRequest {
    /// Forwards by so many microseconds. None: the clock is only read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forward_us: Option<i64>,
}

/// What the clock says, after it was moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClockResponse {
    /// Microseconds since 1970.
    pub now_us: i64,
}

/// Where programs find the generation of their sandbox.
pub const GENERATION_DIR: &str = "/run/sandkeep";
pub const GENERATION_FILE: &str = "generation";

/// Sends a process the agent started a signal that envd's protocol has no word for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignalRequest {
    pub pid: u32,
    pub signal: HostSignal,
}

/// The signals people send; envd's `SendSignal` has TERM and KILL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum HostSignal {
    Int,
    Quit,
    Hup,
}

/// `POST` [`LimitsRequest`], answers 204: for wards that can not set these from outside.
pub const LIMITS_PATH: &str = "/sandkeep.host/limits";

/// What processes started from now on may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LimitsRequest {
    /// Open files of each process.
    pub open_files: u64,
    /// Processes and threads of the whole box.
    pub pids: u64,
    /// Memory of the whole box, where only its own kernel can hold that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

/// `GET`, answers [`UsageResponse`]: for wards that can not count these from outside.
pub const USAGE_PATH: &str = "/sandkeep.host/usage";

/// What only the kernel of the box knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UsageResponse {
    /// Processes and threads of the whole box.
    pub pids: u64,
    /// Processes killed for want of memory since the box began.
    pub oom_kills: u64,
}

/// Who the box is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InitRequest {
    pub sandbox_id: String,
    pub template_id: String,
    /// Environment of every process; replaces what an earlier call set.
    #[serde(default)]
    pub env_vars: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_workdir: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// The machine id in `/etc` stays: the box was this one before, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_machine_id: bool,
    /// Another one in every copy of a sandbox: 32 hexadecimal digits. None: it is the one it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<String>,
    /// The host's clock, for boxes with a clock of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timestamp_ms: Option<i64>,
}

impl InitRequest {
    /// For a sandbox that is new, or is what another one was or it was itself before.
    #[must_use]
    pub fn of_generation(self, generation: String) -> Self {
        Self {
            generation: Some(generation),
            ..self
        }
    }

    /// For a box that comes back, in contrast to one that is new.
    #[must_use]
    pub fn same_machine(self) -> Self {
        Self {
            keep_machine_id: true,
            ..self
        }
    }
}

/// The certificate authority of the box, for the trust stores of its programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrustRequest {
    /// PEM. Its key stays with the host.
    pub certificate: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortsResponse {
    pub ports: Vec<ListeningPort>,
}

/// A TCP socket somebody in the box listens on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ListeningPort {
    pub port: u16,
    pub address: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogsResponse {
    pub entries: Vec<LogEntry>,
}

/// One line of the agent's own log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LogEntry {
    /// Grows by one per entry, starting at 1.
    pub seq: u64,
    pub timestamp_ms: i64,
    pub level: LogLevel,
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    Info,
    Warn,
    Error,
}

/// Answer of `GET /metrics`. Sizes in bytes unless the name says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Unix seconds.
    pub ts: i64,
    pub cpu_count: u32,
    /// 100 is one whole CPU per counted CPU.
    pub cpu_used_pct: f32,
    pub mem_total: u64,
    pub mem_used: u64,
    pub mem_cache: u64,
    pub mem_total_mib: u64,
    pub mem_used_mib: u64,
    pub disk_used: u64,
    pub disk_total: u64,
}

/// A refusal outside RPC: `/files` uses the HTTP status as code, tunnels a word.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HttpError<C> {
    pub code: C,
    pub message: String,
}
