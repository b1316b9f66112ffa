//! What happened, as it happens.

use std::{convert::Infallible, time::Duration};

use axum::{
    Json,
    extract::State,
    response::{
        IntoResponse, Response,
        sse::{Event as SseEvent, Sse},
    },
};
use futures_util::{Stream, stream};
use http::{HeaderMap, HeaderValue};
use sandkeep_model::{Error, Event, Result, SandboxId};
use serde::Serialize;
use tokio::{
    sync::{broadcast, mpsc},
    time::{Instant, timeout_at},
};
use utoipa::ToSchema;

use crate::{
    error::NativeError,
    query::{NativeQuery, shown},
    state::Shared,
};

/// A comment after so much silence shows both sides that the other is there.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// How long a client may leave an event unread before it is cut off.
const SLOW_CLIENT: Duration = Duration::from_secs(30);
/// Events that wait for the client, and one page of the ledger.
const WAITING: usize = 64;
const PAGE: u32 = 256;
/// Events of an answer in JSON.
const LIST: u32 = 1000;

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EventList {
    /// Oldest first; give the last `seq` back as `after` to read on.
    #[schema(value_type = Vec<Object>)]
    events: Vec<Event>,
}

/// The stream of events (Server-Sent Events).
///
/// Without a cursor it begins now; with `Last-Event-ID` or `after` it first tells all that
/// came after that event, without gaps or repetitions. `after=0` tells everything that is
/// kept. Each event's `id` is its `seq`, its name the kind of event, its data one JSON
/// object. A client that reads too slowly is cut off and can come back with its last id.
///
/// With `follow=false` the stream ends after the events that there were when it was asked for.
///
/// `format=json` answers at once instead: `{"events": [...]}`, the oldest kept ones after
/// `after`, at most 1000.
#[utoipa::path(get, path = "/v1/events", tag = "events",
    params(
        ("after" = Option<i64>, Query, description = "Begin after this `seq`"),
        ("sandbox_id" = Option<String>, Query, description = "Only events of this sandbox"),
        ("follow" = Option<bool>, Query, description = "Whether to wait for what is yet to happen; `true` when left out"),
        ("format" = Option<String>, Query, description = "`sse`, or `json` for one answer"),
        ("Last-Event-ID" = Option<i64>, Header, description = "As `after`; sent by clients that come back"),
    ),
    responses((status = 200, description = "Events", content(
        (String = "text/event-stream"),
        (EventList = "application/json"),
    ))))]
pub(crate) async fn events(
    State(state): State<Shared>,
    NativeQuery(mut query): NativeQuery,
    headers: HeaderMap,
) -> Result<Response, NativeError> {
    let after = query.parsed::<i64>("after")?;
    let only = query.parsed::<SandboxId>("sandbox_id")?;
    let follow = query.parsed::<bool>("follow")?.unwrap_or(true);
    let format = query.take("format")?;
    query.finish("after, sandbox_id, follow and format")?;
    // A client that comes back knows best, whatever its address says.
    let cursor = last_event_id(&headers)?.or(after);
    match format.as_deref() {
        None | Some("" | "sse") => {}
        Some("json") => {
            let events = state
                .keeper
                .events_after(cursor.unwrap_or(0), only.as_ref(), LIST)
                .await?;
            return Ok(Json(EventList { events }).into_response());
        }
        Some(other) => {
            return Err(Error::invalid(
                "format",
                format!("format is {}, it must be sse or json", shown(other)),
            )
            .into());
        }
    }
    // The bell first: what happens from here on rings it.
    let bell = state.keeper.subscribe();
    let newest = state.keeper.last_event().await?;
    let cursor = cursor.unwrap_or(newest);
    let (tell, told) = mpsc::channel(WAITING);
    let teller = Teller { state, only, tell };
    tokio::spawn(async move {
        let told = if follow {
            teller.run(cursor, bell).await
        } else {
            teller.tell_between(cursor, newest).await.map(drop)
        };
        // Whatever the reason, the client comes back with its last id.
        if let Err(Some(error)) = told {
            tracing::warn!(%error, "the stream of events broke off");
        }
    });
    let mut response = Sse::new(drained(told)).into_response();
    response
        .headers_mut()
        .insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

fn last_event_id(headers: &HeaderMap) -> Result<Option<i64>> {
    let Some(value) = headers.get("last-event-id") else {
        return Ok(None);
    };
    let text = value.to_str().unwrap_or("?").trim();
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| {
        Error::invalid("Last-Event-ID", "Last-Event-ID is not one of this server")
            .hint("it is the number given as id of the last event")
    })
}

fn drained(
    told: mpsc::Receiver<SseEvent>,
) -> impl Stream<Item = Result<SseEvent, Infallible>> + Send {
    stream::unfold(told, |mut told| async move {
        told.recv().await.map(|event| (Ok(event), told))
    })
}

/// Why a stream ended: the client left or the server stops (`None`), or something broke.
type Ended = Option<Error>;

struct Teller {
    state: Shared,
    only: Option<SandboxId>,
    tell: mpsc::Sender<SseEvent>,
}

impl Teller {
    /// Events always come from the ledger, in its order; the broadcast is only the bell
    /// that says there are new ones. So nothing is missed, told twice or out of order.
    async fn run(&self, mut last: i64, mut bell: broadcast::Receiver<Event>) -> Result<(), Ended> {
        loop {
            last = self.tell_between(last, i64::MAX).await?;
            self.wait(&mut bell).await?;
        }
    }

    /// Until there is something new, with a sign of life now and then.
    async fn wait(&self, bell: &mut broadcast::Receiver<Event>) -> Result<(), Ended> {
        let mut quiet = Instant::now() + KEEPALIVE;
        loop {
            let rung = tokio::select! {
                rung = timeout_at(quiet, bell.recv()) => rung,
                () = self.state.shutdown.cancelled() => return Err(None),
                () = self.tell.closed() => return Err(None),
            };
            match rung {
                Ok(Ok(event)) if self.only.as_ref().is_some_and(|id| *id != event.sandbox_id) => {}
                Ok(Ok(_) | Err(broadcast::error::RecvError::Lagged(_))) => {
                    swallow(bell);
                    return Ok(());
                }
                Ok(Err(broadcast::error::RecvError::Closed)) => return Err(None),
                Err(_) => {
                    self.send(SseEvent::default().comment("keepalive")).await?;
                    quiet = Instant::now() + KEEPALIVE;
                }
            }
        }
    }

    /// Tells everything after `seq` up to `newest`, and answers with the last told.
    async fn tell_between(&self, mut seq: i64, newest: i64) -> Result<i64, Ended> {
        loop {
            let page = self
                .state
                .keeper
                .events_after(seq, self.only.as_ref(), PAGE)
                .await
                .map_err(Some)?;
            let full = page.len() >= PAGE as usize;
            for event in page {
                if event.seq > newest {
                    return Ok(seq);
                }
                seq = seq.max(event.seq);
                self.send(line(&event)?).await?;
            }
            if !full {
                return Ok(seq);
            }
        }
    }

    async fn send(&self, event: SseEvent) -> Result<(), Ended> {
        self.tell
            .send_timeout(event, SLOW_CLIENT)
            .await
            .map_err(|_| None)
    }
}

/// Takes the rings that came meanwhile: one look into the ledger answers all of them.
fn swallow(bell: &mut broadcast::Receiver<Event>) {
    use broadcast::error::TryRecvError;
    while matches!(bell.try_recv(), Ok(_) | Err(TryRecvError::Lagged(_))) {}
}

fn line(event: &Event) -> Result<SseEvent, Ended> {
    let data = serde_json::to_string(event)
        .map_err(|error| Some(Error::internal(format!("writing an event: {error}"))))?;
    Ok(SseEvent::default()
        .id(event.seq.to_string())
        .event(event.kind.name())
        .data(data))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandkeep_model::{EventKind, Timestamp};

    fn event(seq: i64) -> Event {
        Event {
            seq,
            at: Timestamp::from_millis(0),
            sandbox_id: SandboxId::random(),
            kind: EventKind::Adopted,
        }
    }

    #[test]
    fn many_rings_are_one_look() {
        let (ring, mut bell) = broadcast::channel(2);
        for seq in [6, 5, 7] {
            ring.send(event(seq)).unwrap();
        }
        swallow(&mut bell);
        assert!(bell.is_empty());
    }

    #[test]
    fn the_last_id_is_a_number() {
        let with = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("last-event-id", value.parse().unwrap());
            last_event_id(&headers)
        };
        assert_eq!(with("17").unwrap(), Some(17));
        assert_eq!(with("").unwrap(), None);
        assert_eq!(last_event_id(&HeaderMap::new()).unwrap(), None);
        let error = with("x").unwrap_err();
        assert_eq!(error.field.as_deref(), Some("Last-Event-ID"));
    }
}
