//! The audit log: what happened, who did it, and proof that nothing was changed.

use axum::{Json, extract::State};
use sandkeep_audit::{Action, Audit, Filter, Order, Record, Verdict};
use sandkeep_model::{Code, Error, Result, SandboxId};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    error::NativeError,
    query::{NativeQuery, Query, shown},
    state::{ApiState, Shared},
};

pub(crate) const MOST: usize = 1000;
const USUAL: usize = 100;

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AuditPage {
    /// Each as it stands in the log: `seq`, `at`, `actor`, `sandbox`, `action`, `detail`,
    /// `prev` and `hash`.
    #[schema(value_type = Vec<Object>)]
    entries: Vec<Record>,
}

/// Entries of the audit log, newest first; with `after`, oldest first from there on.
#[utoipa::path(get, path = "/v1/audit", tag = "audit",
    params(
        ("after" = Option<u64>, Query, description = "Only entries after this `seq`, oldest first"),
        ("before" = Option<u64>, Query, description = "Only entries before this `seq`"),
        ("sandbox_id" = Option<String>, Query, description = "Only about this sandbox"),
        ("kind" = Option<String>, Query, description = "Only this `action`", example = "connection_denied"),
        ("limit" = Option<usize>, Query, description = "1 to 1000, 100 when left out"),
    ),
    responses((status = 200, body = AuditPage)))]
pub(crate) async fn list(
    State(state): State<Shared>,
    NativeQuery(query): NativeQuery,
) -> Result<Json<AuditPage>, NativeError> {
    let filter = filter(query)?;
    let audit = log(&state)?.clone();
    let entries = reading(move || audit.read(filter)?.collect()).await?;
    Ok(Json(AuditPage { entries }))
}

/// The number of an entry.
fn number(query: &mut Query, name: &str) -> Result<Option<u64>> {
    let number = query.parsed::<u64>(name)?;
    match number {
        Some(number) if i64::try_from(number).is_err() => Err(Error::invalid(
            name,
            format!("{name} is {number}, it must be from 0 to {}", i64::MAX),
        )),
        number => Ok(number),
    }
}

fn filter(mut query: Query) -> Result<Filter> {
    let after = number(&mut query, "after")?;
    let filter = Filter {
        order: match after {
            Some(_) => Order::OldestFirst,
            None => Order::NewestFirst,
        },
        after,
        before: number(&mut query, "before")?,
        sandbox: query.parsed::<SandboxId>("sandbox_id")?,
        action: query.take("kind")?.filter(|kind| !kind.is_empty()),
        limit: Some(query.parsed("limit")?.unwrap_or(USUAL)),
        ..Filter::default()
    };
    query.finish("after, before, sandbox_id, kind and limit")?;
    if !filter
        .limit
        .is_some_and(|limit| (1..=MOST).contains(&limit))
    {
        return Err(Error::invalid(
            "limit",
            format!("limit must be from 1 to {MOST}"),
        ));
    }
    if let Some(kind) = &filter.action
        && !Action::NAMES.contains(&kind.as_str())
    {
        return Err(Error::invalid(
            "kind",
            format!("there is no kind of entry called {}", shown(kind)),
        )
        .hint(format!("there are: {}", Action::NAMES.join(", "))));
    }
    Ok(filter)
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct VerdictView {
    sound: bool,
    /// Sound entries, up to the end or the break.
    entries: u64,
    /// The number of the first entry; more than 1 when old files were moved away.
    #[schema(required)]
    first: Option<u64>,
    /// `seq` and `hash` of the last sound entry. Kept elsewhere, it proves later that nothing
    /// up to here was changed or cut off.
    #[schema(value_type = Option<Object>, required)]
    head: Option<sandkeep_audit::Head>,
    /// The first place that is not what was written: `segment`, `line` and `why`.
    #[schema(value_type = Option<Object>, required)]
    broken: Option<sandkeep_audit::Broken>,
}

impl From<Verdict> for VerdictView {
    fn from(verdict: Verdict) -> Self {
        Self {
            sound: verdict.is_sound(),
            entries: verdict.entries,
            first: verdict.first,
            head: verdict.head,
            broken: verdict.broken,
        }
    }
}

/// Checks the whole log: whether any record was changed, removed or added since it was written.
#[utoipa::path(get, path = "/v1/audit/verify", tag = "audit", operation_id = "verify",
    responses((status = 200, body = VerdictView)))]
pub(crate) async fn verify(State(state): State<Shared>) -> Result<Json<VerdictView>, NativeError> {
    let audit = log(&state)?.clone();
    let verdict = reading(move || audit.verify()).await?;
    Ok(Json(verdict.into()))
}

fn log(state: &ApiState) -> Result<&Audit> {
    state
        .audit
        .as_ref()
        .ok_or_else(|| Error::new(Code::NotImplemented, "this server keeps no audit log"))
}

async fn reading<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| Error::internal("reading the audit log was broken off"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(query: &str) -> Result<Filter> {
        filter(Query::parse(query)?)
    }

    #[test]
    fn questions_are_read() {
        let newest = read("").unwrap();
        assert_eq!(
            (newest.order, newest.limit),
            (Order::NewestFirst, Some(100))
        );
        let next = read("after=7&kind=token_issued&limit=3").unwrap();
        assert_eq!((next.order, next.after), (Order::OldestFirst, Some(7)));
        assert_eq!(next.action.as_deref(), Some("token_issued"));
        for (bad, field) in [
            ("limit=0", "limit"),
            ("limit=1001", "limit"),
            ("kind=lunch", "kind"),
            ("sandbox_id=x", "sandbox_id"),
            ("sandbox=x", "sandbox"),
            ("after=-1", "after"),
        ] {
            let error = read(bad).unwrap_err();
            assert_eq!(error.field.as_deref(), Some(field), "{bad}");
        }
    }
}
