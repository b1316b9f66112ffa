//! Back to what a box was: the same id, the same URLs, the same tokens.

use std::sync::Arc;

use sandkeep_model::{
    Error, EventKind, Pause, PauseMode, PointId, Result, Sandbox, State, Timestamp,
};

use super::resume::Awake;
use crate::{core::Core, registry::Entry};

impl Core {
    /// Whatever the box is now is given up. It runs when this returns; when it can not be
    /// made to run it rests at the point.
    pub async fn rollback(&self, entry: &Arc<Entry>, to: &PointId) -> Result<Sandbox> {
        let point = self.point(to).await?;
        if point.isolation != entry.ward.level() && point.has_memory() {
            return Err(Error::conflict(format!(
                "point \"{to}\" holds memory of isolation level {}, sandbox \"{}\" is of level {}",
                point.isolation,
                entry.id,
                entry.ward.level()
            )));
        }
        let _turn = entry.turn.lock().await;
        let from = entry.state();
        match from {
            State::Running | State::Paused => {}
            State::Stopping | State::Gone => return Err(Error::sandbox_not_found(&entry.id)),
            state => {
                return Err(
                    Error::conflict(format!("sandbox \"{}\" is {state}", entry.id)).retryable(true),
                );
            }
        }
        let now = Timestamp::now();
        let end_at = match from {
            State::Running => entry.end_at(),
            _ => self.lease_end(entry, now)?,
        };
        let pause = Pause {
            mode: if point.has_memory() {
                PauseMode::Disk
            } else {
                PauseMode::Filesystem
            },
            why: None,
            point: Some(point.id.clone()),
            touched: true,
            at: now,
        };
        let awake = Awake {
            end_at,
            also: Some(EventKind::RolledBack { to: to.clone() }),
        };
        self.wake_from(entry, from, pause, awake).await?;
        Ok(entry.sandbox())
    }
}
