//! Finding, comparing and deleting points.

use std::{collections::HashSet, sync::Arc};

use sandkeep_model::{
    Code, Error, Point, PointId, PointKind, Result, SandboxId, TemplateName, point_not_found,
};
use sandkeep_vault::{Diff, PointInfo};
use sandkeep_ward::Ward;

use crate::core::Core;

impl Core {
    pub async fn point(&self, id: &PointId) -> Result<Point> {
        self.store
            .point(id)
            .await?
            .ok_or_else(|| point_not_found(id))
    }

    /// A point by its id, or the newest of this name.
    pub async fn point_called(&self, text: &str) -> Result<Option<Point>> {
        if let Ok(id) = text.parse::<PointId>() {
            return self.store.point(&id).await;
        }
        Ok(self.store.points_named(text).await?.pop())
    }

    /// A point of the name clients of E2B give as a template.
    pub async fn point_as_template(&self, name: &TemplateName) -> Result<Option<Point>> {
        if self.vault.template(name).await?.is_some() {
            return Ok(None);
        }
        self.point_called(name.as_str()).await
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
            return Err(Error::conflict(format!(
                "point \"{}\" is damaged: its memory is not there",
                point.id
            )));
        }
        Ok(found)
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
        self.forget_files(id).await;
        Ok(())
    }

    pub async fn diff(&self, before: &PointId, after: &PointId, with_text: bool) -> Result<Diff> {
        self.point(before).await?;
        self.point(after).await?;
        self.vault.diff(before, after, with_text).await
    }

    /// A point that served its purpose; what does not work now is swept at the next start.
    pub async fn drop_point(&self, point: &Point) {
        if let Err(error) = self.store.delete_point(point).await {
            tracing::warn!(point = %point.id, %error, "a point stays in the ledger for now");
            return;
        }
        self.forget_files(&point.id).await;
    }

    pub async fn forget_files(&self, id: &PointId) {
        if let Err(error) = self.vault.remove_point(id).await {
            tracing::warn!(point = %id, %error, "the files of a point stay for now");
        }
    }

    /// Points that rested boxes needed and nobody needs any more.
    pub async fn drop_pauses(&self, sandbox: &SandboxId, but: Option<&PointId>) {
        let points = match self.store.points_of(sandbox).await {
            Ok(points) => points,
            Err(error) => {
                tracing::warn!(id = %sandbox, %error, "listing the points of a box");
                return;
            }
        };
        for point in points {
            if point.kind == PointKind::Pause && Some(&point.id) != but {
                self.drop_point(&point).await;
            }
        }
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
