//! The end of a box's time.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use sandkeep_model::{
    Error, Expiry, GoneReason, OnTimeout, Result, Sandbox, SandboxId, State, Timestamp,
};
use tokio::sync::{Notify, Semaphore};

use crate::{core::Core, registry::Entry, sync::lock};

/// The shortest time a new box may be given.
const LEAST: Duration = Duration::from_secs(1);
/// Whoever wants longer wants no end.
const MOST: Duration = Duration::from_secs(3650 * 24 * 3600);
/// The wall clock may be set while we sleep; look again this often.
const LOOK_AGAIN: Duration = Duration::from_secs(10);
/// A box that could not be paused at its end is tried again after this.
const TRY_AGAIN: Duration = Duration::from_secs(30);
/// Boxes ended at the same time when many expire together.
const AT_ONCE: usize = 8;

/// When which box ends, soonest first. Each box is in it at most once.
#[derive(Default)]
pub struct Deadlines {
    ends: Mutex<BTreeSet<(Timestamp, SandboxId)>>,
    wake: Notify,
}

impl Deadlines {
    /// Replaces the box's end.
    pub fn moved(&self, id: &SandboxId, from: Option<Timestamp>, to: Option<Timestamp>) {
        let mut ends = lock(&self.ends);
        if let Some(from) = from {
            ends.remove(&(from, id.clone()));
        }
        if let Some(to) = to {
            ends.insert((to, id.clone()));
            self.wake.notify_one();
        }
    }

    /// Takes out all that are due.
    fn due(&self) -> Vec<SandboxId> {
        let now = Timestamp::now();
        let mut ends = lock(&self.ends);
        let mut due = Vec::new();
        while ends.first().is_some_and(|(end, _)| *end <= now) {
            due.extend(ends.pop_first().map(|(_, id)| id));
        }
        due
    }

    /// Until the next one is due, or something changed.
    async fn wait(&self) {
        let next = lock(&self.ends).first().map(|(end, _)| end.remaining());
        let pause = next.map_or(LOOK_AGAIN, |next| next.min(LOOK_AGAIN));
        let _ = tokio::time::timeout(pause, self.wake.notified()).await;
    }
}

impl Core {
    /// The end a new box gets; refuses what may not be asked for.
    pub fn first_end(&self, now: Timestamp, expiry: Expiry) -> Result<Option<Timestamp>> {
        if let Expiry::After(time) = expiry
            && time < LEAST
        {
            return Err(Error::invalid(
                "timeout",
                format!("a sandbox must live at least {} s", LEAST.as_secs()),
            )
            .hint("ask for a longer timeout"));
        }
        self.end_of(now, now, expiry)
    }

    /// `now + expiry`, at most the longest life counted from its start.
    fn end_of(
        &self,
        started_at: Timestamp,
        now: Timestamp,
        expiry: Expiry,
    ) -> Result<Option<Timestamp>> {
        let most = self.config.max_lifetime;
        let time = match expiry {
            Expiry::Never => {
                return match most {
                    None => Ok(None),
                    Some(most) => Err(Error::invalid(
                        "timeout",
                        format!(
                            "a sandbox without an end is not allowed here, the longest is {} s",
                            most.as_secs()
                        ),
                    )
                    .hint("ask for a timeout, or let the operator unset `max_lifetime`")),
                };
            }
            Expiry::After(time) => time,
        };
        let bound = most.unwrap_or(MOST);
        if time > bound {
            return Err(Error::invalid(
                "timeout",
                format!(
                    "a timeout of {} s is longer than the longest, {} s",
                    time.as_secs(),
                    bound.as_secs()
                ),
            )
            .hint(if most.is_some() {
                "ask for less, or let the operator raise `max_lifetime`"
            } else {
                "ask for less, or for no end at all"
            }));
        }
        let end = now.plus(time);
        Ok(Some(
            most.map_or(end, |most| end.min(started_at.plus(most))),
        ))
    }

    /// Moves the end of a running box; `only_later` leaves a later one as it is.
    pub async fn move_end(
        &self,
        id: &SandboxId,
        expiry: Expiry,
        only_later: bool,
    ) -> Result<Sandbox> {
        let entry = self.registry.owned(id)?;
        let _turn = entry.turn.lock().await;
        match entry.state() {
            State::Running => {}
            State::Gone | State::Stopping => return Err(Error::sandbox_not_found(id)),
            state => {
                return Err(Error::conflict(format!(
                    "sandbox \"{id}\" is {state}, its end can not be moved now"
                )));
            }
        }
        let before = entry.end_at();
        let end_at = self.end_of(entry.with(|b| b.started_at), Timestamp::now(), expiry)?;
        if !only_later {
            self.keep_lease(&entry, expiry).await?;
        }
        let is_later = match (before, end_at) {
            (None, _) => false,
            (Some(_), None) => true,
            (Some(before), Some(end)) => end > before,
        };
        if before == end_at || (only_later && !is_later) {
            return Ok(entry.sandbox());
        }
        if self.store.set_end(id, end_at).await?.is_none() {
            return Err(Error::sandbox_not_found(id));
        }
        entry.amend(|sandbox| sandbox.end_at = end_at);
        self.deadlines.moved(id, before, end_at);
        Ok(entry.sandbox())
    }

    /// The time somebody gave it last is what it gets again when it wakes.
    async fn keep_lease(&self, entry: &Entry, expiry: Expiry) -> Result<()> {
        let lease = match expiry {
            Expiry::Never => None,
            Expiry::After(time) => Some(time.as_secs().max(LEAST.as_secs())),
        };
        let mut time = entry.with(|sandbox| sandbox.time.clone());
        if time.lease_seconds == lease {
            return Ok(());
        }
        time.lease_seconds = lease;
        if !self.store.set_time(&entry.id, &time).await? {
            return Err(Error::sandbox_not_found(&entry.id));
        }
        entry.amend(|sandbox| sandbox.time.lease_seconds = lease);
        Ok(())
    }

    /// Ends boxes that were paused for longer than they may be.
    fn end_long_paused(self: &Arc<Self>) {
        let most = self.config.paused_limit;
        for entry in self.registry.all() {
            let over = move |sandbox: &Sandbox| {
                let own = sandbox.time.paused_limit_seconds.map(Duration::from_secs);
                let limit = own.into_iter().chain(most).min();
                let since = sandbox.time.pause.as_ref().map(|pause| pause.at);
                sandbox.state == State::Paused
                    && limit
                        .zip(since)
                        .is_some_and(|(limit, since)| since.plus(limit).has_passed())
            };
            if !entry.with(over) {
                continue;
            }
            let core = Arc::clone(self);
            self.tasks.spawn(async move {
                // It may have been woken meanwhile.
                let ended = core
                    .stop_if(&entry, GoneReason::PausedTooLong, None, over)
                    .await;
                if let Err(error) = ended {
                    tracing::debug!(id = %entry.id, %error, "ending a box that was paused for long");
                }
            });
        }
    }

    /// A box that could not be paused runs on; nothing of it may be lost.
    fn pause_again_later(&self, entry: &Entry) {
        if entry.state() == State::Running {
            let soon = Timestamp::now().plus(TRY_AGAIN);
            self.deadlines.moved(&entry.id, None, Some(soon));
        }
    }

    /// The end of a box that gets the time it was made with once more.
    pub fn lease_end(&self, entry: &Entry, now: Timestamp) -> Result<Option<Timestamp>> {
        let lease = entry.with(|sandbox| sandbox.time.lease_seconds);
        let expiry = lease.map_or(Expiry::Never, |seconds| {
            Expiry::After(Duration::from_secs(seconds))
        });
        self.first_end(now, expiry)
    }

    /// Ends or pauses boxes whose time is over, for ever.
    pub async fn expire(self: Arc<Self>) {
        let slots = Arc::new(Semaphore::new(AT_ONCE));
        loop {
            for id in self.deadlines.due() {
                let Some(entry) = self.registry.find(&id) else {
                    continue;
                };
                let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
                    return;
                };
                let core = Arc::clone(&self);
                self.tasks.spawn(async move {
                    let _slot = slot;
                    let still_due =
                        |sandbox: &Sandbox| sandbox.end_at.is_some_and(Timestamp::has_passed);
                    let (on_timeout, memory) =
                        entry.with(|b| (b.on_timeout, !b.time.pause_files_only));
                    if on_timeout == OnTimeout::Pause {
                        if let Err(error) = core.pause_if(&entry, memory, still_due).await {
                            tracing::warn!(id = %entry.id, %error, "pausing a box at its end");
                            core.pause_again_later(&entry);
                        }
                        return;
                    }
                    // A box that rests has no end.
                    let runs =
                        |sandbox: &Sandbox| sandbox.state == State::Running && still_due(sandbox);
                    if let Err(error) = core.stop_if(&entry, GoneReason::Expired, None, runs).await
                    {
                        tracing::debug!(id = %entry.id, %error, "expiring a box");
                    }
                });
            }
            self.end_long_paused();
            tokio::select! {
                () = self.closing.cancelled() => return,
                () = self.deadlines.wait() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_is_due_once_and_at_its_latest_end() {
        let deadlines = Deadlines::default();
        let (a, b) = (SandboxId::random(), SandboxId::random());
        let past = Timestamp::from_millis(1);
        let future = Timestamp::now().plus(Duration::from_secs(3600));
        deadlines.moved(&a, None, Some(past));
        deadlines.moved(&b, None, Some(past));
        deadlines.moved(&a, Some(past), Some(future));
        assert_eq!(deadlines.due(), [b]);
        assert!(deadlines.due().is_empty());
        deadlines.moved(&a, Some(future), None);
        assert!(lock(&deadlines.ends).is_empty());
    }
}
