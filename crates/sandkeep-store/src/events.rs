//! Writing events: numbered inside the transaction they tell about.

use sandkeep_model::{Event, EventKind, Result, SandboxId, Timestamp};
use sqlx::{Row, SqliteConnection};

use crate::{fault, open::Store, rows};

/// Writes one event per box, numbered in order.
pub async fn write(
    connection: &mut SqliteConnection,
    at: Timestamp,
    kinds: &[(&SandboxId, EventKind)],
) -> Result<Vec<Event>> {
    let count = i64::try_from(kinds.len()).unwrap_or(i64::MAX);
    let last: i64 =
        sqlx::query("UPDATE meta SET value = value + $1 WHERE name = 'event_seq' RETURNING value")
            .bind(count)
            .fetch_one(&mut *connection)
            .await
            .map_err(|error| fault::ledger(&error))?
            .get(0);
    let mut events = Vec::with_capacity(kinds.len());
    for (seq, (id, kind)) in (last - count + 1..).zip(kinds) {
        let event = Event {
            seq,
            at,
            sandbox_id: (*id).clone(),
            kind: kind.clone(),
        };
        sqlx::query(
            "INSERT INTO events (seq, at, sandbox_id, kind, body) VALUES ($1, $2, $3, $4, $5)",
        )
        .bind(event.seq)
        .bind(event.at.millis())
        .bind(event.sandbox_id.as_str())
        .bind(event.kind.name())
        .bind(rows::json(&event.kind)?)
        .execute(&mut *connection)
        .await
        .map_err(|error| fault::ledger(&error))?;
        events.push(event);
    }
    Ok(events)
}

impl Store {
    /// Events after `seq`, oldest first, at most `limit`; optionally of one box.
    pub async fn events_after(
        &self,
        seq: i64,
        id: Option<&SandboxId>,
        limit: u32,
    ) -> Result<Vec<Event>> {
        let query = match id {
            Some(id) => sqlx::query(
                "SELECT seq, at, sandbox_id, body FROM events \
                 WHERE seq > $1 AND sandbox_id = $3 ORDER BY seq LIMIT $2",
            )
            .bind(seq)
            .bind(i64::from(limit))
            .bind(id.as_str()),
            None => sqlx::query(
                "SELECT seq, at, sandbox_id, body FROM events \
                 WHERE seq > $1 ORDER BY seq LIMIT $2",
            )
            .bind(seq)
            .bind(i64::from(limit)),
        };
        query
            .fetch_all(&self.inner.readers)
            .await
            .map_err(|error| fault::ledger(&error))?
            .iter()
            .map(rows::event)
            .collect()
    }

    /// The number of the newest event there ever was.
    pub async fn last_event(&self) -> Result<i64> {
        sqlx::query_scalar("SELECT value FROM meta WHERE name = 'event_seq'")
            .fetch_one(&self.inner.readers)
            .await
            .map_err(|error| fault::ledger(&error))
    }
}
