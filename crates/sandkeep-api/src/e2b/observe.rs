//! Metrics and logs of boxes.

use std::collections::BTreeMap;

use axum::{Json, extract::State};
use sandkeep_agent_api::host::{LogEntry, LogLevel};
use sandkeep_model::{Code, Error, Result, SandboxId, Timestamp};
use serde::Serialize;
use serde_json::json;

use super::{
    lines::{LogLine, Loudness, Wanted},
    types::MetricBody,
};
use crate::{
    agent,
    error::E2bError,
    extract::E2bId,
    query::{E2bQuery, Query},
    state::Shared,
};

/// Boxes one question may name.
const MAX_IDS: usize = 100;
const MAX_LINES: usize = 1000;
/// Who writes the log of a sandbox, by the name clients know.
const LOGGER: &str = "envd";

pub(crate) async fn metrics(
    State(state): State<Shared>,
    id: E2bId,
    E2bQuery(mut query): E2bQuery,
) -> Result<Json<Vec<MetricBody>>, E2bError> {
    let from = unix_seconds(&mut query, "start")?;
    // Inclusive to the end of that second.
    let to = unix_seconds(&mut query, "end")?
        .map(|time| Timestamp::from_millis(time.millis().saturating_add(999)));
    let samples = state.keeper.samples(&id, from, to).await?;
    Ok(Json(samples.iter().map(MetricBody::from).collect()))
}

fn unix_seconds(query: &mut Query, name: &str) -> Result<Option<Timestamp>> {
    let seconds = query.parsed::<i64>(name)?;
    Ok(seconds.map(|seconds| Timestamp::from_millis(seconds.saturating_mul(1000))))
}

#[derive(Debug, Serialize)]
pub(crate) struct Many {
    sandboxes: BTreeMap<SandboxId, MetricBody>,
}

/// The newest metrics of several boxes; those that do not exist are left out.
pub(crate) async fn metrics_of_many(
    State(state): State<Shared>,
    E2bQuery(mut query): E2bQuery,
) -> Result<Json<Many>, E2bError> {
    let given = query.take("sandbox_ids")?.unwrap_or_default();
    let ids: Vec<&str> = given.split(',').filter(|id| !id.is_empty()).collect();
    if ids.is_empty() || ids.len() > MAX_IDS {
        return Err(Error::invalid(
            "sandbox_ids",
            format!("sandbox_ids must name 1 to {MAX_IDS} sandboxes"),
        )
        .into());
    }
    let mut sandboxes = BTreeMap::new();
    for id in ids {
        let Ok(id) = id.parse::<SandboxId>() else {
            continue;
        };
        match state.keeper.samples(&id, None, None).await {
            Ok(samples) => {
                if let Some(last) = samples.last() {
                    sandboxes.insert(id, MetricBody::from(last));
                }
            }
            Err(error) if error.code == Code::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Json(Many { sandboxes }))
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LogsV1 {
    logs: Vec<Line>,
    log_entries: Vec<Entry>,
}

#[derive(Debug, Serialize)]
pub(crate) struct LogsV2 {
    logs: Vec<Entry>,
}

#[derive(Debug, Serialize)]
struct Line {
    timestamp: Timestamp,
    line: String,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct Entry {
    timestamp: Timestamp,
    message: String,
    level: LogLevel,
    fields: BTreeMap<String, String>,
}

impl Entry {
    /// As E2B's own logs are written; its command line parses them.
    fn line(&self) -> String {
        json!({"level": self.level, "logger": LOGGER, "message": self.message}).to_string()
    }
}

impl From<LogEntry> for Entry {
    fn from(entry: LogEntry) -> Self {
        Self {
            timestamp: Timestamp::from_millis(entry.timestamp_ms),
            message: entry.message,
            level: entry.level,
            fields: BTreeMap::new(),
        }
    }
}

impl LogLine for LogEntry {
    fn at(&self) -> i64 {
        self.timestamp_ms
    }

    fn loudness(&self) -> Loudness {
        match self.level {
            LogLevel::Info => Loudness::Info,
            LogLevel::Warn => Loudness::Warn,
            LogLevel::Error => Loudness::Error,
        }
    }

    fn message(&self) -> &str {
        &self.message
    }
}

fn entries(wanted: &Wanted, lines: Vec<LogEntry>) -> Vec<Entry> {
    let picked = wanted.pick(lines, MAX_LINES).into_iter();
    picked.map(Entry::from).collect()
}

pub(crate) async fn logs_v1(
    State(state): State<Shared>,
    id: E2bId,
    E2bQuery(mut query): E2bQuery,
) -> Result<Json<LogsV1>, E2bError> {
    let wanted = Wanted {
        cursor: query.parsed("start")?,
        limit: query.parsed("limit")?,
        ..Wanted::default()
    };
    let log_entries = entries(&wanted, read(&state, &id).await?);
    let logs = log_entries.iter().map(|entry| Line {
        timestamp: entry.timestamp,
        line: entry.line(),
    });
    Ok(Json(LogsV1 {
        logs: logs.collect(),
        log_entries,
    }))
}

pub(crate) async fn logs_v2(
    State(state): State<Shared>,
    id: E2bId,
    E2bQuery(mut query): E2bQuery,
) -> Result<Json<LogsV2>, E2bError> {
    let wanted = Wanted::of(&mut query)?;
    let logs = entries(&wanted, read(&state, &id).await?);
    Ok(Json(LogsV2 { logs }))
}

async fn read(state: &Shared, id: &SandboxId) -> Result<Vec<LogEntry>> {
    agent::open(state, id).await?.logs(0).await
}
