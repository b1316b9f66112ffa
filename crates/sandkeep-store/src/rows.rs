//! Rows as Rust values, and back.

use sandkeep_model::{
    BoxTime, E2bSettings, Error, Event, EventKind, Identity, Limits, OnTimeout, PortAccess, Result,
    Sandbox, SandboxId, Secret, State, Timestamp,
};
use serde::{Serialize, de::DeserializeOwned};
use sqlx::{Row, sqlite::SqliteRow};
use std::collections::BTreeMap;

/// A box as the ledger keeps it: what clients see, and what only the keeper needs.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    pub sandbox: Sandbox,
    /// It waits in the pool and does not exist for clients.
    pub pooled: bool,
    /// The ward's own note, once the box runs.
    pub ward: Option<serde_json::Value>,
    /// What it may reach; `None`: nothing.
    pub network: Option<serde_json::Value>,
}

/// A key a client gave so that the same request makes one box, with the request's hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Idempotency {
    pub key: String,
    pub hash: String,
}

/// A box that begins.
#[derive(Debug, Clone)]
pub struct NewBox<'a> {
    pub sandbox: &'a Sandbox,
    pub pooled: bool,
    pub network: Option<&'a serde_json::Value>,
    pub idempotency: Option<&'a Idempotency>,
    /// Who asked for it.
    pub by: Option<&'a str>,
}

/// What a pooled box becomes for its new owner.
#[derive(Debug, Clone)]
pub struct Claim<'a> {
    pub id: &'a SandboxId,
    pub limits: &'a Limits,
    pub started_at: Timestamp,
    pub end_at: Option<Timestamp>,
    pub on_timeout: OnTimeout,
    pub env: &'a BTreeMap<String, String>,
    pub metadata: &'a BTreeMap<String, String>,
    pub ports: PortAccess,
    pub e2b: &'a E2bSettings,
    pub identity: &'a Identity,
    pub time: &'a BoxTime,
    pub access_token: &'a Secret,
    pub network: Option<&'a serde_json::Value>,
    pub idempotency: Option<&'a Idempotency>,
    /// Who asked for it.
    pub by: Option<&'a str>,
}

/// The columns [`record`] reads, in one place.
pub const COLUMNS: &str = "id, template, isolation, limits, state, pooled, created_at, started_at, \
     end_at, on_timeout, env, metadata, access_token, gone, gone_at, oom_kills, ward, network, identity, time, ports, e2b";

pub fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| Error::internal(format!("writing a value for the ledger: {error}")))
}

/// Most boxes have none.
pub fn identity(identity: &Identity) -> Result<Option<String>> {
    if identity.is_empty() {
        return Ok(None);
    }
    json(identity).map(Some)
}

/// Most boxes have none.
pub fn e2b(settings: &E2bSettings) -> Result<Option<String>> {
    if settings.is_empty() {
        return Ok(None);
    }
    json(settings).map(Some)
}

pub const fn on_timeout_name(value: OnTimeout) -> &'static str {
    match value {
        OnTimeout::Kill => "kill",
        OnTimeout::Pause => "pause",
    }
}

fn unreadable(id: &str, column: &str, why: impl std::fmt::Display) -> Error {
    Error::internal(format!(
        "the ledger's row {id} can not be read: {column}: {why}"
    ))
    .hint("the ledger was changed by hand or is damaged; put back a copy")
}

/// One row, with its id for error messages.
pub struct Reading<'r> {
    row: &'r SqliteRow,
    id: String,
}

impl<'r> Reading<'r> {
    /// A row with a column `id`.
    pub fn of(row: &'r SqliteRow) -> Result<Self> {
        let id: String = row
            .try_get("id")
            .map_err(|error| unreadable("?", "id", error))?;
        Ok(Self { row, id })
    }

    pub fn get<'a, T>(&'a self, column: &str) -> Result<T>
    where
        T: sqlx::Decode<'a, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite>,
    {
        self.row
            .try_get(column)
            .map_err(|error| unreadable(&self.id, column, error))
    }

    pub fn parse<T>(&self, column: &str) -> Result<T>
    where
        T: std::str::FromStr,
        T::Err: std::fmt::Display,
    {
        self.get::<&str>(column)?
            .parse()
            .map_err(|error| unreadable(&self.id, column, error))
    }

    pub fn parse_or_none<T>(&self, column: &str) -> Result<Option<T>>
    where
        T: std::str::FromStr,
        T::Err: std::fmt::Display,
    {
        self.get::<Option<&str>>(column)?
            .map(str::parse)
            .transpose()
            .map_err(|error| unreadable(&self.id, column, error))
    }

    pub fn json<T: DeserializeOwned>(&self, column: &str) -> Result<T> {
        serde_json::from_str(self.get(column)?).map_err(|error| unreadable(&self.id, column, error))
    }

    pub fn json_or_none<T: DeserializeOwned>(&self, column: &str) -> Result<Option<T>> {
        self.get::<Option<&str>>(column)?
            .map(serde_json::from_str)
            .transpose()
            .map_err(|error| unreadable(&self.id, column, error))
    }

    fn time(&self, column: &str) -> Result<Timestamp> {
        self.get(column).map(Timestamp::from_millis)
    }

    fn time_or_none(&self, column: &str) -> Result<Option<Timestamp>> {
        Ok(self.get::<Option<i64>>(column)?.map(Timestamp::from_millis))
    }
}

pub fn record(row: &SqliteRow) -> Result<Record> {
    let reading = Reading::of(row)?;
    let on_timeout = match reading.get::<&str>("on_timeout")? {
        "kill" => OnTimeout::Kill,
        "pause" => OnTimeout::Pause,
        other => return Err(unreadable(&reading.id, "on_timeout", other)),
    };
    let sandbox = Sandbox {
        id: reading.parse("id")?,
        template: reading.parse("template")?,
        isolation: reading.parse("isolation")?,
        limits: reading.json("limits")?,
        state: reading.parse::<State>("state")?,
        created_at: reading.time("created_at")?,
        started_at: reading.time("started_at")?,
        end_at: reading.time_or_none("end_at")?,
        on_timeout,
        env: reading.json("env")?,
        metadata: reading.json("metadata")?,
        // Ports of sandboxes from before there was a choice were open.
        ports: reading
            .parse_or_none("ports")?
            .unwrap_or(PortAccess::Public),
        e2b: reading.json_or_none("e2b")?.unwrap_or_default(),
        identity: reading.json_or_none("identity")?.unwrap_or_default(),
        access_token: Secret::new(reading.get::<&str>("access_token")?),
        gone: reading.json_or_none("gone")?,
        gone_at: reading.time_or_none("gone_at")?,
        oom_kills: u64::try_from(reading.get::<i64>("oom_kills")?).unwrap_or(0),
        time: reading.json_or_none("time")?.unwrap_or_default(),
    };
    Ok(Record {
        sandbox,
        pooled: reading.get::<i64>("pooled")? != 0,
        ward: reading.json_or_none("ward")?,
        network: reading.json_or_none("network")?,
    })
}

pub fn event(row: &SqliteRow) -> Result<Event> {
    let seq: i64 = row
        .try_get("seq")
        .map_err(|error| unreadable("?", "seq", error))?;
    let reading = Reading {
        row,
        id: format!("event {seq}"),
    };
    Ok(Event {
        seq,
        at: reading.time("at")?,
        sandbox_id: reading.parse("sandbox_id")?,
        kind: reading.json::<EventKind>("body")?,
    })
}
