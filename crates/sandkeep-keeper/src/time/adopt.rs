//! Boxes that were resting, or on their way there or back, when the server died.

use std::{sync::Arc, time::Duration};

use sandkeep_model::{Pause, PauseMode, Result, State};
use sandkeep_store::{TimeStep, WardNote};
use sandkeep_ward::{Adoption, LiveBox};

use crate::{core::Core, registry::Entry};

/// Writing a box takes a second or two.
const UNPAUSED: Duration = Duration::from_secs(2);

/// What a ward has of a box that rests.
pub enum Rest {
    /// Frozen processes: the ward must know it.
    Frozen,
    /// Files alone; whatever processes are left of it are swept.
    OnDisk,
}

impl Core {
    /// A `pausing` box that lives goes on, as soon as nobody writes it any more. Who does takes
    /// longer only if something is wrong: then the others do not wait for it, and whoever wants
    /// something of the box waits for its turn.
    pub async fn unpause(&self, entry: &Arc<Entry>) {
        let Some(core) = self.me.upgrade() else {
            return;
        };
        let entry = Arc::clone(entry);
        let going_on = self.tasks.spawn(async move {
            let _turn = entry.turn.lock().await;
            let released = entry.ward.released(&entry.id);
            // A server that ends leaves it to the next one.
            let Some(released) = core.closing.run_until_cancelled(released).await else {
                return;
            };
            if let Err(error) = released {
                tracing::error!(id = %entry.id, %error, "somebody still writes an adopted box");
            }
            core.go_on(&entry).await;
            // What was being written was half-made when this server looked for such things.
            if let Err(error) = core.vault.tidy().await {
                tracing::warn!(%error, "tidying the vault");
            }
        });
        if tokio::time::timeout(UNPAUSED, going_on).await.is_err() {
            tracing::warn!("a box of an earlier run is still being written; the others go on");
        }
    }

    /// A `paused` or `resuming` box rests; says how.
    pub async fn find_resting(
        &self,
        entry: &Entry,
        note: Option<serde_json::Value>,
    ) -> Result<Rest> {
        let state = entry.state();
        let mut time = entry.with(|sandbox| sandbox.time.clone());
        let pause = time.pause.get_or_insert_with(|| Pause {
            mode: PauseMode::Filesystem,
            why: Some("the ledger does not tell how it was paused".to_owned()),
            point: None,
            touched: false,
            at: sandkeep_model::Timestamp::now(),
        });
        if pause.mode == PauseMode::Ram {
            if self.hold_frozen(entry, note).await {
                self.rests(entry, state, &time, WardNote::Keep).await?;
                return Ok(Rest::Frozen);
            }
            // Its files are all that is left; that beats losing it.
            pause.mode = PauseMode::Filesystem;
            pause.why =
                Some("its memory was lost: the host was restarted while it was frozen".to_owned());
            self.rests(entry, state, &time, WardNote::Forget).await?;
            return Ok(Rest::OnDisk);
        }
        self.rests(entry, state, &time, WardNote::Forget).await?;
        Ok(Rest::OnDisk)
    }

    async fn hold_frozen(&self, entry: &Entry, note: Option<serde_json::Value>) -> bool {
        let Some(record) = note else {
            return false;
        };
        let live = LiveBox {
            id: entry.id.clone(),
            record,
        };
        match entry.ward.adopt(&live).await {
            Ok(Adoption::Alive) => {}
            Ok(Adoption::Gone) => return false,
            Err(error) => {
                tracing::warn!(id = %entry.id, %error, "a frozen box could not be adopted");
                return false;
            }
        }
        if let Err(error) = entry.ward.freeze(&entry.id).await {
            tracing::warn!(id = %entry.id, %error, "freezing an adopted box");
        }
        true
    }

    async fn rests(
        &self,
        entry: &Entry,
        from: State,
        time: &sandkeep_model::BoxTime,
        ward: WardNote<'_>,
    ) -> Result<()> {
        let at = time.pause.as_ref().map(|pause| pause.at);
        if from != State::Paused || entry.with(|sandbox| sandbox.time != *time) {
            let step = TimeStep {
                from,
                to: State::Paused,
                time,
                ward,
                end_at: at,
                also: None,
            };
            self.store.step(&entry.id, step).await?;
        }
        entry.amend(|sandbox| {
            sandbox.time = time.clone();
            sandbox.end_at = at;
        });
        entry.became(State::Paused);
        Ok(())
    }

    /// What was being woken is woken after all.
    pub fn wake_later(&self, entry: &Arc<Entry>) {
        let Some(core) = self.me.upgrade() else {
            return;
        };
        let entry = Arc::clone(entry);
        self.tasks.spawn(async move {
            if let Err(error) = core.resume(&entry, None, true).await {
                tracing::warn!(id = %entry.id, %error, "a box could not be woken after a restart");
            }
        });
    }
}
