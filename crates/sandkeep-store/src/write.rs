//! Every change, each in one transaction together with its event.

use sandkeep_model::{
    Error, Event, EventKind, GoneReason, Isolation, Result, SandboxId, State, Timestamp,
};
use sqlx::{Sqlite, SqliteConnection};

use crate::{
    events, fault,
    open::Store,
    rows::{self, Claim, NewBox},
    writer::Promise,
};

pub(crate) type Query<'q> = sqlx::query::Query<'q, Sqlite, sqlx::sqlite::SqliteArguments>;

impl Store {
    /// Runs one change. When it touched a row its event is written with it, and rung while
    /// the writer is still held. `None`: the row was not as the change expects it.
    async fn change(
        &self,
        id: &SandboxId,
        query: Query<'_>,
        kind: Option<EventKind>,
    ) -> Result<Option<Option<Event>>> {
        let mut writer = self.inner.writer.lock().await;
        let done = one_change(writer.begin(Promise::Soon).await?, id, query, kind).await;
        let Ok(Some(event)) = done else {
            writer.rollback().await;
            return done;
        };
        writer.commit().await?;
        if let Some(event) = &event {
            // Nobody listening is no error.
            let _ = self.inner.bell.send(event.clone());
        }
        Ok(Some(event))
    }

    /// Like [`Store::change`] with any number of events, and a promise.
    pub(crate) async fn change_many(
        &self,
        id: &SandboxId,
        query: Query<'_>,
        kinds: &[EventKind],
        promise: Promise,
    ) -> Result<Option<Vec<Event>>> {
        self.change_after(Vec::new(), id, query, kinds, promise)
            .await
    }

    /// Like [`Store::change_many`], with changes before it in the same transaction that may
    /// find nothing to do.
    pub(crate) async fn change_after(
        &self,
        before: Vec<Query<'_>>,
        id: &SandboxId,
        query: Query<'_>,
        kinds: &[EventKind],
        promise: Promise,
    ) -> Result<Option<Vec<Event>>> {
        let mut writer = self.inner.writer.lock().await;
        let connection = writer.begin(promise).await?;
        let done = async {
            for before in before {
                before
                    .execute(&mut *connection)
                    .await
                    .map_err(|error| refused(&error))?;
            }
            let done = query
                .execute(&mut *connection)
                .await
                .map_err(|error| refused(&error))?;
            if done.rows_affected() == 0 {
                return Ok(None);
            }
            let told: Vec<_> = kinds.iter().map(|kind| (id, kind.clone())).collect();
            events::write(connection, Timestamp::now(), &told)
                .await
                .map(Some)
        }
        .await;
        let Ok(Some(told)) = done else {
            writer.rollback().await;
            return done;
        };
        writer.commit().await?;
        for event in &told {
            let _ = self.inner.bell.send(event.clone());
        }
        Ok(Some(told))
    }

    /// Like [`Store::change`] for changes that always have an event.
    async fn change_told(
        &self,
        id: &SandboxId,
        query: Query<'_>,
        kind: EventKind,
    ) -> Result<Option<Event>> {
        Ok(self.change(id, query, Some(kind)).await?.flatten())
    }

    /// A box begins, in the state its [`sandkeep_model::Sandbox`] says. A pooled box has no
    /// events: it does not exist for clients.
    pub async fn insert(&self, new: NewBox<'_>) -> Result<Option<Event>> {
        let sandbox = new.sandbox;
        let query = sqlx::query(
            "INSERT INTO sandboxes (id, template, isolation, limits, state, pooled, created_at, \
             started_at, end_at, on_timeout, env, metadata, access_token, oom_kills, \
             idempotency_key, idempotency_hash, network, identity, time, ports, e2b) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, 0, $14, $15, $16, $17, $18, $19, $20)",
        )
        .bind(sandbox.id.as_str())
        .bind(sandbox.template.as_str())
        .bind(sandbox.isolation.name())
        .bind(rows::json(&sandbox.limits)?)
        .bind(sandbox.state.name())
        .bind(i64::from(new.pooled))
        .bind(sandbox.created_at.millis())
        .bind(sandbox.started_at.millis())
        .bind(sandbox.end_at.map(Timestamp::millis))
        .bind(rows::on_timeout_name(sandbox.on_timeout))
        .bind(rows::json(&sandbox.env)?)
        .bind(rows::json(&sandbox.metadata)?)
        .bind(sandbox.access_token.expose())
        .bind(new.idempotency.map(|given| given.key.as_str()))
        .bind(new.idempotency.map(|given| given.hash.as_str()))
        .bind(new.network.map(rows::json).transpose()?)
.bind(rows::identity(&sandbox.identity)?)
.bind(rows::json(&sandbox.time)?)
.bind(sandbox.ports.name())
        .bind(rows::e2b(&sandbox.e2b)?);
        let kind = (!new.pooled).then_some(EventKind::State {
            from: None,
            to: sandbox.state,
            why: None,
            by: new.by.map(str::to_owned),
        });
        Ok(self.change(&sandbox.id, query, kind).await?.flatten())
    }

    /// `creating -> running` with the ward's note. `false`: it was not `creating`.
    pub async fn mark_running(
        &self,
        id: &SandboxId,
        ward: &serde_json::Value,
        started_at: Timestamp,
        end_at: Option<Timestamp>,
        pooled: bool,
    ) -> Result<bool> {
        let query = sqlx::query(
            "UPDATE sandboxes SET state = 'running', ward = $2, started_at = $3, end_at = $4 \
             WHERE id = $1 AND state = 'creating'",
        )
        .bind(id.as_str())
        .bind(rows::json(ward)?)
        .bind(started_at.millis())
        .bind(end_at.map(Timestamp::millis));
        let kind = (!pooled).then_some(EventKind::State {
            from: Some(State::Creating),
            to: State::Running,
            why: None,
            by: None,
        });
        Ok(self.change(id, query, kind).await?.is_some())
    }

    /// A pooled box becomes somebody's, in one transaction. `None`: it is not pooled (any more).
    pub async fn claim(&self, claim: &Claim<'_>) -> Result<Option<Event>> {
        let query = sqlx::query(
            "UPDATE sandboxes SET pooled = 0, limits = $2, started_at = $3, end_at = $4, \
             on_timeout = $5, env = $6, metadata = $7, access_token = $8, \
             idempotency_key = $9, idempotency_hash = $10, network = $11, identity = $12, time = $13, \
             ports = $14, e2b = $15 \
             WHERE id = $1 AND pooled = 1 AND state = 'running'",
        )
        .bind(claim.id.as_str())
        .bind(rows::json(claim.limits)?)
        .bind(claim.started_at.millis())
        .bind(claim.end_at.map(Timestamp::millis))
        .bind(rows::on_timeout_name(claim.on_timeout))
        .bind(rows::json(claim.env)?)
        .bind(rows::json(claim.metadata)?)
        .bind(claim.access_token.expose())
        .bind(claim.idempotency.map(|given| given.key.as_str()))
        .bind(claim.idempotency.map(|given| given.hash.as_str()))
        .bind(claim.network.map(rows::json).transpose()?)
.bind(rows::identity(claim.identity)?)
.bind(rows::json(claim.time)?)
.bind(claim.ports.name())
        .bind(rows::e2b(claim.e2b)?);
        let kind = EventKind::State {
            from: None,
            to: State::Running,
            why: None,
            by: claim.by.map(str::to_owned),
        };
        self.change_told(claim.id, query, kind).await
    }

    /// Compare-and-set: `from -> to`. `None`: the box was not in `from`.
    pub async fn transition(
        &self,
        id: &SandboxId,
        from: State,
        to: State,
    ) -> Result<Option<Event>> {
        let query = sqlx::query("UPDATE sandboxes SET state = $3 WHERE id = $1 AND state = $2")
            .bind(id.as_str())
            .bind(from.name())
            .bind(to.name());
        let kind = EventKind::State {
            from: Some(from),
            to,
            why: None,
            by: None,
        };
        self.change_told(id, query, kind).await
    }

    /// `from -> stopping`, with the reason written down already: a server that comes back
    /// in the middle knows what it was finishing.
    pub async fn begin_stop(
        &self,
        id: &SandboxId,
        from: State,
        why: &GoneReason,
        by: Option<&str>,
    ) -> Result<Option<Event>> {
        let query = sqlx::query(
            "UPDATE sandboxes SET state = 'stopping', gone = $3 WHERE id = $1 AND state = $2",
        )
        .bind(id.as_str())
        .bind(from.name())
        .bind(rows::json(why)?);
        let kind = EventKind::State {
            from: Some(from),
            to: State::Stopping,
            why: None,
            by: by.map(str::to_owned),
        };
        self.change_told(id, query, kind).await
    }

    /// `from -> gone`. A box that never came up gives its idempotency key back, so that the
    /// same request may be tried again.
    pub async fn finish(
        &self,
        id: &SandboxId,
        from: State,
        why: &GoneReason,
    ) -> Result<Option<Event>> {
        let never_was = matches!(
            why,
            GoneReason::CreateFailed { .. } | GoneReason::CreateInterrupted
        );
        let query = sqlx::query(
            "UPDATE sandboxes SET state = 'gone', gone = $3, gone_at = $4, ward = NULL, \
             idempotency_key = CASE WHEN $5 = 1 THEN NULL ELSE idempotency_key END \
             WHERE id = $1 AND state = $2",
        )
        .bind(id.as_str())
        .bind(from.name())
        .bind(rows::json(why)?)
        .bind(Timestamp::now().millis())
        .bind(i64::from(never_was));
        let kind = EventKind::State {
            from: Some(from),
            to: State::Gone,
            why: Some(why.clone()),
            by: None,
        };
        self.change_told(id, query, kind).await
    }

    /// Moves the end of a running box.
    pub async fn set_end(
        &self,
        id: &SandboxId,
        end_at: Option<Timestamp>,
    ) -> Result<Option<Event>> {
        let query =
            sqlx::query("UPDATE sandboxes SET end_at = $2 WHERE id = $1 AND state = 'running'")
                .bind(id.as_str())
                .bind(end_at.map(Timestamp::millis));
        self.change_told(id, query, EventKind::ExpiryChanged { end_at })
            .await
    }

    /// Sets what a running box may reach. `None`: it does not run.
    pub async fn set_network(
        &self,
        id: &SandboxId,
        network: &serde_json::Value,
        rules: u32,
        by: Option<&str>,
    ) -> Result<Option<Event>> {
        let query =
            sqlx::query("UPDATE sandboxes SET network = $2 WHERE id = $1 AND state = 'running'")
                .bind(id.as_str())
                .bind(rows::json(network)?);
        let kind = EventKind::NetworkChanged {
            rules,
            by: by.map(str::to_owned),
        };
        self.change_told(id, query, kind).await
    }

    /// Notes kills by the kernel. `None` when as many were known already.
    pub async fn set_oom_kills(&self, id: &SandboxId, kills: u64) -> Result<Option<Event>> {
        let query = sqlx::query(
            "UPDATE sandboxes SET oom_kills = $2 \
             WHERE id = $1 AND oom_kills < $2 AND state <> 'gone'",
        )
        .bind(id.as_str())
        .bind(i64::try_from(kills).unwrap_or(i64::MAX));
        self.change_told(id, query, EventKind::OutOfMemory { kills })
            .await
    }

    /// Notes boxes found alive after a restart, all in one transaction.
    pub async fn note_adopted(&self, ids: &[SandboxId]) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        let kinds: Vec<_> = ids.iter().map(|id| (id, EventKind::Adopted)).collect();
        self.note(&kinds).await
    }

    /// Writes events that change nothing, all in one transaction.
    pub async fn note(&self, kinds: &[(&SandboxId, EventKind)]) -> Result<()> {
        let mut writer = self.inner.writer.lock().await;
        let written =
            events::write(writer.begin(Promise::Soon).await?, Timestamp::now(), kinds).await?;
        writer.commit().await?;
        for event in written {
            let _ = self.inner.bell.send(event);
        }
        Ok(())
    }

    /// Forgets a box that was never anybody's.
    pub async fn forget_pooled(&self, id: &SandboxId) -> Result<bool> {
        let query =
            sqlx::query("DELETE FROM sandboxes WHERE id = $1 AND pooled = 1").bind(id.as_str());
        Ok(self.change(id, query, None).await?.is_some())
    }

    /// How many boxes that are not gone each level has.
    pub async fn levels_in_use(&self) -> Result<Vec<(Isolation, u64)>> {
        let found: Vec<(String, i64)> = sqlx::query_as(
            "SELECT isolation, COUNT(*) FROM sandboxes WHERE state <> 'gone' GROUP BY isolation",
        )
        .fetch_all(&self.inner.readers)
        .await
        .map_err(|error| fault::ledger(&error))?;
        found
            .into_iter()
            .map(|(level, count)| Ok((level.parse()?, u64::try_from(count).unwrap_or(0))))
            .collect()
    }
}

/// The change and its event; `None` when no row was as expected.
async fn one_change(
    connection: &mut SqliteConnection,
    id: &SandboxId,
    query: Query<'_>,
    kind: Option<EventKind>,
) -> Result<Option<Option<Event>>> {
    let done = query
        .execute(&mut *connection)
        .await
        .map_err(|error| refused(&error))?;
    if done.rows_affected() == 0 {
        return Ok(None);
    }
    let Some(kind) = kind else {
        return Ok(Some(None));
    };
    let event = events::write(connection, Timestamp::now(), &[(id, kind)])
        .await?
        .pop();
    Ok(Some(event))
}

fn refused(error: &sqlx::Error) -> Error {
    if fault::is_duplicate(error) {
        return Error::conflict("a sandbox with this id or idempotency key is there already")
            .hint("use another idempotency key");
    }
    fault::ledger(error)
}
