//! Lists in pages, by (started_at, id).

use sandkeep_model::{ListFilter, Order, Page, PageToken, Result, Sandbox, State};
use sqlx::AssertSqlSafe;

use crate::{
    fault,
    open::Store,
    rows::{self, COLUMNS},
};

/// Rows read at a time when metadata is looked for.
const CHUNK: i64 = 500;
/// At most this many chunks for one page: a filter that matches little gives a short page
/// with a token to go on from, instead of a request that reads the whole history.
const CHUNKS: usize = 10;

impl Store {
    /// One page of boxes that exist for clients.
    pub async fn list(&self, filter: &ListFilter) -> Result<Page<Sandbox>> {
        let size = usize::try_from(filter.page_size()).unwrap_or(usize::MAX);
        // One more than the page tells whether there is a next one.
        let chunk = if filter.metadata.is_empty() {
            i64::from(filter.page_size()) + 1
        } else {
            CHUNK
        };
        let mut items = Vec::with_capacity(size);
        let mut after = filter.after.clone();
        for _ in 0..CHUNKS {
            let read = self.chunk(filter, after.as_ref(), chunk).await?;
            let last_chunk = i64::try_from(read.len()).unwrap_or(i64::MAX) < chunk;
            for sandbox in read {
                let here = PageToken {
                    started_at: sandbox.started_at,
                    id: sandbox.id.clone(),
                };
                if matches(filter, &sandbox) {
                    if items.len() == size {
                        return Ok(Page { items, next: after });
                    }
                    items.push(sandbox);
                }
                after = Some(here);
            }
            if last_chunk {
                return Ok(Page { items, next: None });
            }
        }
        Ok(Page { items, next: after })
    }

    async fn chunk(
        &self,
        filter: &ListFilter,
        after: Option<&PageToken>,
        limit: i64,
    ) -> Result<Vec<Sandbox>> {
        let (compare, direction) = match filter.order {
            Order::Asc => (">", "ASC"),
            Order::Desc => ("<", "DESC"),
        };
        // Only fixed words are put into the text; every value is bound.
        let states = if filter.states.is_empty() {
            "state <> 'gone'".to_owned()
        } else {
            let names: Vec<_> = State::ALL
                .into_iter()
                .filter(|state| filter.states.contains(state))
                .map(|state| format!("'{}'", state.name()))
                .collect();
            format!("state IN ({})", names.join(", "))
        };
        let mut text = format!("SELECT {COLUMNS} FROM sandboxes WHERE pooled = 0 AND {states}");
        let mut bound = 1;
        if filter.template.is_some() {
            bound += 1;
            text.push_str(&format!(" AND template = ${bound}"));
        }
        if filter.started_after.is_some() {
            bound += 1;
            text.push_str(&format!(" AND started_at >= ${bound}"));
        }
        if after.is_some() {
            text.push_str(&format!(
                " AND (started_at, id) {compare} (${}, ${})",
                bound + 1,
                bound + 2
            ));
        }
        text.push_str(&format!(
            " ORDER BY started_at {direction}, id {direction} LIMIT $1"
        ));

        let mut query = sqlx::query(AssertSqlSafe(text)).bind(limit);
        if let Some(template) = &filter.template {
            query = query.bind(template.as_str());
        }
        if let Some(started_after) = filter.started_after {
            query = query.bind(started_after.millis());
        }
        if let Some(after) = after {
            query = query
                .bind(after.started_at.millis())
                .bind(after.id.as_str());
        }
        query
            .fetch_all(&self.inner.readers)
            .await
            .map_err(|error| fault::ledger(&error))?
            .iter()
            .map(|row| rows::record(row).map(|record| record.sandbox))
            .collect()
    }
}

fn matches(filter: &ListFilter, sandbox: &Sandbox) -> bool {
    filter
        .metadata
        .iter()
        .all(|(key, value)| sandbox.metadata.get(key) == Some(value))
}
