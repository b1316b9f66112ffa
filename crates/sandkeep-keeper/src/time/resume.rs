//! Waking a box.

use std::{path::PathBuf, sync::Arc, time::Duration};

use sandkeep_model::{
    Code, Error, EventKind, Expiry, Pause, PauseMode, Point, PointKind, Result, Sandbox, State,
    TemplateName, Timestamp,
};
use sandkeep_store::{TimeStep, WardNote};
use sandkeep_ward::LiveBox;

use super::failed::Came;
use crate::{
    after_restore, agent, core::Core, form, isolation::Minimum, registry::Entry, sync::lock,
};

/// How a wake-up ends in the ledger.
pub(super) struct Awake {
    pub end_at: Option<Timestamp>,
    pub also: Option<EventKind>,
}

impl Core {
    /// Wakes a paused box. `NotFound` when it is gone, `Conflict` when it runs.
    pub async fn resume(
        &self,
        entry: &Arc<Entry>,
        expiry: Option<Expiry>,
        memory: bool,
    ) -> Result<Sandbox> {
        let came = entry.failed_wakes.came();
        let _turn = entry.turn.lock().await;
        match entry.state() {
            State::Paused => {}
            State::Stopping | State::Gone => return Err(Error::sandbox_not_found(&entry.id)),
            state => {
                return Err(Error::conflict(format!(
                    "sandbox \"{}\" is {state} already",
                    entry.id
                )));
            }
        }
        self.wake(entry, came, expiry, memory).await
    }

    /// Makes a box that wakes by itself run, once for all who ask at the same time.
    pub async fn wake_for_a_visit(&self, entry: &Arc<Entry>) -> Result<()> {
        let came = entry.failed_wakes.came();
        let _turn = entry.turn.lock().await;
        let (state, by_itself) = entry.with(|b| (b.state, b.time.auto_resume));
        match state {
            State::Paused if by_itself => self.wake(entry, came, None, true).await.map(drop),
            State::Running => Ok(()),
            State::Stopping | State::Gone => Err(Error::sandbox_not_found(&entry.id)),
            state => Err(
                Error::conflict(format!("sandbox \"{}\" is {state}", entry.id))
                    .hint("resume it with `sandkeep resume` or POST /v1/sandboxes/{id}/resume"),
            ),
        }
    }

    /// The caller has the turn and the box is paused.
    async fn wake(
        &self,
        entry: &Arc<Entry>,
        came: Came,
        expiry: Option<Expiry>,
        memory: bool,
    ) -> Result<Sandbox> {
        if let Some(error) = entry.failed_wakes.since(came, memory) {
            return Err(error);
        }
        let time = entry.with(|sandbox| sandbox.time.clone());
        let expiry = expiry.unwrap_or_else(|| match time.lease_seconds {
            Some(seconds) => Expiry::After(Duration::from_secs(seconds)),
            None => Expiry::Never,
        });
        let awake = Awake {
            end_at: self.first_end(Timestamp::now(), expiry)?,
            also: None,
        };
        let mut pause = time
            .pause
            .ok_or_else(|| Error::internal("a paused box without a pause"))?;
        if !memory {
            // Its files, and a cold start.
            pause.mode = PauseMode::Filesystem;
        }
        let woken = self.wake_from(entry, State::Paused, pause, awake).await;
        woken.inspect_err(|error| entry.failed_wakes.tell(error, memory))?;
        Ok(entry.sandbox())
    }

    /// The levels that a sandbox, and what it becomes from this point, must have at least.
    pub(super) async fn minima(
        &self,
        entry: &Entry,
        point: Option<&Point>,
    ) -> Result<[Option<Minimum>; 3]> {
        let own = entry.with(|sandbox| sandbox.template.clone());
        let of_template = async |name: &TemplateName| -> Result<Option<Minimum>> {
            let template = self.vault.template(name).await?;
            Ok(template.as_ref().and_then(Minimum::of_template))
        };
        Ok([
            of_template(&own).await?,
            match point {
                Some(point) if point.template != own => of_template(&point.template).await?,
                _ => None,
            },
            Minimum::of_policy(&entry.reach.egress().policy),
        ])
    }

    /// `from -> resuming -> running`, or `paused` when it does not work. What the pause names
    /// is looked at before anything is touched. The caller has the turn.
    pub(super) async fn wake_from(
        &self,
        entry: &Arc<Entry>,
        from: State,
        pause: Pause,
        awake: Awake,
    ) -> Result<()> {
        let point = match &pause.point {
            Some(id) => Some(self.point(id).await?),
            None => None,
        };
        // They may have been raised since it was made, and the point may be of another sandbox.
        self.levels.allow(
            entry.ward.level(),
            self.minima(entry, point.as_ref()).await?,
        )?;
        // Compared with its hashes once: it never changes.
        let memory = match &point {
            Some(point) if pause.mode == PauseMode::Disk => {
                self.usable(point, entry.ward.as_ref()).await?.memory
            }
            // Its memory is not asked for; whoever starts cold may have lost it.
            Some(point) => self.vault.point(&point.id).await.map(|_| None)?,
            None => None,
        };
        let was_touched = pause.touched;
        let mut time = entry.with(|sandbox| sandbox.time.clone());
        // From here on it may write to its disk.
        time.pause = Some(Pause {
            touched: pause.mode != PauseMode::Ram && pause.point.is_some(),
            ..pause.clone()
        });
        let step = TimeStep {
            from,
            to: State::Resuming,
            time: &time,
            ward: WardNote::Keep,
            end_at: entry.end_at(),
            also: None,
        };
        if !self.store.step(&entry.id, step).await? {
            return Err(Error::internal(
                "the ledger had the sandbox in another state",
            ));
        }
        entry.amend(|sandbox| sandbox.time = time);
        entry.became(State::Resuming);
        if from == State::Running {
            entry.activity.cut().await;
        }
        let up = self
            .bring_back(entry, &pause, point.as_ref(), memory, was_touched)
            .await;
        let written = match up {
            Ok(live) => self.woken(entry, live.as_ref(), awake).await,
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            tracing::warn!(id = %entry.id, %error, "a box could not be woken");
            self.back_to_rest(entry, &pause).await;
            let error = error.context(format!("waking sandbox \"{}\"", entry.id));
            return Err(
                if pause.mode == PauseMode::Disk && error.code == Code::Internal {
                    error.hint(
                        "its memory is kept as it is, and so are its files: resume it with \
                     {\"memory\": false} (`sandkeep resume --cold`) to start from the files",
                    )
                } else {
                    error
                },
            );
        }
        let used = pause.point.filter(|_| {
            point
                .as_ref()
                .is_some_and(|point| point.kind != PointKind::Pause)
        });
        self.drop_pauses_later(&entry.id, used.as_ref()).await;
        Ok(())
    }

    /// Processes that run, an agent that knows who it is, and a way out. `None`: they are the
    /// same as before.
    async fn bring_back(
        &self,
        entry: &Arc<Entry>,
        pause: &Pause,
        point: Option<&Point>,
        memory: Option<PathBuf>,
        was_touched: bool,
    ) -> Result<Option<LiveBox>> {
        let sandbox = entry.sandbox();
        if pause.mode == PauseMode::Ram {
            // It kept its moat, unless the server was started since. Nothing may get out before
            // the box has it again.
            if !entry.reach.attached() {
                self.attach(entry).await?;
            }
            entry.ward.thaw(&entry.id).await?;
            return Ok(None);
        }
        entry.reach.close();
        entry.ward.destroy(&entry.id).await?;
        let disk = match point {
            Some(point) if was_touched => {
                self.vault
                    .replace_disk(
                        &entry.id,
                        &point.id,
                        form::quota(entry.ward.as_ref(), &sandbox.limits),
                    )
                    .await?
            }
            _ => self.vault.disk(&entry.id).await?,
        };
        let Ok(_slot) = self.wakes.acquire().await else {
            return Err(Error::internal("the keeper is closed"));
        };
        let image = memory.filter(|_| pause.mode == PauseMode::Disk);
        if let Some(point) = point.filter(|_| image.is_some()) {
            entry.reach.comes_from(&point.id);
        }
        let mut request = agent::identity_of(&sandbox);
        // What it is now it was before, and may have gone on from there: after a rollback, and after
        // a wake-up that did not come to its end.
        let again = image.is_some() && was_touched;
        if again || image.is_none() {
            request = request.of_generation(agent::new_generation());
        }
        // At a point of another box it was that one, which may be there, too.
        if point.is_none_or(|point| point.sandbox_id == entry.id) {
            request = request.same_machine();
        }
        let (live, _agent) = self
            .start_on(entry, &sandbox, disk, image.as_deref(), &request)
            .await?;
        if again {
            after_restore::run(entry.ward.as_ref(), &sandbox).await?;
        }
        Ok(Some(live))
    }

    async fn woken(&self, entry: &Arc<Entry>, live: Option<&LiveBox>, awake: Awake) -> Result<()> {
        let mut time = entry.with(|sandbox| sandbox.time.clone());
        time.pause = None;
        if let Some(EventKind::RolledBack { to }) = &awake.also {
            time.head = Some(to.clone());
            // The disk began anew there.
            time.head_written = 0;
        }
        let step = TimeStep {
            from: State::Resuming,
            to: State::Running,
            time: &time,
            ward: live.map_or(WardNote::Keep, |live| WardNote::Set(&live.record)),
            end_at: awake.end_at,
            also: awake.also,
        };
        if !self.store.step(&entry.id, step).await? {
            return Err(Error::internal(
                "the ledger had the sandbox in another state",
            ));
        }
        entry.amend(|sandbox| {
            sandbox.time = time;
            sandbox.end_at = awake.end_at;
        });
        lock(&entry.trail).forget_cpu();
        entry.became(State::Running);
        entry.activity.touch();
        self.deadlines.moved(&entry.id, None, awake.end_at);
        Ok(())
    }

    /// A box that does not wake rests as it did.
    async fn back_to_rest(&self, entry: &Arc<Entry>, pause: &Pause) {
        entry.reach.close();
        let put_down = match pause.mode {
            PauseMode::Ram => entry.ward.freeze(&entry.id).await,
            PauseMode::Disk | PauseMode::Filesystem => entry.ward.destroy(&entry.id).await,
        };
        if let Err(error) = put_down {
            tracing::warn!(id = %entry.id, %error, "putting a box to rest again");
        }
        let (time, at) = entry.with(|sandbox| (sandbox.time.clone(), pause.at));
        let step = TimeStep {
            from: State::Resuming,
            to: State::Paused,
            time: &time,
            ward: match pause.mode {
                PauseMode::Ram => WardNote::Keep,
                PauseMode::Disk | PauseMode::Filesystem => WardNote::Forget,
            },
            end_at: Some(at),
            also: None,
        };
        match self.store.step(&entry.id, step).await {
            Ok(true) => entry.became(State::Paused),
            Ok(false) => tracing::error!(id = %entry.id, "the ledger had the box in another state"),
            Err(error) => {
                tracing::warn!(id = %entry.id, %error, "a box rests without the ledger");
                entry.rests_unwritten();
            }
        }
        self.deadlines.moved(&entry.id, entry.end_at(), None);
        entry.amend(|sandbox| sandbox.end_at = Some(at));
    }
}
