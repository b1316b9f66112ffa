//! Making points.

use std::sync::Arc;

use sandkeep_model::{
    EngineBuild, Error, Point, PointId, PointKind, Result, State, Timestamp, check_point_name,
    check_point_tags,
};
use sandkeep_vault::PointDraft;

use super::PointWish;
use crate::{core::Core, registry::Entry};

impl Core {
    /// Keeps what a box is now; it goes on. A paused box is kept as it rests.
    pub async fn snapshot(&self, entry: &Arc<Entry>, wish: PointWish) -> Result<Point> {
        if let Some(name) = &wish.name {
            check_point_name("name", name)?;
        }
        check_point_tags(&wish.tags)?;
        let _turn = entry.turn.lock().await;
        let point = self
            .point_now(
                entry,
                PointKind::Snapshot,
                wish.memory,
                wish.name,
                wish.tags,
            )
            .await?;
        self.set_head(entry, &point.id).await;
        Ok(point)
    }

    /// `memory`: `None` takes it when this level can. The caller has the turn.
    pub async fn point_now(
        &self,
        entry: &Arc<Entry>,
        kind: PointKind,
        memory: Option<bool>,
        name: Option<String>,
        tags: Vec<String>,
    ) -> Result<Point> {
        match entry.state() {
            State::Running => {}
            State::Stopping | State::Gone => return Err(Error::sandbox_not_found(&entry.id)),
            state => {
                return Err(
                    Error::conflict(format!("sandbox \"{}\" is {state}", entry.id))
                        .hint("resume it first"),
                );
            }
        }
        let engine = match memory {
            Some(false) => None,
            Some(true) => Some(entry.ward.engine().await?),
            None => entry.ward.engine().await.ok(),
        };
        if engine.is_none() {
            return self.point_of_disk(entry, kind, name, &tags, None).await;
        }
        self.begin_pausing(entry).await?;
        let frozen = async {
            entry.ward.freeze(&entry.id).await?;
            entry.reach.close();
            self.make_point(entry, kind, name.clone(), &tags).await
        };
        let made = frozen.await;
        self.go_on(entry).await;
        match made {
            Err(refused) if memory.is_none() => {
                let why = Some(refused.message);
                self.point_of_disk(entry, kind, name, &tags, why).await
            }
            made => made,
        }
    }

    /// The disk alone, in one moment, while the box runs.
    pub async fn point_of_disk(
        &self,
        entry: &Entry,
        kind: PointKind,
        name: Option<String>,
        tags: &[String],
        why: Option<String>,
    ) -> Result<Point> {
        let draft = self.vault.begin_point(PointId::random()).await?;
        self.publish(entry, draft, kind, name, tags, None, why)
            .await
    }

    /// Memory and disk of a frozen box. Refused where the level or the box does not allow it;
    /// the box stays frozen.
    pub async fn make_point(
        &self,
        entry: &Entry,
        kind: PointKind,
        name: Option<String>,
        tags: &[String],
    ) -> Result<Point> {
        let engine = entry.ward.engine().await?;
        let engine = EngineBuild {
            name: engine.name,
            build: engine.build,
        };
        if let Ok(usage) = entry.ward.usage(&entry.id).await {
            self.vault.check_memory_room(usage.memory_bytes).await?;
        }
        let draft = self.vault.begin_point(PointId::random()).await?;
        entry.ward.save(&entry.id, &draft.memory()?).await?;
        self.publish(entry, draft, kind, name, tags, Some(engine), None)
            .await
    }

    /// Vault first, then ledger: a point nobody knows is swept at the next start.
    #[expect(clippy::too_many_arguments, reason = "they are the point")]
    async fn publish(
        &self,
        entry: &Entry,
        draft: PointDraft,
        kind: PointKind,
        name: Option<String>,
        tags: &[String],
        engine: Option<EngineBuild>,
        why_disk_only: Option<String>,
    ) -> Result<Point> {
        let draft = self.vault.take_disk(draft, &entry.id).await?;
        let made = self.vault.publish_point(draft, &entry.id).await?;
        let written = self.vault.disk_usage(&entry.id).await.unwrap_or(0);
        let sandbox = entry.sandbox();
        let point = Point {
            id: made.id,
            sandbox_id: sandbox.id,
            parent: sandbox.time.head,
            name,
            tags: tags.to_vec(),
            kind,
            engine,
            why_disk_only,
            created_at: Timestamp::now(),
            bytes: written.saturating_add(made.memory_bytes),
            isolation: sandbox.isolation,
            template: sandbox.template,
            limits: sandbox.limits,
        };
        if let Err(error) = self.store.insert_point(&point).await {
            self.forget_files(&point.id).await;
            return Err(error.context("writing down the point"));
        }
        Ok(point)
    }

    /// The next point of the box has this one as its parent.
    pub async fn set_head(&self, entry: &Entry, head: &PointId) {
        entry.amend(|sandbox| sandbox.time.head = Some(head.clone()));
        let time = entry.with(|sandbox| sandbox.time.clone());
        if let Err(error) = self.store.set_time(&entry.id, &time).await {
            tracing::warn!(id = %entry.id, %error, "the place in time is not in the ledger");
        }
    }
}
