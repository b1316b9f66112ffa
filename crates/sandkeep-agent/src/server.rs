//! The HTTP server: connections, routes, CORS.

use std::convert::Infallible;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE,
};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use sandkeep_agent_api::{ConnectError, host as host_api};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixListener};
use tokio::sync::{Semaphore, mpsc};

use crate::connect::error_response;
use crate::gate::Gate;
use crate::{Body, State, empty_body, fs, host, metrics, process, trust, tunnel};

/// Connections served at once; more wait in the socket's queue.
const MAX_CONNECTIONS: usize = 512;
/// Read buffer of a connection, which also bounds the size of a request's head.
const MAX_BUFFER: usize = 64 << 10;
const MAX_HEADERS: usize = 128;
/// Connections taken by the doorkeeper that the runtime has not seen yet.
const WAITING: usize = 16;
/// Until the next try, when there are no descriptors or no memory for a connection.
const REST: Duration = Duration::from_millis(50);

/// Where connections come from.
pub(crate) enum Door {
    /// A socket only the host can reach.
    Socket(UnixListener),
    /// The network of the box, with a gate in it.
    Network(TcpListener, Arc<Gate>),
}

/// Serves connections for ever.
pub(crate) async fn serve(door: Door, state: State) -> std::io::Result<Infallible> {
    match door {
        Door::Socket(listener) => serve_socket(listener, state).await,
        Door::Network(listener, gate) => serve_network(listener, gate, state).await,
    }
}

/// Whoever does not come from the host is turned away before it costs anything.
async fn serve_network(
    listener: TcpListener,
    gate: Arc<Gate>,
    state: State,
) -> std::io::Result<Infallible> {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut callers = doorkeeper(listener, Arc::clone(&gate), state.clone())?;
    while let Some(mut stream) = callers.recv().await {
        let (gate, places, state) = (Arc::clone(&gate), Arc::clone(&places), state.clone());
        tokio::spawn(async move {
            // Small answers must not wait for each other.
            let _ = stream.set_nodelay(true);
            if gate.admits(&mut stream).await
                && let Ok(_place) = places.acquire().await
            {
                serve_connection(stream, state).await;
            }
        });
    }
    Err(std::io::Error::other("nobody takes connections any more"))
}

/// Takes connections on a thread that waits in `accept` itself and not in `epoll_wait`. gVisor may
/// write an image while its network notes an event; what is then written down of an epoll is not
/// whole, and a listener registered in it is never heard of again (google/gvisor#13920, #14147).
/// A call that waits is begun anew after a restore and looks for itself.
fn doorkeeper(
    listener: TcpListener,
    gate: Arc<Gate>,
    state: State,
) -> std::io::Result<mpsc::Receiver<TcpStream>> {
    let (pass_on, callers) = mpsc::channel(WAITING);
    let runtime = tokio::runtime::Handle::current();
    std::thread::Builder::new()
        .name("doorkeeper".to_owned())
        .stack_size(64 << 10)
        .spawn(move || {
            let _inside = runtime.enter();
            loop {
                let taken = listener.accept().and_then(|(stream, peer)| {
                    if !gate.knows(peer.ip()) {
                        return Ok(None);
                    }
                    stream.set_nonblocking(true)?;
                    TcpStream::from_std(stream).map(Some)
                });
                match taken {
                    Ok(None) => {}
                    Ok(Some(stream)) => {
                        if pass_on.blocking_send(stream).is_err() {
                            return;
                        }
                    }
                    Err(error) => {
                        note_refused(&error, &state);
                        std::thread::sleep(REST);
                    }
                }
            }
        })?;
    Ok(callers)
}

async fn serve_socket(listener: UnixListener, state: State) -> std::io::Result<Infallible> {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let place = Arc::clone(&places)
            .acquire_owned()
            .await
            .map_err(std::io::Error::other)?;
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                note_refused(&error, &state);
                tokio::time::sleep(REST).await;
                continue;
            }
        };
        let state = state.clone();
        tokio::spawn(async move {
            serve_connection(stream, state).await;
            drop(place);
        });
    }
}

/// Out of descriptors or memory: the queue keeps the caller, try again soon.
fn note_refused(error: &std::io::Error, state: &State) {
    state
        .log()
        .add(host_api::LogLevel::Warn, format!("cannot accept: {error}"));
}

async fn serve_connection<S>(stream: S, state: State)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request| {
        let state = state.clone();
        async move { Ok::<_, Infallible>(route(state, request).await) }
    });
    // A connection that fails has nobody left to tell.
    let _ = http1::Builder::new()
        .max_buf_size(MAX_BUFFER)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await;
}

/// Answers one request.
async fn route(state: State, request: Request<Incoming>) -> Response<Body> {
    if request.method() == Method::CONNECT {
        return tunnel::open(&state, request).await;
    }
    let mut response = if request.method() == Method::OPTIONS {
        no_content()
    } else {
        dispatch(state, request).await
    };
    allow_browsers(response.headers_mut());
    response
}

async fn dispatch(state: State, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    if let Some(method) = path.strip_prefix("/process.Process/") {
        return match rpc_refusal(&request) {
            Some(refusal) => refusal,
            None => process::rpc(state, method, request).await,
        };
    }
    if let Some(method) = path.strip_prefix("/filesystem.Filesystem/") {
        return match rpc_refusal(&request) {
            Some(refusal) => refusal,
            None => fs::rpc(state, method, request).await,
        };
    }
    match (request.method(), path.as_str()) {
        (_, "/files") => fs::files(state, request).await,
        (&Method::GET, "/health") => no_content(),
        (&Method::GET, "/metrics") => metrics::answer(&state),
        (&Method::GET, "/envs") => host::envs(&state),
        (&Method::POST, host_api::INIT_PATH) => host::init(state, request).await,
        (&Method::POST, host_api::LIMITS_PATH) => host::limits(state, request).await,
        (&Method::GET, host_api::USAGE_PATH) => host::usage(&state),
        (&Method::POST, host_api::WARM_PATH) => host::warm(state).await,
        (&Method::POST, host_api::SETTLE_PATH) => host::settle().await,
        (&Method::POST, host_api::HOLD_PATH) => host::hold(state).await,
        (&Method::POST, host_api::RELEASE_PATH) => host::release(state).await,
        (&Method::POST, host_api::CLOCK_PATH) => host::clock(state, request).await,
        (&Method::POST, host_api::TRUST_PATH) => trust::trust(state, request).await,
        (&Method::POST, host_api::SIGNAL_PATH) => host::signal(state, request).await,
        (&Method::GET, host_api::PORTS_PATH) => host::ports(),
        (&Method::GET, host_api::LOGS_PATH) => host::logs(&state, request.uri().query()),
        _ => error_response(&ConnectError::not_found(format!("there is no {path} here"))),
    }
}

fn rpc_refusal(request: &Request<Incoming>) -> Option<Response<Body>> {
    (request.method() != Method::POST).then(|| {
        let mut response = Response::new(empty_body());
        *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
        response
            .headers_mut()
            .insert(http::header::ALLOW, HeaderValue::from_static("POST"));
        response
    })
}

pub(crate) fn no_content() -> Response<Body> {
    let mut response = Response::new(empty_body());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}

fn allow_browsers(headers: &mut HeaderMap) {
    for (name, value) in [
        (ACCESS_CONTROL_ALLOW_ORIGIN, "*"),
        (
            ACCESS_CONTROL_ALLOW_METHODS,
            "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS",
        ),
        // Browsers do not count Authorization into the star.
        (ACCESS_CONTROL_ALLOW_HEADERS, "Authorization, *"),
        (ACCESS_CONTROL_EXPOSE_HEADERS, "*"),
        (ACCESS_CONTROL_MAX_AGE, "7200"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
}
