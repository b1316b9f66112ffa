//! What the keeper offers about time.

use std::sync::Arc;

use sandkeep_model::{Error, Expiry, Point, PointId, Result, Sandbox, SandboxId, State};
use sandkeep_vault::Diff;

use crate::Keeper;

/// How deep a pause is to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PauseWish {
    /// With processes and memory.
    Memory,
    /// Files alone; processes end.
    Files,
}

/// A point somebody asks for.
#[derive(Debug, Clone, Default)]
pub struct PointWish {
    pub name: Option<String>,
    pub tags: Vec<String>,
    /// `None`: with memory where the level can.
    pub memory: Option<bool>,
}

#[derive(Debug, Clone)]
pub struct ForkWish {
    pub count: u32,
    /// `None`: from what the box is now.
    pub at: Option<PointId>,
    /// `None`: as long as the source was given.
    pub expiry: Option<Expiry>,
    /// `None`: with memory where the level can. `Some(true)`: no forks without.
    pub memory: Option<bool>,
}

/// What came of a wish for forks.
#[derive(Debug)]
pub struct Forked {
    /// One for each that was asked for: one that fails does not take the others along.
    pub made: Vec<Result<Sandbox>>,
    /// Whether they went on with processes and memory, or began anew from the files.
    pub memory: bool,
    /// Why memory that was wished for is not there.
    pub why: Option<String>,
}

/// What a box was, and where it and others are in that.
#[derive(Debug, Clone)]
pub struct Timeline {
    /// Of the box, and of those it came from; oldest first.
    pub points: Vec<Point>,
    /// The box itself, and living boxes that came from one of these points.
    pub boxes: Vec<Place>,
}

/// Where in time a box is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub sandbox_id: SandboxId,
    pub state: State,
    /// The point it came from or went through last.
    pub at: Option<PointId>,
}

impl Keeper {
    /// Puts a running box to rest. The answer tells how deep that went and why not deeper.
    pub async fn pause(&self, id: &SandboxId, wish: PauseWish) -> Result<Sandbox> {
        let core = Arc::clone(&self.core);
        let entry = core.registry.owned(id)?;
        let memory = wish == PauseWish::Memory;
        entry.auto.settled().await;
        self.core
            .finish(async move { core.pause_if(&entry, memory, |_| true).await })
            .await
    }

    /// Wakes a paused box; `Conflict` when it runs. Without a word about its end it gets the
    /// time it was given last. `memory: false` starts it cold from its files.
    pub async fn resume(
        &self,
        id: &SandboxId,
        expiry: Option<Expiry>,
        memory: bool,
    ) -> Result<Sandbox> {
        let core = Arc::clone(&self.core);
        let entry = core.registry.owned(id)?;
        self.core
            .finish(async move { core.resume(&entry, expiry, memory).await })
            .await
    }

    /// Returns when the box runs: wakes it if it wakes by itself, waits if it is on its way.
    pub async fn awake(&self, id: &SandboxId) -> Result<()> {
        let entry = self.core.registry.owned(id)?;
        if entry.state() == State::Running {
            return Ok(());
        }
        let core = Arc::clone(&self.core);
        self.core
            .finish(async move { core.wake_for_a_visit(&entry).await })
            .await
    }

    /// Returns when the box runs, without waking it; `NotFound` when it ends instead.
    pub async fn running_again(&self, id: &SandboxId) -> Result<()> {
        let entry = self.core.registry.owned(id)?;
        let over = |state| matches!(state, State::Running | State::Stopping | State::Gone);
        match entry.until(over).await {
            State::Running => Ok(()),
            _ => Err(Error::sandbox_not_found(id)),
        }
    }

    /// Keeps what a running box is now.
    pub async fn snapshot(&self, id: &SandboxId, wish: PointWish) -> Result<Point> {
        let core = Arc::clone(&self.core);
        let entry = core.registry.owned(id)?;
        entry.auto.settled().await;
        self.core
            .finish(async move { core.snapshot(&entry, wish).await })
            .await
    }

    /// Boxes that begin as copies, with ids, names and tokens of their own.
    pub async fn fork(&self, id: &SandboxId, wish: ForkWish) -> Result<Forked> {
        let core = Arc::clone(&self.core);
        let entry = core.registry.owned(id)?;
        entry.auto.settled().await;
        self.core
            .finish(async move { core.fork(&entry, wish).await })
            .await
    }

    /// Makes a box what it was at a point.
    pub async fn rollback(&self, id: &SandboxId, to: &PointId) -> Result<Sandbox> {
        let core = Arc::clone(&self.core);
        let entry = core.registry.owned(id)?;
        let to = to.clone();
        entry.auto.settled().await;
        self.core
            .finish(async move { core.rollback(&entry, &to).await })
            .await
    }

    /// Points that stay until somebody or a rule removes them, oldest first; of one box, or
    /// all.
    pub async fn points(&self, of: Option<&SandboxId>) -> Result<Vec<Point>> {
        let mut points = match of {
            Some(id) => self.core.store.points_of(id).await?,
            None => self.core.store.points().await?,
        };
        points.retain(|point| point.kind.stays());
        Ok(points)
    }

    /// The tree of what a box was, with the points of the commands that have ended.
    pub async fn timeline(&self, id: &SandboxId) -> Result<Timeline> {
        if let Ok(entry) = self.core.registry.owned(id) {
            entry.auto.settled().await;
        }
        self.core.timeline(id).await
    }

    /// Gives a point another name or other tags; `None` leaves what it has.
    pub async fn label_point(
        &self,
        id: &PointId,
        name: Option<Option<String>>,
        tags: Option<Vec<String>>,
    ) -> Result<Point> {
        self.core.label_point(id, name, tags).await
    }

    pub async fn point(&self, id: &PointId) -> Result<Point> {
        self.core.point(id).await
    }

    /// Deletes a point; boxes made from it stay whole.
    pub async fn delete_point(&self, id: &PointId) -> Result<()> {
        let (core, id) = (Arc::clone(&self.core), id.clone());
        self.core
            .finish(async move { core.delete_point(&id).await })
            .await
    }

    /// What is different at `after` from what was at `before`.
    pub async fn diff(&self, before: &PointId, after: &PointId, with_text: bool) -> Result<Diff> {
        self.core.diff(before, after, with_text).await
    }
}
