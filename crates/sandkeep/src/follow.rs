//! What the ledger tells of the life of boxes, in the audit log.
//!
//! The ledger has an event in the same transaction as the change itself, and the audit log
//! remembers which event it took last. So nothing is missed or told twice, whenever the server
//! is killed between the two.

use sandkeep_audit::{Action, Actor, Audit, Entry, Filter};
use sandkeep_keeper::Keeper;
use sandkeep_model::{Error, Event, EventKind, Result, State};
use tokio::sync::{broadcast::error::RecvError, watch};

const PAGE: u32 = 256;

/// Follows the ledger until `stop` says so, and then to its end.
pub async fn follow(keeper: Keeper, audit: Audit, mut stop: watch::Receiver<bool>) {
    // The bell first: what happens from here on rings it.
    let mut bell = keeper.subscribe();
    let mut last = match last_taken(&keeper, &audit).await {
        Ok(last) => last,
        Err(error) => {
            tracing::error!(%error, "the audit log does not tell of the life of boxes");
            return;
        }
    };
    loop {
        let stopping = *stop.borrow_and_update();
        if let Err(error) = take_after(&keeper, &audit, &mut last).await {
            tracing::error!(%error, "an event is not in the audit log yet");
        }
        if stopping {
            return;
        }
        tokio::select! {
            rung = bell.recv() => if matches!(rung, Err(RecvError::Closed)) {
                return;
            },
            changed = stop.changed() => if changed.is_err() {
                return;
            },
        }
    }
}

/// The number of the last event the audit log has.
async fn last_taken(keeper: &Keeper, audit: &Audit) -> Result<i64> {
    let audit = audit.clone();
    let found = tokio::task::spawn_blocking(move || -> Result<i64> {
        // A damaged line is `verify`'s to tell; the ones before it count all the same.
        let taken = audit
            .read(Filter::default())?
            .filter_map(Result::ok)
            .find_map(|record| record.action.event());
        Ok(taken.unwrap_or(0))
    });
    let last = found
        .await
        .map_err(|_| Error::internal("reading the audit log was broken off"))??;
    // A ledger that begins anew counts anew.
    let newest = keeper.last_event().await?;
    Ok(if last > newest { 0 } else { last })
}

/// What could not be written is tried again the next time.
async fn take_after(keeper: &Keeper, audit: &Audit, last: &mut i64) -> Result<()> {
    loop {
        let page = keeper.events_after(*last, None, PAGE).await?;
        for event in &page {
            if let Some(entry) = entry(keeper, event).await {
                audit.append(entry).await?;
            }
            *last = event.seq.max(*last);
        }
        if page.len() < PAGE as usize {
            return Ok(());
        }
    }
}

/// What is to be written down of this event, if anything.
async fn entry(keeper: &Keeper, event: &Event) -> Option<Entry> {
    let seq = event.seq;
    let (by, action) = match &event.kind {
        EventKind::State { from: None, by, .. } => {
            let made = keeper.get_any(&event.sandbox_id).await.ok();
            let action = Action::SandboxCreated {
                template: made.as_ref().map_or("", |b| b.template.as_str()).into(),
                parent: made.and_then(|made| made.identity.parent),
                event: seq,
            };
            (by, action)
        }
        // Its end is told when it begins; a box that ends all at once has only that.
        EventKind::State {
            from: Some(from),
            to: State::Stopping | State::Gone,
            why,
            by,
        } if *from != State::Stopping => {
            let why = match why {
                Some(why) => Some(why.clone()),
                None => keeper
                    .get_any(&event.sandbox_id)
                    .await
                    .ok()
                    .and_then(|ended| ended.gone),
            };
            let reason = why.map_or_else(|| "unknown".to_owned(), |why| why.to_string());
            let action = Action::SandboxKilled {
                reason: reason.as_str().into(),
                event: seq,
            };
            (by, action)
        }
        EventKind::NetworkChanged { rules, by } => {
            let action = Action::PolicyChanged {
                rules: *rules,
                event: seq,
            };
            (by, action)
        }
        EventKind::ApiKeyRefused { port } => {
            let action = Action::ApiKeyRefused {
                port: *port,
                event: seq,
            };
            (&None, action)
        }
        _ => return None,
    };
    Some(Entry {
        at: event.at,
        actor: Actor::named(by.as_deref()),
        sandbox: Some(event.sandbox_id.clone()),
        action,
    })
}
