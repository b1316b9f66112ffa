//! HTTP/1 in the clear: every request is decided, not only the first of a connection.
//!
//! Requests are read and written anew by a real HTTP library, so what the policy saw is what the
//! server gets: there is nothing to smuggle between two readings.

use std::{
    convert::Infallible,
    net::IpAddr,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http::{
    HeaderValue, Method, Request, Response, StatusCode, Uri, Version,
    header::{HOST, UPGRADE},
};
use http_body_util::{BodyExt, Either, Full, Limited};
use hyper::{
    body::Incoming,
    client::conn::http1::SendRequest,
    service::service_fn,
    upgrade::{OnUpgrade, on},
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{io::copy_bidirectional, sync::Mutex as AsyncMutex};
use tokio_util::task::AbortOnDropHandle;

use super::{
    clean::{
        refuse_ambiguous_framing, strip_expectations, strip_for_narrowed, strip_upgrades_that_hide,
    },
    connection::{Connection, End, cut_when},
    dial::DialError,
    meter::Flow,
    refusal,
    stream::BoxStream,
    verdict::{Basis, ByAddress, Sight},
};
use crate::{
    denials::Via,
    hooks::{Inside, Place, Visit},
    intercept::{strip_hop_by_hop, strip_response},
    policy::{Decision, Host, HttpTarget, Refusal, Target},
    state::{BoxState, BoxView},
};

pub(crate) const MAX_HEAD: usize = 64 * 1024;
const MAX_HEADERS: usize = 128;
const MAX_INSIDE_BODY: usize = 64 * 1024;

type Body = Either<Incoming, Full<Bytes>>;

struct Session {
    connection: Connection,
    /// A rule that names the address itself: the host a request names does not matter then.
    by_rule: Option<ByAddress>,
    /// Set by the first request let through; all others must name the same host.
    settled: OnceLock<Settled>,
    upstream: AsyncMutex<Option<Upstream>>,
    upgraded: Mutex<Option<AbortOnDropHandle<()>>>,
}

struct Settled {
    host: Host,
    basis: Basis,
    flow: Flow,
}

/// A request that may go on.
struct Admitted {
    host: Host,
    /// Only some requests to this host are allowed.
    narrowed: bool,
}

struct Upstream {
    sender: SendRequest<Incoming>,
    /// Ends with the session: nothing of a box lives on without it.
    _driver: AbortOnDropHandle<()>,
}

/// Bounds for everything a box says in HTTP.
pub(crate) fn server(head_within: Duration) -> hyper::server::conn::http1::Builder {
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(head_within)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS)
        .preserve_header_case(true)
        .half_close(true);
    builder
}

pub async fn serve(mut connection: Connection, by_rule: Option<ByAddress>) -> End {
    let stream = connection.stream();
    let mut watch = connection.watch.clone();
    let session = Arc::new(Session {
        connection,
        by_rule,
        settled: OnceLock::new(),
        upstream: AsyncMutex::default(),
        upgraded: Mutex::default(),
    });
    let work = async {
        let service = service_fn(|request| {
            let session = Arc::clone(&session);
            async move { Ok::<_, Infallible>(session.answer(request).await) }
        });
        let served = server(session.connection.state.shared.patience.head_within)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades()
            .await;
        let upgraded = session
            .upgraded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(upgraded) = upgraded {
            // It ends as the two sides wish.
            drop(upgraded.await);
        }
        served
    };
    let held = cut_when(&mut watch, work, |policy| {
        session.settled.get().is_none_or(|settled| {
            let connection = &session.connection;
            settled
                .basis
                .decide(
                    connection.to.port(),
                    Sight::Seen,
                    policy,
                    connection.state.guard(),
                )
                .is_allowed()
        })
    })
    .await;
    match held {
        Some(Ok(())) => End::Clean,
        _ => End::Reset,
    }
}

impl Session {
    async fn answer(&self, mut request: Request<Incoming>) -> Response<Body> {
        let shown = shown_host(&request);
        strip_upgrades_that_hide(request.headers_mut());
        let admitted = match self.admit(&request) {
            Ok(admitted) => admitted,
            Err(no) => return self.refused(&shown, no),
        };
        let from_box = request
            .headers()
            .contains_key(UPGRADE)
            .then(|| on(&mut request));
        if let Err(no) = self.make_plain(&mut request, &admitted, from_box.is_some()) {
            return self.refused(&shown, no);
        }
        let host = admitted.host;
        match self.send(request).await {
            Ok(response) => self.pass_back(response, from_box),
            Err(DialError::Refused(refusal)) => self.refused(&host.to_string(), refusal),
            Err(DialError::Failed(error)) => {
                refusal::unreachable(&host.to_string(), &error.to_string()).map(Either::Right)
            }
        }
    }

    /// What is sent on has one form, whatever form came in.
    fn make_plain<B>(
        &self,
        request: &mut Request<B>,
        admitted: &Admitted,
        switching: bool,
    ) -> Result<(), Refusal> {
        let path = request
            .uri()
            .path_and_query()
            .map_or("/", |path| path.as_str());
        *request.uri_mut() = path
            .parse::<Uri>()
            .map_err(|_| Refusal::of_form("its target is no path", "write /path"))?;
        *request.version_mut() = Version::HTTP_11;
        let headers = request.headers_mut();
        strip_hop_by_hop(headers, switching);
        strip_expectations(headers);
        if admitted.narrowed {
            strip_for_narrowed(headers);
        }
        let host = match (&admitted.host, self.connection.to.port()) {
            (Host::Address(IpAddr::V6(v6)), 80) => format!("[{v6}]"),
            (Host::Address(IpAddr::V6(v6)), port) => format!("[{v6}]:{port}"),
            (host, 80) => host.to_string(),
            (host, port) => format!("{host}:{port}"),
        };
        let host = HeaderValue::try_from(host).map_err(|_| {
            Refusal::of_form("its host is no name", "name the host that is dialled")
        })?;
        headers.insert(HOST, host);
        Ok(())
    }

    fn refused(&self, host: &str, no: Refusal) -> Response<Body> {
        let response = refusal::denied(host, &no);
        let attempt = crate::state::Attempt {
            via: Via::Http,
            host: host.to_owned(),
            port: self.connection.to.port(),
        };
        self.connection.state.deny(&attempt, no);
        response.map(Either::Right)
    }

    /// Decides on one request.
    fn admit(&self, request: &Request<Incoming>) -> Result<Admitted, Refusal> {
        let port = self.connection.to.port();
        let host = named_host(request, "http", port)?;
        if let Some(settled) = self.settled.get()
            && settled.host != host
        {
            return Err(Refusal::of_form(
                format!("this connection is for {}, not for {host}", settled.host),
                "open a new connection for another host",
            ));
        }
        let state = &self.connection.state;
        let policy = state.policy();
        if let Host::Address(address) = host
            && address != self.connection.to.ip()
        {
            return Err(Refusal::of_form(
                format!("the request is for {address}, the connection went to another address"),
                "name the host that is dialled",
            ));
        }
        let target = Target {
            host: &host,
            port,
            http: Some(HttpTarget {
                method: request.method().as_str(),
                path: request.uri().path(),
            }),
        };
        let narrowed = policy.needs_interception(&host, port);
        refuse_ambiguous_framing(request, narrowed)?;
        let (basis, rule) = match policy.decide(&target, state.guard()) {
            Decision::Allow { rule } => {
                if narrowed && upgrades_to_other_than_websocket(request) {
                    return Err(Refusal::of_form(
                        "after this upgrade requests could not be seen any more",
                        "do without the Upgrade header",
                    ));
                }
                match host {
                    Host::Address(address) => (Basis::Address(address), rule),
                    Host::Name(_) => (Basis::Name(host.clone()), rule),
                }
            }
            Decision::Deny(refusal) => match &self.by_rule {
                // Rules for this very name are stricter than one for its address.
                Some(found) if !narrowed => (found.basis.clone(), found.rule.clone()),
                _ => return Err(refusal),
            },
        };
        self.settled.get_or_init(|| Settled {
            host: host.clone(),
            flow: Flow::open(
                &self.connection.meter,
                Via::Http,
                host.clone(),
                port,
                rule,
                false,
            ),
            basis,
        });
        Ok(Admitted { host, narrowed })
    }

    async fn send(&self, request: Request<Incoming>) -> Result<Response<Incoming>, DialError> {
        let failed = |error: hyper::Error| DialError::Failed(std::io::Error::other(error));
        let mut upstream = self.upstream.lock().await;
        if let Some(open) = upstream.as_mut()
            && open.sender.ready().await.is_ok()
        {
            return open.sender.send_request(request).await.map_err(failed);
        }
        let mut fresh = self.connect().await?;
        let response = fresh.sender.send_request(request).await.map_err(failed);
        *upstream = Some(fresh);
        response
    }

    async fn connect(&self) -> Result<Upstream, DialError> {
        let settled = self
            .settled
            .get()
            .ok_or_else(|| DialError::Failed(std::io::ErrorKind::NotConnected.into()))?;
        let stream = self.connection.dial(&settled.basis).await?;
        if let Ok(peer) = stream.peer_addr() {
            settled.flow.dialled(peer.ip());
        }
        let (sender, driver) = hyper::client::conn::http1::Builder::new()
            .preserve_header_case(true)
            .max_buf_size(MAX_HEAD)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| DialError::Failed(std::io::Error::other(error)))?;
        let driver = tokio::spawn(async move {
            // The sender sees the same end.
            drop(driver.with_upgrades().await);
        });
        Ok(Upstream {
            sender,
            _driver: AbortOnDropHandle::new(driver),
        })
    }

    fn pass_back(
        &self,
        mut response: Response<Incoming>,
        from_box: Option<OnUpgrade>,
    ) -> Response<Body> {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let Some(from_box) = from_box else {
                return refusal::unreachable("", "the server switched protocols unasked")
                    .map(Either::Right);
            };
            let from_server = on(&mut response);
            let both = tokio::spawn(async move {
                if let Ok((inner, outer)) = tokio::try_join!(from_box, from_server) {
                    let (mut inner, mut outer) = (TokioIo::new(inner), TokioIo::new(outer));
                    // It ends as the two sides wish.
                    drop(copy_bidirectional(&mut inner, &mut outer).await);
                }
            });
            *self.upgraded.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(AbortOnDropHandle::new(both));
        }
        let switching = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        strip_response(response.headers_mut(), switching);
        response.map(Either::Left)
    }
}

pub(crate) fn upgrades_to_other_than_websocket<B>(request: &Request<B>) -> bool {
    request
        .headers()
        .get_all(UPGRADE)
        .iter()
        .any(|value| !value.as_bytes().eq_ignore_ascii_case(b"websocket"))
}

/// What to call the host in a refusal, before it is known to be one.
pub(crate) fn shown_host<B>(request: &Request<B>) -> String {
    let said = request
        .uri()
        .authority()
        .map(|authority| authority.as_str())
        .or_else(|| request.headers().get(HOST)?.to_str().ok())
        .unwrap_or("");
    let plain: String = said.chars().take(Host::MAX_LENGTH).collect();
    Host::parse_authority(&plain).map_or(plain, |(host, _)| host.to_string())
}

/// The one host a request names, in all the places where it can.
pub(crate) fn named_host<B>(
    request: &Request<B>,
    scheme: &str,
    port: u16,
) -> Result<Host, Refusal> {
    let hint = "send one Host header with the name of the host that is dialled";
    let no = |why: &str| Refusal::of_form(why, hint);
    if request.method() == Method::CONNECT {
        return Err(Refusal::of_form(
            "there is no proxy here to CONNECT through",
            "connect directly: connections are passed on transparently",
        ));
    }
    let mut said = request.headers().get_all(HOST).iter();
    let header = match (said.next(), said.next(), request.uri().authority()) {
        (Some(header), None, _) => header
            .to_str()
            .map_err(|_| no("the Host header is no text"))?,
        // HTTP/2 has its own place for it.
        (None, None, Some(authority)) if request.version() == Version::HTTP_2 => authority.as_str(),
        _ => return Err(no("the request has no Host header, or more than one")),
    };
    let parse = |text: &str| Host::parse_authority(text).map_err(|error| no(&error.to_string()));
    let (host, said_port) = parse(header)?;
    if said_port.is_some_and(|said| said != port) {
        return Err(no(
            "the Host header names another port than the one dialled",
        ));
    }
    if let Some(authority) = request.uri().authority() {
        let (target, target_port) = parse(authority.as_str())?;
        if request.uri().scheme_str() != Some(scheme)
            || target != host
            || target_port.is_some_and(|said| said != port)
        {
            return Err(no(
                "the request line names another host than the Host header",
            ));
        }
    }
    Ok(host)
}

/// Requests to ourselves.
pub async fn serve_inside(
    state: &Arc<BoxState>,
    inside: Arc<dyn Inside>,
    place: Place,
    stream: BoxStream,
) -> End {
    let service = service_fn(|request: Request<Incoming>| {
        let (from, inside) = (BoxView(Arc::clone(state)), Arc::clone(&inside));
        async move {
            let (parts, body) = request.into_parts();
            let response = match Limited::new(body, MAX_INSIDE_BODY).collect().await {
                Ok(body) => {
                    let request = Request::from_parts(parts, body.to_bytes());
                    inside
                        .answer(Visit {
                            from,
                            place,
                            request,
                        })
                        .await
                }
                Err(_) => {
                    let mut response = Response::new(Bytes::new());
                    *response.status_mut() = StatusCode::PAYLOAD_TOO_LARGE;
                    response
                }
            };
            Ok::<_, Infallible>(response.map(Full::new))
        }
    });
    match server(state.shared.patience.inside_within)
        .serve_connection(TokioIo::new(stream), service)
        .await
    {
        Ok(()) => End::Clean,
        Err(_) => End::Reset,
    }
}
