//! The listener: takes connections, hands requests to the gateway or the API, and stops well.

use std::{
    convert::Infallible,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{Router, body::Body, extract::ConnectInfo, response::Response};
use http::{
    HeaderValue, Request, StatusCode, Version,
    header::{CONNECTION, CONTENT_TYPE, HOST, RETRY_AFTER},
    request::Parts,
};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{
        conn::auto,
        graceful::{GracefulShutdown, Watcher},
    },
};
use sandkeep_gateway::{Cut, Gateway, OverTls};
use sandkeep_model::{Code, Error, Secret};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, timeout},
};
use tower::ServiceExt;

use crate::{
    reset::Resettable,
    strangers::{self, Strangers, Visit},
    tls::{self, Begins, Tls},
    worded::{Worded, whole_answer},
};

/// A connection that has not brought one whole request head by then is dropped.
const FIRST_REQUEST: Duration = Duration::from_secs(30);
/// How long a connection may wait between requests. Longer than the five minutes the SDKs
/// keep theirs, so that they close first and never send into a connection just closed.
const IDLE: Duration = Duration::from_secs(330);
/// The most the head of a request may take; more is answered 431.
pub const HEAD_LIMIT: u16 = u16::MAX;
/// A want of descriptors is told this often.
const TOLD_EVERY: Duration = Duration::from_secs(60);
/// How long requests under way may take after the server was told to stop.
const FAREWELL: Duration = Duration::from_secs(5);

/// Serves until `stop` is done, then lets requests under way finish.
pub struct Desk {
    pub gateway: Gateway,
    pub api: Router,
    pub max_connections: usize,
    /// Who shows it is no stranger.
    pub key: Secret,
    /// Connections may be encrypted, and those from elsewhere must be.
    pub tls: Option<Tls>,
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
        let strangers = Strangers::among(self.max_connections);
        let mut told: Option<Instant> = None;
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
                        if told.is_none_or(|told| told.elapsed() > TOLD_EVERY) {
                            told = Some(Instant::now());
                            tracing::warn!(%error, "a connection could not be taken; this is not told again for a minute");
                        }
                        sleep(Duration::from_millis(50)).await;
                        continue;
                    }
                },
            };
            match (Arc::clone(&places).try_acquire_owned(), strangers.enter()) {
                (Ok(place), visit) => {
                    desk.spawn(stream, peer, (place, visit), graceful.watcher());
                }
                (Err(_), _) => refuse(&stream),
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
        (place, visit): (OwnedSemaphorePermit, Visit),
        watcher: Watcher,
    ) {
        // Small answers should not wait for more to come.
        let _ = stream.set_nodelay(true);
        let cut = visit.visitor.cut.clone();
        let call = Call {
            desk: Arc::clone(self),
            peer,
            visit: Arc::new(visit),
            watcher,
            broken: Cut::default(),
        };
        tokio::spawn(async move {
            let _here = place;
            cut.run_until_cancelled(call.take(stream)).await;
        });
    }

    async fn answer(
        &self,
        request: Request<Incoming>,
        peer: SocketAddr,
        encrypted: bool,
    ) -> Response {
        let (mut parts, body) = request.into_parts();
        parts.extensions.insert(ConnectInfo(peer));
        if encrypted {
            parts.extensions.insert(OverTls);
            // What a proxy in front would say, for answers that name this server.
            forwarded(&mut parts);
        }
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

/// One connection, from its first byte to its end.
struct Call {
    desk: Arc<Desk>,
    peer: SocketAddr,
    visit: Arc<Visit>,
    watcher: Watcher,
    /// Marked when an answer over HTTP/1 was cut: the connection is reset, not closed.
    broken: Cut,
}

impl Call {
    async fn take(self, stream: TcpStream) {
        let broken = self.broken.clone();
        let Some(tls) = self.desk.tls.clone() else {
            return self.serve(Resettable::new(stream, broken), false).await;
        };
        match timeout(FIRST_REQUEST, tls::begins(&stream)).await {
            Ok(Ok(Begins::Encrypted)) => {
                let accepted = tls.accept(Resettable::new(stream, broken));
                match timeout(FIRST_REQUEST, accepted).await {
                    Ok(Ok(stream)) => self.serve(stream, true).await,
                    Ok(Err(error)) => tracing::debug!(%error, "a TLS connection was not made"),
                    Err(_) => {}
                }
            }
            Ok(Ok(Begins::Plain)) if tls::is_here(self.peer) => {
                self.serve(Resettable::new(stream, broken), false).await;
            }
            Ok(Ok(Begins::Plain)) => {
                let _ = stream.try_write(&UNENCRYPTED);
            }
            Ok(Ok(Begins::Nothing) | Err(_)) | Err(_) => {}
        }
    }

    async fn serve<IO>(self, io: IO, encrypted: bool)
    where
        IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let Self {
            desk,
            peer,
            visit,
            watcher,
            broken,
        } = self;
        let seen = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&seen);
        let service = {
            let seen = Arc::clone(&seen);
            service_fn(move |mut request: Request<Incoming>| {
                seen.store(true, Ordering::Relaxed);
                let desk = Arc::clone(&desk);
                if sandkeep_api::has_key(request.headers(), &desk.key) {
                    visit.is_known();
                }
                let (over, under_way) = (request.version(), visit.visitor.begin());
                // A connection of HTTP/2 carries others, too, and resets what is cut by itself.
                let broken = (over < Version::HTTP_2).then(|| broken.clone());
                if let Some(broken) = &broken {
                    request.extensions_mut().insert(broken.clone());
                }
                let not_answered = visit.visitor.is_not_answered();
                async move {
                    let answer = if not_answered {
                        busy(over)
                    } else {
                        desk.answer(request, peer, encrypted).await
                    };
                    Ok::<_, Infallible>(answered(answer, over, under_way, broken))
                }
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
            .serve_connection_with_upgrades(TokioIo::new(Worded::new(io, asked)), service)
            .into_owned();
        let mut connection = std::pin::pin!(watcher.watch(connection));
        let ended = match timeout(FIRST_REQUEST, connection.as_mut()).await {
            Ok(ended) => ended,
            Err(_) if seen.load(Ordering::Relaxed) => connection.await,
            Err(_) => return,
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection ended early");
        }
    }
}

fn forwarded(parts: &mut Parts) {
    let host = match parts.uri.authority() {
        Some(authority) => HeaderValue::from_str(authority.as_str()).ok(),
        None => parts.headers.get(HOST).cloned(),
    };
    parts
        .headers
        .insert("x-forwarded-proto", HeaderValue::from_static("https"));
    if let Some(host) = host {
        parts.headers.insert("x-forwarded-host", host);
    }
}

/// An answer is under way until its last byte. Who has no key is not kept.
fn answered(
    mut answer: Response,
    over: Version,
    under_way: strangers::Request,
    broken: Option<Cut>,
) -> Response {
    if answer.status() == StatusCode::UNAUTHORIZED && over < Version::HTTP_2 {
        answer
            .headers_mut()
            .insert(CONNECTION, HeaderValue::from_static("close"));
    }
    answer.map(|body| {
        Body::new(Held {
            body,
            broken,
            _under_way: under_way,
        })
    })
}

/// A body whose request is under way until it has ended.
struct Held {
    body: Body,
    /// To be marked when it fails.
    broken: Option<Cut>,
    _under_way: strangers::Request,
}

impl http_body::Body for Held {
    type Data = <Body as http_body::Body>::Data;
    type Error = <Body as http_body::Body>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Self::Data>, Self::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let (Poll::Ready(Some(Err(_))), Some(broken)) = (&polled, &self.broken) {
            broken.mark();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}

fn too_many() -> Error {
    Error::new(
        Code::ResourceExhausted,
        "the server has as many connections as it serves at once",
    )
    .hint("close idle connections, or let the operator raise max_connections")
}

/// The whole answer to a connection too many.
static BUSY: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let status = "HTTP/1.1 503 Service Unavailable";
    whole_answer(status, "retry-after: 1\r\n", &too_many())
});

/// The answer to a request on a connection that was let in only to show the key.
fn busy(over: Version) -> Response {
    metrics::counter!("sandkeep_connections_refused_total").increment(1);
    let body = serde_json::json!({ "error": too_many() }).to_string();
    let mut answer = Response::new(Body::from(body));
    *answer.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
    if over < Version::HTTP_2 {
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

/// The whole answer to a key that somebody on the way could have read.
static UNENCRYPTED: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let error = Error::invalid(
        "scheme",
        "this server takes plain HTTP from its own machine only",
    )
    .hint("use https:// with the same name and port");
    whole_answer("HTTP/1.1 400 Bad Request", "", &error)
});

/// Says no without giving the connection a task: this must cost next to nothing.
fn refuse(stream: &TcpStream) {
    metrics::counter!("sandkeep_connections_refused_total").increment(1);
    let _ = stream.try_write(&BUSY);
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
}
