//! The tree of points.

use std::collections::HashSet;

use sandkeep_model::{EventKind, Point, PointId, PointKind, Result, SandboxId, Timestamp};
use sqlx::{AssertSqlSafe, sqlite::SqliteRow};

use crate::{
    fault,
    open::Store,
    rows::{self, Reading},
    writer::Promise,
};

const COLUMNS: &str = "id, sandbox_id, parent, name, tags, kind, reason, engine, why_disk_only, \
     created_at, bytes, added_bytes, isolation, template, limits";

/// What is answered to be kept is kept. Of one that goes the files go next: whatever was written
/// before must not be lost after them. Only one that is made for forks is nobody's to lose.
fn promise(point: &Point) -> Promise {
    if point.kind == PointKind::Fork {
        Promise::Soon
    } else {
        Promise::Durable
    }
}

impl Store {
    pub async fn insert_point(&self, point: &Point) -> Result<()> {
        let query = sqlx::query(
            "INSERT INTO points (id, sandbox_id, parent, name, tags, kind, engine, \
             why_disk_only, created_at, bytes, isolation, template, limits, reason, added_bytes) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)",
        )
        .bind(point.id.as_str())
        .bind(point.sandbox_id.as_str())
        .bind(point.parent.as_ref().map(PointId::as_str))
        .bind(point.name.as_deref())
        .bind(rows::json(&point.tags)?)
        .bind(point.kind.name())
        .bind(point.engine.as_ref().map(rows::json).transpose()?)
        .bind(point.why_disk_only.as_deref())
        .bind(point.created_at.millis())
        .bind(i64::try_from(point.bytes).unwrap_or(i64::MAX))
        .bind(point.isolation.name())
        .bind(point.template.as_str())
        .bind(rows::json(&point.limits)?)
        .bind(point.reason.as_ref().map(rows::json).transpose()?)
        .bind(i64::try_from(point.added_bytes).unwrap_or(i64::MAX));
        let made = EventKind::PointMade {
            point: point.id.clone(),
            kind: point.kind,
            memory: point.has_memory(),
            reason: point.reason.clone(),
        };
        self.change_many(&point.sandbox_id, query, &[made], promise(point))
            .await?;
        Ok(())
    }

    /// Points after it, and boxes that came from it, come from its own parent from now on.
    /// `false`: it is not there (any more).
    pub async fn delete_point(&self, point: &Point) -> Result<bool> {
        let relink = sqlx::query(
            "UPDATE points SET parent = (SELECT parent FROM points WHERE id = $1) WHERE parent = $1",
        )
        .bind(point.id.as_str());
        // Boxes that came from it, too; theirs is in a value of its own.
        let step_back = sqlx::query(
            "UPDATE sandboxes SET time = json_patch(time, json_object('head', \
             (SELECT parent FROM points WHERE id = $1))) \
             WHERE state <> 'gone' AND json_extract(time, '$.head') = $1",
        )
        .bind(point.id.as_str());
        let query = sqlx::query("DELETE FROM points WHERE id = $1").bind(point.id.as_str());
        let gone = EventKind::PointDeleted {
            point: point.id.clone(),
        };
        let before = vec![relink, step_back];
        let done = self
            .change_after(before, &point.sandbox_id, query, &[gone], promise(point))
            .await?;
        Ok(done.is_some())
    }

    /// Gives a point another name and other tags. `false`: it is not there (any more).
    pub async fn label_point(&self, point: &Point) -> Result<bool> {
        let query = sqlx::query("UPDATE points SET name = $2, tags = $3 WHERE id = $1")
            .bind(point.id.as_str())
            .bind(point.name.as_deref())
            .bind(rows::json(&point.tags)?);
        let done = self
            .change_many(&point.sandbox_id, query, &[], Promise::Durable)
            .await?;
        Ok(done.is_some())
    }

    pub async fn point(&self, id: &PointId) -> Result<Option<Point>> {
        let found = self.points_where("id = $1", id.as_str()).await?;
        Ok(found.into_iter().next())
    }

    /// The points made of one box, oldest first.
    pub async fn points_of(&self, id: &SandboxId) -> Result<Vec<Point>> {
        self.points_where("sandbox_id = $1", id.as_str()).await
    }

    /// The points of this name, oldest first.
    pub async fn points_named(&self, name: &str) -> Result<Vec<Point>> {
        self.points_where("name = $1", name).await
    }

    /// The points a box descends from, and its own: from where it is, and from its own, up to the
    /// first of all.
    pub async fn line_of(
        &self,
        of: &SandboxId,
        head: Option<&PointId>,
    ) -> Result<HashSet<PointId>> {
        // UNION drops what is there already, so it ends whatever is in the table.
        sqlx::query(
            "WITH RECURSIVE line(id) AS (\
             SELECT id FROM points WHERE sandbox_id = $1 OR id = $2 \
             UNION SELECT points.parent FROM points JOIN line ON points.id = line.id \
             WHERE points.parent IS NOT NULL) SELECT id FROM line",
        )
        .bind(of.as_str())
        .bind(head.map(PointId::as_str))
        .fetch_all(&self.inner.readers)
        .await
        .map_err(|error| fault::ledger(&error))?
        .iter()
        .map(|row| Reading::of(row)?.parse("id"))
        .collect()
    }

    /// The points made for one purpose, oldest first.
    pub async fn points_for(&self, kind: PointKind) -> Result<Vec<Point>> {
        self.points_where("kind = $1", kind.name()).await
    }

    /// All points there are, oldest first.
    pub async fn points(&self) -> Result<Vec<Point>> {
        self.points_where("$1 = ''", "").await
    }

    async fn points_where(&self, which: &'static str, value: &str) -> Result<Vec<Point>> {
        sqlx::query(AssertSqlSafe(format!(
            "SELECT {COLUMNS} FROM points WHERE {which} ORDER BY created_at, id"
        )))
        .bind(value)
        .fetch_all(&self.inner.readers)
        .await
        .map_err(|error| fault::ledger(&error))?
        .iter()
        .map(point)
        .collect()
    }
}

fn point(row: &SqliteRow) -> Result<Point> {
    let reading = Reading::of(row)?;
    Ok(Point {
        id: reading.parse("id")?,
        sandbox_id: reading.parse("sandbox_id")?,
        parent: reading.parse_or_none("parent")?,
        name: reading.get("name")?,
        tags: reading.json("tags")?,
        kind: reading.parse("kind")?,
        reason: reading.json_or_none("reason")?,
        engine: reading.json_or_none("engine")?,
        why_disk_only: reading.get("why_disk_only")?,
        created_at: Timestamp::from_millis(reading.get("created_at")?),
        bytes: u64::try_from(reading.get::<i64>("bytes")?).unwrap_or(0),
        added_bytes: u64::try_from(reading.get::<i64>("added_bytes")?).unwrap_or(0),
        isolation: reading.parse("isolation")?,
        template: reading.parse("template")?,
        limits: reading.json("limits")?,
    })
}
