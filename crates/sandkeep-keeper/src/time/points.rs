//! Finding, comparing and deleting points.

use std::{collections::HashSet, path::PathBuf, sync::Arc};

use sandkeep_model::{
    Code, Error, Point, PointId, PointKind, Result, SandboxId, State, check_point_name,
    check_point_tags, point_not_found,
};
use sandkeep_vault::{Diff, PointInfo};
use sandkeep_ward::Ward;

use super::{Timeline, api::Place};
use crate::{core::Core, form};

fn no_memory(point: &Point) -> Error {
    Error::conflict(format!(
        "point \"{}\" is damaged: its memory is not there",
        point.id
    ))
}

impl Core {
    pub async fn point(&self, id: &PointId) -> Result<Point> {
        self.store
            .point(id)
            .await?
            .ok_or_else(|| point_not_found(id))
    }

    /// Whole, and of an engine that can read it here. Everything is looked at before
    /// anything is touched.
    pub async fn usable(&self, point: &Point, ward: &dyn Ward) -> Result<PointInfo> {
        if let Some(wrote) = &point.engine {
            let reads = ward.engine().await?;
            if reads.name != wrote.name || reads.build != wrote.build {
                return Err(Error::new(
                    Code::NotEnforceable,
                    format!(
                        "the memory in point \"{}\" was written by {wrote}, this server has {} {}",
                        point.id, reads.name, reads.build
                    ),
                )
                .hint("install the engine that wrote it, or use a point without memory"));
            }
        }
        let found = self.vault.verified_point(&point.id).await?;
        if point.has_memory() && found.memory.is_none() {
            return Err(no_memory(point));
        }
        Ok(found)
    }

    /// Where the memory is of a point that was found [usable](Self::usable) a moment ago: it is
    /// not read through once more for each box.
    pub async fn image_in(&self, point: &Point) -> Result<PathBuf> {
        let found = self.vault.point(&point.id).await?;
        found.memory.ok_or_else(|| no_memory(point))
    }

    /// Boxes made from it and points after it stay whole.
    pub async fn delete_point(&self, id: &PointId) -> Result<()> {
        let point = self.point(id).await?;
        let user = self.registry.all().into_iter().find(|entry| {
            entry.with(|sandbox| {
                let pause = sandbox.time.pause.as_ref();
                pause.is_some_and(|pause| pause.point.as_ref() == Some(id))
            })
        });
        if let Some(entry) = user {
            return Err(Error::conflict(format!(
                "point \"{id}\" is what paused sandbox \"{}\" wakes up from",
                entry.id
            ))
            .hint("resume or kill that sandbox first"));
        }
        if !self.store.delete_point(&point).await? {
            return Err(point_not_found(id));
        }
        self.step_back(&point);
        self.forget_files(id).await;
        Ok(())
    }

    /// Boxes that came from a point that is gone came from what it came from, as the ledger
    /// has it already.
    fn step_back(&self, gone: &Point) {
        for entry in self.registry.all() {
            entry.amend(|sandbox| {
                if sandbox.time.head.as_ref() == Some(&gone.id) {
                    sandbox.time.head.clone_from(&gone.parent);
                }
            });
        }
    }

    /// Gives a point another name or other tags; `None` leaves what it has.
    pub async fn label_point(
        &self,
        id: &PointId,
        name: Option<Option<String>>,
        tags: Option<Vec<String>>,
    ) -> Result<Point> {
        let mut point = self.point(id).await?;
        if let Some(name) = name {
            if let Some(name) = &name {
                check_point_name("name", name)?;
            }
            point.name = name;
        }
        if let Some(tags) = tags {
            check_point_tags(&tags)?;
            point.tags = tags;
        }
        if !self.store.label_point(&point).await? {
            return Err(point_not_found(id));
        }
        Ok(point)
    }

    /// What a box was, what it came from, and which boxes are where in it.
    pub async fn timeline(&self, id: &SandboxId) -> Result<Timeline> {
        let mut points = self.store.points_of(id).await?;
        points.retain(|point| point.kind.stays());
        // What the box itself came from was made of other boxes.
        let head = self
            .registry
            .owned(id)
            .ok()
            .and_then(|entry| entry.with(|sandbox| sandbox.time.head.clone()));
        let mut known: HashSet<PointId> = points.iter().map(|point| point.id.clone()).collect();
        let mut wanted: Vec<PointId> = points.iter().filter_map(|p| p.parent.clone()).collect();
        wanted.extend(head);
        while let Some(parent) = wanted.pop() {
            if !known.insert(parent.clone()) {
                continue;
            }
            // One that is gone leaves a gap.
            if let Some(point) = self.store.point(&parent).await? {
                wanted.extend(point.parent.clone());
                points.push(point);
            }
        }
        points.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        let boxes = self
            .registry
            .all()
            .into_iter()
            .filter(|entry| !entry.pooled())
            .map(|entry| entry.with(|b| (b.id.clone(), b.state, b.time.head.clone())))
            .filter(|(other, state, head)| {
                let comes_from_here = head.as_ref().is_some_and(|head| known.contains(head));
                *state != State::Gone && (other == id || comes_from_here)
            })
            .map(|(sandbox_id, state, at)| Place {
                sandbox_id,
                state,
                at,
            })
            .collect();
        Ok(Timeline { points, boxes })
    }

    pub async fn diff(&self, before: &PointId, after: &PointId, with_text: bool) -> Result<Diff> {
        let (old, new) = (self.point(before).await?, self.point(after).await?);
        let image = |point: &Point| {
            let ward = self.levels.ward(point.isolation);
            ward.and_then(|ward| ward.disk_image())
        };
        match (image(&old), image(&new)) {
            (None, None) => self.vault.diff(before, after, with_text).await,
            (Some(old), Some(new)) if old == new => {
                self.vault.diff_images(before, after, old, with_text).await
            }
            _ => Err(Error::new(
                Code::NotEnforceable,
                format!(
                    "points made at isolation levels {} and {} can not be compared",
                    old.isolation, new.isolation
                ),
            )
            .hint("compare points of one level")),
        }
    }

    /// A point that served its purpose; what does not work now is swept at the next start.
    pub async fn drop_point(&self, point: &Point) {
        if let Err(error) = self.store.delete_point(point).await {
            tracing::warn!(point = %point.id, %error, "a point stays in the ledger for now");
            return;
        }
        self.step_back(point);
        self.forget_files(&point.id).await;
    }

    pub async fn forget_files(&self, id: &PointId) {
        if let Some(moat) = &self.config.network.moat {
            moat.forget_point(id.as_str());
        }
        if let Err(error) = self.vault.remove_point(id).await {
            tracing::warn!(point = %id, %error, "the files of a point stay for now");
        }
    }

    /// Points that a box which rested needed and nobody needs any more. They are chosen now and
    /// go while the box runs: it may rest at another one by then.
    pub async fn drop_pauses_later(&self, sandbox: &SandboxId, but: Option<&PointId>) {
        let mut pauses = self.points_of(sandbox).await;
        pauses.retain(|point| point.kind == PointKind::Pause && Some(&point.id) != but);
        let Some(core) = self.me.upgrade().filter(|_| !pauses.is_empty()) else {
            return;
        };
        let sandbox = sandbox.clone();
        self.tasks.spawn(async move {
            for point in &pauses {
                core.drop_point(point).await;
            }
            // What it deletes counts as its own until the point is wholly gone; on a full disk that
            // is long.
            if core.has_full_disk(&sandbox).await {
                core.vault.free_now().await;
            }
        });
    }

    async fn has_full_disk(&self, sandbox: &SandboxId) -> bool {
        let Ok(entry) = self.registry.owned(sandbox) else {
            return false;
        };
        let limits = entry.with(|sandbox| sandbox.limits);
        let limit = form::quota(entry.ward.as_ref(), &limits);
        let held = self.vault.held_by(vec![sandbox.clone()]).await;
        let held = held.ok().and_then(|held| held.first().map(|one| one.1));
        limit > 0 && held.is_some_and(|held| held > limit - limit / 16)
    }

    /// What goes with a box that is gone. Points somebody asked for or named outlive it.
    pub async fn drop_all_but_kept(&self, sandbox: &SandboxId) {
        for point in self.points_of(sandbox).await {
            if point.kind == PointKind::Pause || point.may_go() {
                self.drop_point(&point).await;
            }
        }
    }

    /// None when they can not be read: what is left over is swept at the next start.
    async fn points_of(&self, sandbox: &SandboxId) -> Vec<Point> {
        self.store.points_of(sandbox).await.unwrap_or_else(|error| {
            tracing::warn!(id = %sandbox, %error, "listing the points of a box");
            Vec::new()
        })
    }

    /// After a start: ledger and vault agree, and what a crash left is gone. Runs before
    /// anybody can make a point.
    pub async fn sweep_points(&self) -> Result<()> {
        let needed: HashSet<PointId> = self
            .registry
            .all()
            .iter()
            .filter_map(|entry| entry.with(|b| b.time.pause.as_ref()?.point.clone()))
            .collect();
        let builds = self.builds_in_use().await?;
        let mut known = HashSet::new();
        let files: HashSet<PointId> = self.vault.points().await?.into_iter().collect();
        for point in self.store.points().await? {
            let served = match point.kind {
                PointKind::Snapshot | PointKind::Layer => false,
                PointKind::Template => !point.tags.iter().any(|tag| builds.contains(tag)),
                // What was made by itself and nobody named goes with its box.
                PointKind::Auto => {
                    point.may_go()
                        && !needed.contains(&point.id)
                        && self.registry.find(&point.sandbox_id).is_none()
                }
                PointKind::Pause | PointKind::Fork => !needed.contains(&point.id),
            };
            if served || !files.contains(&point.id) {
                tracing::info!(point = %point.id, "a point of an earlier run is cleared away");
                self.drop_point(&point).await;
            } else {
                known.insert(point.id);
            }
        }
        for id in files.difference(&known) {
            self.forget_files(id).await;
        }
        if let Some(moat) = &self.config.network.moat {
            let sandboxes: HashSet<String> = self
                .registry
                .all()
                .iter()
                .map(|entry| entry.id.to_string())
                .collect();
            let points: HashSet<&str> = known.iter().map(PointId::as_str).collect();
            moat.forget_all_but(|id| sandboxes.contains(id), |id| points.contains(id));
        }
        Ok(())
    }

    pub(super) fn ward_for(&self, point: &Point) -> Result<Arc<dyn Ward>> {
        self.levels
            .ward(point.isolation)
            .map(Arc::clone)
            .ok_or_else(|| {
                Error::host_not_ready(format!(
                    "point \"{}\" is of isolation level {}, which this server does not run",
                    point.id, point.isolation
                ))
                .retryable(false)
            })
    }
}
