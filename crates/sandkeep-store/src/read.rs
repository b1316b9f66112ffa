//! Looking up boxes.

use sandkeep_model::{Result, SandboxId};
use sqlx::{AssertSqlSafe, Row};

use crate::{
    fault,
    open::Store,
    rows::{self, COLUMNS, Record},
};

impl Store {
    pub async fn get(&self, id: &SandboxId) -> Result<Option<Record>> {
        sqlx::query(AssertSqlSafe(format!(
            "SELECT {COLUMNS} FROM sandboxes WHERE id = $1"
        )))
        .bind(id.as_str())
        .fetch_optional(&self.inner.readers)
        .await
        .map_err(|error| fault::ledger(&error))?
        .map(|row| rows::record(&row))
        .transpose()
    }

    /// The box that was made with this idempotency key, and the hash of the request.
    pub async fn by_key(&self, key: &str) -> Result<Option<(Record, String)>> {
        let found = sqlx::query(AssertSqlSafe(format!(
            "SELECT {COLUMNS}, idempotency_hash FROM sandboxes WHERE idempotency_key = $1"
        )))
        .bind(key)
        .fetch_optional(&self.inner.readers)
        .await
        .map_err(|error| fault::ledger(&error))?;
        let Some(row) = found else { return Ok(None) };
        let hash = row
            .try_get::<Option<String>, _>("idempotency_hash")
            .map_err(|error| fault::ledger(&error))?
            .unwrap_or_default();
        Ok(Some((rows::record(&row)?, hash)))
    }

    /// Every box that is not gone, pooled ones included.
    pub async fn live(&self) -> Result<Vec<Record>> {
        sqlx::query(AssertSqlSafe(format!(
            "SELECT {COLUMNS} FROM sandboxes WHERE state <> 'gone' ORDER BY created_at, id"
        )))
        .fetch_all(&self.inner.readers)
        .await
        .map_err(|error| fault::ledger(&error))?
        .iter()
        .map(rows::record)
        .collect()
    }
}
