//! Making points.

use std::{path::Path, sync::Arc};

use sandkeep_model::{
    Code, EngineBuild, Error, Limits, Point, PointId, PointKind, PointReason, Result, SandboxId,
    State, Timestamp, check_point_name, check_point_tags, human_bytes,
};
use sandkeep_vault::{Keep, PointDraft};
use sandkeep_ward::BoxSpec;

use super::PointWish;
use crate::{core::Core, form, registry::Entry};

/// What a point is to be, apart from what is in it.
#[derive(Debug, Clone)]
pub struct PointOrder {
    pub kind: PointKind,
    pub name: Option<String>,
    pub tags: Vec<String>,
    /// Why, when nobody asked.
    pub reason: Option<PointReason>,
    /// Why memory that was wished for is not in it.
    pub why_disk_only: Option<String>,
}

impl PointOrder {
    pub const fn of(kind: PointKind) -> Self {
        Self {
            kind,
            name: None,
            tags: Vec::new(),
            reason: None,
            why_disk_only: None,
        }
    }
}

impl Core {
    /// Keeps what a box is now; it goes on. A paused box is kept as it rests.
    pub async fn snapshot(&self, entry: &Arc<Entry>, wish: PointWish) -> Result<Point> {
        if let Some(name) = &wish.name {
            check_point_name("name", name)?;
        }
        check_point_tags(&wish.tags)?;
        let _turn = entry.turn.lock().await;
        let order = PointOrder {
            name: wish.name,
            tags: wish.tags,
            ..PointOrder::of(PointKind::Snapshot)
        };
        self.point_now(entry, wish.memory, order).await
    }

    /// `memory`: `None` takes it when this level can. The caller has the turn.
    pub async fn point_now(
        &self,
        entry: &Arc<Entry>,
        memory: Option<bool>,
        mut order: PointOrder,
    ) -> Result<Point> {
        match entry.state() {
            State::Running => {}
            State::Stopping | State::Gone => return Err(Error::sandbox_not_found(&entry.id)),
            state => {
                return Err(
                    Error::conflict(format!("sandbox \"{}\" is {state}", entry.id))
                        .hint(format!("resume it first: sandkeep resume {}", entry.id)),
                );
            }
        }
        self.check_storage()?;
        let engine = match memory {
            Some(false) => None,
            Some(true) => Some(entry.ward.engine_of(&entry.id).await?),
            None => entry.ward.engine_of(&entry.id).await.ok(),
        };
        if engine.is_none() {
            return self.point_of_disk(entry, order).await;
        }
        // Its memory has what is not on the disk yet; whoever compares disks would miss it.
        if let Err(error) = entry.ward.settle(&entry.id).await {
            tracing::warn!(id = %entry.id, %error, "the disk in a point is behind its memory");
        }
        self.begin_pausing(entry).await?;
        let frozen = async {
            entry.ward.freeze(&entry.id).await?;
            entry.reach.hang_up();
            self.take(entry).await
        };
        let taken = frozen.await;
        // It does not have to stand still until all of it is on the disk.
        self.go_on(entry).await;
        let made = match taken {
            Ok((draft, engine)) => {
                self.publish(entry, draft, order.clone(), Some(engine))
                    .await
            }
            Err(refused) => Err(refused),
        };
        match made {
            Err(refused) if memory.is_none() => {
                tracing::warn!(id = %entry.id, why = refused.message, "memory is not kept");
                order.why_disk_only = Some(refused.message);
                self.point_of_disk(entry, order).await
            }
            made => made,
        }
    }

    /// The disk alone, in one moment, while the box runs.
    pub async fn point_of_disk(&self, entry: &Entry, order: PointOrder) -> Result<Point> {
        entry.ward.settle(&entry.id).await?;
        let draft = self.vault.begin_point(PointId::random()).await?;
        let draft = self.vault.take_disk(draft, &entry.id).await?;
        self.publish(entry, draft, order, None).await
    }

    /// The same, unless the disk is what it was at the point the box went through last.
    pub async fn point_if_changed(
        &self,
        entry: &Entry,
        order: PointOrder,
    ) -> Result<Option<Point>> {
        let Some(head) = entry.with(|sandbox| sandbox.time.head.clone()) else {
            return self.point_of_disk(entry, order).await.map(Some);
        };
        entry.ward.settle(&entry.id).await?;
        let draft = self.vault.begin_point(PointId::random()).await?;
        let changed = self
            .vault
            .take_changed_disk(draft, &entry.id, &head)
            .await?;
        match changed {
            Some(draft) => self.publish(entry, draft, order, None).await.map(Some),
            None => Ok(None),
        }
    }

    /// Memory and disk of a frozen box. Refused where the level or the box does not allow it;
    /// the box stays frozen.
    pub async fn make_point(&self, entry: &Entry, order: PointOrder) -> Result<Point> {
        let (draft, engine) = self.take(entry).await?;
        self.publish(entry, draft, order, Some(engine)).await
    }

    /// What must be taken while the box stands still. It is whole, but not on the disk.
    async fn take(&self, entry: &Entry) -> Result<(PointDraft, EngineBuild)> {
        let engine = entry.ward.engine_of(&entry.id).await?;
        let engine = EngineBuild {
            name: engine.name,
            build: engine.build,
        };
        if let Ok(usage) = entry.ward.usage(&entry.id).await {
            self.vault.check_memory_room(usage.memory_bytes).await?;
        }
        let limits = entry.with(|sandbox| sandbox.limits);
        self.check_over(entry, &limits).await?;
        let most = form::image_quota(&limits);
        let draft = self.vault.begin_point(PointId::random()).await?;
        let (draft, place) = self.vault.memory_of_at_most(draft, most).await?;
        if let Err(error) = entry.ward.save(&entry.id, &place).await {
            // Whoever writes it only sees that a write was refused.
            let why = self.vault.why_no_memory(draft, most).await;
            return Err(why.unwrap_or(error));
        }
        let draft = self.vault.take_disk(draft, &entry.id).await?;
        Ok((draft, engine))
    }

    /// A disk may hold more than its limit after a wake-up: deleted files that shared blocks, or were
    /// there when it was full, are brought back above the limit. Once it holds that much without
    /// them it must give way first: else it would grow with every wake-up.
    async fn check_over(&self, entry: &Entry, limits: &Limits) -> Result<()> {
        let quota = form::quota(entry.ward.as_ref(), limits);
        let held = self.vault.held_by(vec![entry.id.clone()]).await?;
        let written = held.first().map_or(0, |(_, bytes)| *bytes);
        if quota == 0 || written <= quota.saturating_add(form::image_quota(limits)) {
            return Ok(());
        }
        Err(Error::new(
            Code::NotEnforceable,
            format!(
                "its disk holds {}, far more than its limit of {}",
                human_bytes(written),
                human_bytes(quota)
            ),
        )
        .hint("delete files in it"))
    }

    /// Whether the memory in a point comes back, tried beside the sandbox it is of.
    pub(super) async fn try_image(&self, entry: &Entry, disk: &Path, image: &Path) -> Result<()> {
        if !entry.ward.tries_images() {
            return Ok(());
        }
        let copy = self.vault.trial_disk(disk, image).await?;
        let id = SandboxId::random();
        let spec = BoxSpec {
            hostname: id.to_string(),
            id,
            root: copy.path().to_owned(),
            limits: entry.with(|sandbox| sandbox.limits),
            introduction: None,
        };
        let tried = entry.ward.try_image(spec, image).await;
        copy.remove().await;
        tried
    }

    /// Vault first, then ledger: a point nobody knows is swept at the next start.
    async fn publish(
        &self,
        entry: &Entry,
        draft: PointDraft,
        order: PointOrder,
        engine: Option<EngineBuild>,
    ) -> Result<Point> {
        let keep = if order.kind == PointKind::Fork {
            Keep::ThisRun
        } else {
            Keep::ForGood
        };
        let draft = if engine.is_some() && order.kind.is_tried() {
            let (disk, image) = (draft.disk_path(), draft.memory_path());
            let (tried, written) = tokio::join!(
                self.try_image(entry, &disk, &image),
                self.vault.write_out_point(draft, keep),
            );
            // An image that could not be written out is removed, under its trial, too: why it could
            // not is what counts.
            let draft = written?;
            tried?;
            draft
        } else {
            draft
        };
        let made = self.vault.publish_point(draft, &entry.id, keep).await?;
        let written = self.vault.disk_usage(&entry.id).await.unwrap_or(0);
        let sandbox = entry.sandbox();
        let added = written.saturating_sub(sandbox.time.head_written);
        let point = Point {
            id: made.id,
            sandbox_id: sandbox.id,
            parent: sandbox.time.head,
            name: order.name,
            tags: order.tags,
            kind: order.kind,
            reason: order.reason,
            engine,
            why_disk_only: order.why_disk_only,
            created_at: Timestamp::now(),
            bytes: written.saturating_add(made.memory_bytes),
            added_bytes: added.saturating_add(made.memory_bytes),
            isolation: sandbox.isolation,
            template: sandbox.template,
            limits: sandbox.limits,
        };
        if point.engine.is_some() {
            entry.reach.keep_at(&point.id);
        }
        if let Err(error) = self.store.insert_point(&point).await {
            self.forget_files(&point.id).await;
            return Err(error.context("writing down the point"));
        }
        if point.kind.stays() {
            self.set_head(entry, &point.id, written).await;
        }
        Ok(point)
    }

    /// The next point of the box has this one as its parent.
    async fn set_head(&self, entry: &Entry, head: &PointId, written: u64) {
        entry.amend(|sandbox| {
            sandbox.time.head = Some(head.clone());
            sandbox.time.head_written = written;
        });
        let time = entry.with(|sandbox| sandbox.time.clone());
        if let Err(error) = self.store.set_time(&entry.id, &time).await {
            tracing::warn!(id = %entry.id, %error, "the place in time is not in the ledger");
        }
    }
}
