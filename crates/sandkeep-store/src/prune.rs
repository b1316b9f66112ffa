//! Forgetting what is long gone.

use sandkeep_model::{Result, Timestamp};

use crate::{fault, open::Store};

/// Rows per transaction: a long history must not hold up creations.
const BATCH: i64 = 500;

impl Store {
    /// Drops boxes that were gone before `before` with their idempotency keys, and events
    /// older than it that tell about no box still known. Moved ends are dropped by age
    /// alone: a box that lives for months would pile them up. Returns the boxes dropped.
    pub async fn prune(&self, before: Timestamp) -> Result<u64> {
        let boxes = self
            .in_batches(
                "DELETE FROM sandboxes WHERE id IN (SELECT id FROM sandboxes \
                 WHERE state = 'gone' AND gone_at < $1 LIMIT $2)",
                before,
            )
            .await?;
        self.in_batches(
            "DELETE FROM events WHERE seq IN (SELECT seq FROM events \
             WHERE at < $1 AND (kind = 'expiry_changed' OR NOT EXISTS \
             (SELECT 1 FROM sandboxes WHERE sandboxes.id = events.sandbox_id)) LIMIT $2)",
            before,
        )
        .await?;
        Ok(boxes)
    }

    async fn in_batches(&self, text: &'static str, before: Timestamp) -> Result<u64> {
        let mut total = 0;
        loop {
            let done = sqlx::query(text)
                .bind(before.millis())
                .bind(BATCH)
                .execute(self.inner.writer.lock().await.connection().await)
                .await
                .map_err(|error| fault::ledger(&error))?
                .rows_affected();
            total += done;
            if done < BATCH.unsigned_abs() {
                return Ok(total);
            }
            tokio::task::yield_now().await;
        }
    }
}
