//! The listener: takes connections, hands requests to the gateway or the API, and stops well.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body, extract::ConnectInfo, response::Response};
use http::Request;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
};
use sandkeep_gateway::Gateway;
use sandkeep_model::{Code, Error};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{sleep, timeout},
};
use tower::ServiceExt;

use crate::worded::{Worded, whole_answer};

/// A connection that has not brought one whole request head by then is dropped.
const FIRST_REQUEST: Duration = Duration::from_secs(30);
/// How long a connection may wait between requests. Longer than the five minutes the SDKs
/// keep theirs, so that they close first and never send into a connection just closed.
const IDLE: Duration = Duration::from_secs(330);
/// The most the head of a request may take; more is answered 431.
pub const HEAD_LIMIT: u16 = u16::MAX;
/// How long requests under way may take after the server was told to stop.
const FAREWELL: Duration = Duration::from_secs(5);

/// Serves until `stop` is done, then lets requests under way finish.
pub struct Desk {
    pub gateway: Gateway,
    pub api: Router,
    pub max_connections: usize,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk")
            .field("max_connections", &self.max_connections)
            .finish_non_exhaustive()
    }
}

impl Desk {
    pub async fn serve(self, listener: TcpListener, stop: impl Future<Output = ()>) {
        let places = Arc::new(Semaphore::new(self.max_connections));
        let graceful = GracefulShutdown::new();
        let desk = Arc::new(self);
        let mut stop = std::pin::pin!(stop);
        loop {
            let (stream, peer) = tokio::select! {
                () = &mut stop => break,
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        // Out of descriptors or memory: waiting is all that helps.
                        tracing::warn!(%error, "a connection could not be taken");
                        sleep(Duration::from_millis(50)).await;
                        continue;
                    }
                },
            };
            match Arc::clone(&places).try_acquire_owned() {
                Ok(place) => desk.spawn(stream, peer, place, &graceful),
                Err(_) => refuse(&stream),
            }
        }
        drop(listener);
        if timeout(FAREWELL, graceful.shutdown()).await.is_err() {
            tracing::info!("connections that did not end in time were cut");
        }
    }

    fn spawn(
        self: &Arc<Self>,
        stream: TcpStream,
        peer: SocketAddr,
        place: OwnedSemaphorePermit,
        graceful: &GracefulShutdown,
    ) {
        // Small answers should not wait for more to come.
        let _ = stream.set_nodelay(true);
        let seen = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&seen);
        let service = {
            let desk = Arc::clone(self);
            let seen = Arc::clone(&seen);
            service_fn(move |request: Request<Incoming>| {
                seen.store(true, Ordering::Relaxed);
                let desk = Arc::clone(&desk);
                async move { Ok::<_, Infallible>(desk.answer(request, peer).await) }
            })
        };
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE)
            .max_buf_size(HEAD_LIMIT.into());
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(Duration::from_secs(60))
            .max_header_list_size(HEAD_LIMIT.into())
            .max_concurrent_streams(256);
        let connection = builder
            .serve_connection_with_upgrades(TokioIo::new(Worded::new(stream, asked)), service)
            .into_owned();
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            let _place = place;
            let mut connection = std::pin::pin!(connection);
            let first = timeout(FIRST_REQUEST, connection.as_mut()).await;
            let ended = match first {
                Ok(ended) => ended,
                Err(_) if seen.load(Ordering::Relaxed) => connection.await,
                Err(_) => return,
            };
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ended early");
            }
        });
    }

    async fn answer(&self, request: Request<Incoming>, peer: SocketAddr) -> Response {
        let (mut parts, body) = request.into_parts();
        parts.extensions.insert(ConnectInfo(peer));
        match self.gateway.target(&parts) {
            Ok(Some(target)) => {
                let request = Request::from_parts(parts, body);
                self.gateway.serve(target, request).await.map(Body::new)
            }
            Ok(None) => {
                let request = Request::from_parts(parts, Body::new(body));
                match self.api.clone().oneshot(request).await {
                    Ok(response) => response,
                    Err(never) => match never {},
                }
            }
            Err(answer) => answer.map(Body::new),
        }
    }
}

/// The whole answer to a connection too many.
static BUSY: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let error = Error::new(
        Code::ResourceExhausted,
        "the server has as many connections as it serves at once",
    )
    .hint("close idle connections, or let the operator raise max_connections");
    let status = "HTTP/1.1 503 Service Unavailable";
    whole_answer(status, "retry-after: 1\r\n", &error)
});

/// Says no without giving the connection a task: this must cost next to nothing.
fn refuse(stream: &TcpStream) {
    metrics::counter!("sandkeep_connections_refused_total").increment(1);
    let _ = stream.try_write(&BUSY);
}

/// Lifts the limit of open files as far as we may, and returns how many connections that
/// leaves room for: boxes, the ledger and connections into boxes need descriptors too.
pub fn room_for_connections(wanted: usize) -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    const PLENTY: u64 = 1 << 20;
    let most = getrlimit(Resource::Nofile).maximum;
    // Beyond the hard limit only with CAP_SYS_RESOURCE; up to it always.
    for limit in [most.map(|most| most.max(PLENTY)), most] {
        let lifted = Rlimit {
            current: limit,
            maximum: limit,
        };
        if setrlimit(Resource::Nofile, lifted).is_ok() {
            break;
        }
    }
    let room = room_in(getrlimit(Resource::Nofile).current);
    if room < wanted {
        tracing::info!(
            room,
            wanted,
            "the limit of open files allows fewer connections than max_connections; raise it (LimitNOFILE= in systemd)"
        );
    }
    wanted.min(room)
}

fn room_in(open_files: Option<u64>) -> usize {
    const LEAST: u64 = 16;
    open_files.map_or(usize::MAX, |files| {
        let kept_back = (files / 4).max(512);
        usize::try_from(files.saturating_sub(kept_back).max(LEAST)).unwrap_or(usize::MAX)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_refusal_is_a_whole_answer() {
        let text = std::str::from_utf8(&BUSY).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(
            head.lines()
                .any(|line| line == format!("content-length: {}", body.len()))
        );
        let value: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(value["error"]["retryable"], true);
    }

    #[test]
    fn a_usual_limit_has_room_for_ten_thousand() {
        assert!(room_in(Some(20_000)) >= 10_000);
        assert_eq!(room_in(Some(1024)), 512);
        assert_eq!(room_in(Some(64)), 16);
        assert_eq!(room_in(None), usize::MAX);
    }
}
