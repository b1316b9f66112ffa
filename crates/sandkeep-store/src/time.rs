//! Steps into a pause and out of it.

use sandkeep_model::{BoxTime, Event, EventKind, Result, SandboxId, State, Timestamp};

use crate::{open::Store, rows, writer::Promise};

/// What becomes of the ward's note about a box.
#[derive(Debug, Clone, Copy)]
pub enum WardNote<'a> {
    Keep,
    Forget,
    Set(&'a serde_json::Value),
}

/// A step that also changes what the box knows about time.
#[derive(Debug, Clone)]
pub struct TimeStep<'a> {
    pub from: State,
    pub to: State,
    pub time: &'a BoxTime,
    pub ward: WardNote<'a>,
    pub end_at: Option<Timestamp>,
    /// Told in the same transaction, after the step itself.
    pub also: Option<EventKind>,
}

impl Store {
    /// Compare-and-set, all in one transaction. `false`: the box was not in `from`.
    pub async fn step(&self, id: &SandboxId, step: TimeStep<'_>) -> Result<bool> {
        let (replace, note) = match step.ward {
            WardNote::Keep => (0_i64, None),
            WardNote::Forget => (1, None),
            WardNote::Set(note) => (1, Some(rows::json(note)?)),
        };
        let query = sqlx::query(
            "UPDATE sandboxes SET state = $3, time = $4, end_at = $5, \
             ward = CASE WHEN $6 = 1 THEN $7 ELSE ward END \
             WHERE id = $1 AND state = $2",
        )
        .bind(id.as_str())
        .bind(step.from.name())
        .bind(step.to.name())
        .bind(rows::json(step.time)?)
        .bind(step.end_at.map(Timestamp::millis))
        .bind(replace)
        .bind(note);
        let moved = EventKind::State {
            from: Some(step.from),
            to: step.to,
            why: None,
            by: None,
        };
        // An acknowledged pause is kept, and a disk that may move on from its point is known to.
        let touched = step.time.pause.as_ref().is_some_and(|pause| pause.touched);
        let promise = if step.to == State::Paused || touched {
            Promise::Durable
        } else {
            Promise::Soon
        };
        let kinds: Vec<EventKind> = std::iter::once(moved).chain(step.also).collect();
        let told: Option<Vec<Event>> = self.change_many(id, query, &kinds, promise).await?;
        Ok(told.is_some())
    }

    /// Changes what a box knows about time without a step. `false`: it is gone.
    pub async fn set_time(&self, id: &SandboxId, time: &BoxTime) -> Result<bool> {
        let query = sqlx::query("UPDATE sandboxes SET time = $2 WHERE id = $1 AND state <> 'gone'")
            .bind(id.as_str())
            .bind(rows::json(time)?);
        Ok(self
            .change_many(id, query, &[], Promise::Soon)
            .await?
            .is_some())
    }
}
