//! Metrics and logs of boxes.

use std::collections::BTreeMap;

use axum::{Json, extract::State};
use sandkeep_agent_api::host::{LogEntry, LogLevel};
use sandkeep_model::{Code, Error, Result, SandboxId, Timestamp};
use serde::Serialize;

use super::types::MetricBody;
use crate::{
    agent,
    error::E2bError,
    extract::E2bId,
    query::{E2bQuery, Query, shown},
    state::Shared,
};

/// Boxes one question may name.
const MAX_IDS: usize = 100;
const MAX_LINES: usize = 1000;

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

/// Which lines are wanted.
#[derive(Debug, Default)]
struct Wanted {
    /// Milliseconds: not before in reading order.
    cursor: Option<i64>,
    limit: Option<usize>,
    backward: bool,
    level: Option<LogLevel>,
    search: Option<String>,
}

impl Wanted {
    fn pick(&self, entries: Vec<LogEntry>) -> Vec<Entry> {
        let matches = |entry: &LogEntry| {
            let at = entry.timestamp_ms;
            let reached = match self.cursor {
                Some(cursor) if self.backward => at <= cursor,
                Some(cursor) => at >= cursor,
                None => true,
            };
            reached
                && self
                    .level
                    .is_none_or(|least| weight(entry.level) >= weight(least))
                && self
                    .search
                    .as_ref()
                    .is_none_or(|text| entry.message.contains(text))
        };
        let mut entries = entries;
        if self.backward {
            entries.reverse();
        }
        entries
            .into_iter()
            .filter(matches)
            .take(self.limit.unwrap_or(MAX_LINES).min(MAX_LINES))
            .map(Entry::from)
            .collect()
    }
}

const fn weight(level: LogLevel) -> u8 {
    match level {
        LogLevel::Info => 1,
        LogLevel::Warn => 2,
        LogLevel::Error => 3,
    }
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
    let log_entries = wanted.pick(read(&state, &id).await?);
    let logs = log_entries.iter().map(|entry| Line {
        timestamp: entry.timestamp,
        line: entry.message.clone(),
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
    let wanted = wanted_v2(&mut query)?;
    let logs = wanted.pick(read(&state, &id).await?);
    Ok(Json(LogsV2 { logs }))
}

fn wanted_v2(query: &mut Query) -> Result<Wanted> {
    let one_of = |name: &str, given: &str, what: &str| {
        Error::invalid(
            name,
            format!("{name} is {}, it must be {what}", shown(given)),
        )
    };
    let backward = match query.take("direction")?.as_deref() {
        None | Some("" | "forward") => false,
        Some("backward") => true,
        Some(other) => return Err(one_of("direction", other, "forward or backward")),
    };
    let level = match query.take("level")?.as_deref() {
        None | Some("" | "debug") => None,
        Some("info") => Some(LogLevel::Info),
        Some("warn") => Some(LogLevel::Warn),
        Some("error") => Some(LogLevel::Error),
        Some(other) => return Err(one_of("level", other, "debug, info, warn or error")),
    };
    Ok(Wanted {
        cursor: query.parsed("cursor")?,
        limit: query.parsed("limit")?,
        backward,
        level,
        search: query.take("search")?.filter(|text| !text.is_empty()),
    })
}

async fn read(state: &Shared, id: &SandboxId) -> Result<Vec<LogEntry>> {
    agent::open(state, id).await?.logs(0).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries() -> Vec<LogEntry> {
        let levels = [LogLevel::Info, LogLevel::Warn, LogLevel::Error];
        (1..)
            .zip(levels)
            .map(|(seq, level)| LogEntry {
                seq,
                timestamp_ms: 1000 * i64::try_from(seq).unwrap(),
                level,
                message: format!("line {seq}"),
            })
            .collect()
    }

    fn picked(query: &str) -> Vec<String> {
        let wanted = wanted_v2(&mut Query::parse(query).unwrap()).unwrap();
        let picked = wanted.pick(entries()).into_iter();
        picked.map(|entry| entry.message).collect()
    }

    #[test]
    fn lines_are_picked() {
        assert_eq!(picked(""), ["line 1", "line 2", "line 3"]);
        assert_eq!(picked("direction=backward&limit=1"), ["line 3"]);
        assert_eq!(picked("cursor=2000"), ["line 2", "line 3"]);
        assert_eq!(
            picked("cursor=2000&direction=backward"),
            ["line 2", "line 1"]
        );
        assert_eq!(picked("level=warn"), ["line 2", "line 3"]);
        assert_eq!(picked("search=3"), ["line 3"]);
    }

    #[test]
    fn wrong_wishes_are_named() {
        for (query, field) in [
            ("direction=up", "direction"),
            ("level=loud", "level"),
            ("limit=x", "limit"),
            ("cursor=now", "cursor"),
        ] {
            let error = wanted_v2(&mut Query::parse(query).unwrap()).unwrap_err();
            assert_eq!(error.field.as_deref(), Some(field), "{query}");
        }
    }
}
