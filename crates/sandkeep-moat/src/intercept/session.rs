//! The requests of one intercepted connection.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http::{
    HeaderValue, Method, Request, Response, StatusCode, Uri, Version,
    header::{HOST, UPGRADE},
    request::Parts,
};
use http_body::Body as HttpBody;
use http_body_util::{Either, Full};
use hyper::{
    body::Incoming,
    ext::ReasonPhrase,
    service::service_fn,
    upgrade::{OnUpgrade, on},
};
use hyper_util::rt::TokioIo;
use tokio::{sync::Mutex as AsyncMutex, time::timeout};
use tokio_rustls::server::TlsStream;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use super::{
    attach::attach,
    gate::{Search, Stop},
    headers::{ask_for_plain, strip_hop_by_hop, strip_response, unreadable},
    http2::{self, Tied},
    needles::{Needles, Sought},
    relay::relay,
    scan_body::ScanBody,
    secrets::{SecretSource, SecretUse},
    standing::{MOST_NEAR_MISSES, Standing, Watched},
    upstream::{ConnectError, Connector, Tongue, Upstream},
};
use crate::{
    policy::{Binding, Decision, HttpTarget, Reason, Refusal, Target},
    proxy::{
        BoxStream, DialError, Wayout, named_host, refusal, refuse_ambiguous_framing, server,
        shown_host, strip_expectations, strip_for_narrowed, upgrades_to_other_than_websocket,
    },
};

/// From the head of a request to the head of the answer: large uploads lie between, and models
/// think for minutes before they say a word.
const ANSWER_WITHIN: Duration = Duration::from_secs(3600);

type Body = Either<ScanBody, Full<Bytes>>;
type Refused = Box<Response<Full<Bytes>>>;

struct Session {
    way: Wayout,
    connector: Connector,
    secrets: Arc<dyn SecretSource>,
    standing: Arc<Standing>,
    /// Kept for the next request, which mostly looks for the same.
    sought: Mutex<Option<Arc<Sought>>>,
    tongue: Tongue,
    upstream: AsyncMutex<Option<Upstream>>,
    /// Connections that take no more requests; those under way on them go on.
    retired: Mutex<Vec<AbortOnDropHandle<()>>>,
    switched: Mutex<Option<AbortOnDropHandle<()>>>,
}

pub async fn serve(
    stream: TlsStream<BoxStream>,
    way: Wayout,
    connector: Connector,
    secrets: Arc<dyn SecretSource>,
    standing: Arc<Standing>,
) {
    let head_within = way.view().0.shared.patience.head_within;
    let tongue = match stream.get_ref().1.alpn_protocol() {
        Some(http2::PROTOCOL) => Tongue::Http2,
        _ => Tongue::Http1,
    };
    let session = Arc::new(Session {
        way,
        connector,
        secrets,
        standing,
        sought: Mutex::default(),
        tongue,
        upstream: AsyncMutex::default(),
        retired: Mutex::default(),
        switched: Mutex::default(),
    });
    let service = service_fn(|request| {
        let session = Arc::clone(&session);
        async move { Ok::<_, Infallible>(session.answer(request).await) }
    });
    // A connection that breaks off is the affair of the two sides.
    if tongue == Tongue::Http2 {
        let streams = CancellationToken::new();
        let _end_with_us = streams.clone().drop_guard();
        let served = http2::server(Tied(streams)).serve_connection(TokioIo::new(stream), service);
        return drop(served.await);
    }
    drop(
        server(head_within)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades()
            .await,
    );
    let switched = session
        .switched
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take();
    if let Some(switched) = switched {
        // It ends as the two sides wish.
        drop(switched.await);
    }
}

impl Session {
    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let in_grpc = self.tongue == Tongue::Http2 && http2::is_grpc(request.headers());
        self.exchange(request).await.unwrap_or_else(|refusal| {
            let refusal = match in_grpc {
                true => http2::in_grpc(*refusal),
                false => *refusal,
            };
            refusal.map(Either::Right)
        })
    }

    async fn exchange(&self, mut request: Request<Incoming>) -> Result<Response<Body>, Refused> {
        let shown = shown_host(&request);
        let bound = (self.way.view().0.keys).for_host(self.way.host(), self.way.port());
        let narrowed = self.is_narrowed(&bound);
        self.admit(&request, narrowed)
            .map_err(|no| self.refused(&shown, no))?;
        let from_box = request
            .headers()
            .contains_key(UPGRADE)
            .then(|| on(&mut request));
        let (mut parts, body) = request.into_parts();
        self.make_plain(&mut parts, from_box.is_some(), narrowed)?;
        let search = self.attach_all(&mut parts, &bound).await?;
        let sent = self.send(Request::from_parts(parts, body));
        let response = timeout(ANSWER_WITHIN, sent)
            .await
            .map_err(|_| self.unreachable("it did not answer in time"))?;
        self.pass_back(response?, from_box, search)
    }

    fn host(&self) -> String {
        self.way.host().to_string()
    }

    fn refused(&self, host: &str, no: Refusal) -> Refused {
        let response = refusal::denied(host, &no);
        self.way.deny(host, no);
        Box::new(response)
    }

    fn unreachable(&self, why: &str) -> Refused {
        Box::new(refusal::unreachable(&self.host(), why))
    }

    fn broken(&self, error: &str, why: &str, hint: &str) -> Refused {
        Box::new(refusal::broken(error, &self.host(), why, hint))
    }

    /// Whether only some requests are allowed to this host, or get a credential.
    fn is_narrowed(&self, bound: &[Arc<Binding>]) -> bool {
        let (policy, port) = (self.way.policy(), self.way.port());
        policy.needs_interception(self.way.host(), port)
            || bound.iter().any(|binding| !binding.only.is_empty())
    }

    /// Decides on one request, whatever came before it on the connection.
    fn admit<B: HttpBody>(&self, request: &Request<B>, narrowed: bool) -> Result<(), Refusal> {
        let (own, port) = (self.way.host(), self.way.port());
        let host = named_host(request, "https", port)?;
        if host != *own {
            return Err(Refusal::of_form(
                format!("the connection is for {own} (SNI), the request for {host}"),
                "open a new connection for another host",
            ));
        }
        if request.method() == Method::TRACE {
            return Err(Refusal::of_form(
                "TRACE would show what was added to the request",
                "use another method",
            ));
        }
        if upgrades_to_other_than_websocket(request) {
            return Err(Refusal::of_form(
                "after this upgrade requests could not be seen any more",
                "do without the Upgrade header",
            ));
        }
        refuse_ambiguous_framing(request, narrowed)?;
        let target = Target {
            host: own,
            port,
            http: Some(HttpTarget {
                method: request.method().as_str(),
                path: request.uri().path(),
            }),
        };
        match self.way.policy().decide(&target, self.way.guard()) {
            Decision::Allow { .. } => Ok(()),
            Decision::Deny(refusal) => Err(refusal),
        }
    }

    /// What is sent on has one form, whatever form came in.
    fn make_plain(
        &self,
        parts: &mut Parts,
        switching: bool,
        narrowed: bool,
    ) -> Result<(), Refused> {
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        parts.uri = path.parse::<Uri>().map_err(|_| {
            self.refused(
                &self.host(),
                Refusal::of_form("its target is no path", "write /path"),
            )
        })?;
        parts.version = Version::HTTP_11;
        strip_hop_by_hop(&mut parts.headers, switching);
        strip_expectations(&mut parts.headers);
        if narrowed {
            strip_for_narrowed(&mut parts.headers);
        }
        if let Ok(host) = HeaderValue::try_from(self.host_and_port()) {
            parts.headers.insert(HOST, host);
        }
        Ok(())
    }

    fn host_and_port(&self) -> String {
        match self.way.port() {
            443 => self.host(),
            port => format!("{}:{port}", self.host()),
        }
    }

    /// Adds what goes with this request. Says what must not come back: every value bound to the
    /// host, for the server may have kept it from another request.
    async fn attach_all(
        &self,
        parts: &mut Parts,
        bound: &[Arc<Binding>],
    ) -> Result<Option<Search>, Refused> {
        let mut needles = Needles::default();
        let mut secrets = Vec::new();
        let (method, path) = (parts.method.clone(), parts.uri.path().to_owned());
        for binding in bound {
            let goes = binding.goes_with(method.as_str(), &path);
            let found = self.secrets.value(self.way.id(), &binding.source).await;
            let value = match found {
                Ok(value) => value,
                Err(error) if goes => return Err(self.without(binding, &error.message)),
                Err(_) => continue,
            };
            let name = binding.source.key();
            // Also where it would not go: a search for it is what would tell of it.
            let set = self.way.view().0.keys.set();
            if !self.standing.admits(&name, &value, set) {
                return Err(self.suspended(&name));
            }
            needles.of(secrets.len());
            needles.add_value(value.expose());
            secrets.push((name, self.standing.mark(&value)));
            if !goes {
                continue;
            }
            let attached = attach(parts, &binding.place, &value, &mut needles)
                .map_err(|_| self.without(binding, "its value does not fit there"))?;
            if attached {
                self.secrets.used(&SecretUse {
                    id: self.way.id(),
                    source: &binding.source,
                    host: self.way.host(),
                    method: method.as_str(),
                    path: &path,
                });
            }
        }
        if !bound.is_empty() {
            ask_for_plain(&mut parts.headers);
        }
        if needles.is_empty() {
            return Ok(None);
        }
        let standing = Arc::clone(&self.standing);
        Ok(Some(Search {
            sought: self.sought(&needles),
            watched: Arc::new(Watched { standing, secrets }),
        }))
    }

    fn sought(&self, needles: &Needles) -> Arc<Sought> {
        let sought = self.standing.sought(needles);
        let mut kept = self.sought.lock().unwrap_or_else(PoisonError::into_inner);
        *kept = Some(Arc::clone(&sought));
        sought
    }

    fn suspended(&self, name: &str) -> Refused {
        let why = format!(
            "\"{name}\" is suspended for this sandbox: answers stopped in the middle of it {MOST_NEAR_MISSES} times, as they do when it is being guessed"
        );
        let hint = "the request was not sent; the operator of this server can store a new value, or set the credentials of the sandbox again";
        let refusal = Refusal::new(Reason::Credential, why.clone(), hint);
        self.way.deny(&self.host(), refusal);
        self.broken("credential_suspended", &why, hint)
    }

    fn without(&self, binding: &Binding, why: &str) -> Refused {
        let why = format!(
            "\"{}\" can not be added to the request: {why}",
            binding.source.key()
        );
        tracing::warn!(box_id = %self.way.id(), host = %self.way.host(), %why);
        let hint = "the request was not sent; tell the operator of this server";
        self.broken("credential_unavailable", &why, hint)
    }

    async fn send(&self, mut request: Request<Incoming>) -> Result<Response<Incoming>, Refused> {
        let mut again = true;
        loop {
            let mut upstream = self.upstream.lock().await;
            let ready = match upstream.as_mut() {
                Some(open) => open.is_ready().await,
                None => false,
            };
            let mut open = match upstream.take() {
                Some(open) if ready => open,
                old => {
                    self.retire(old);
                    let made = self.connector.connect(&self.way, self.tongue).await;
                    made.map_err(|error| self.unconnected(error))?
                }
            };
            let sent = match open.many() {
                Some(mut many) => {
                    *upstream = Some(open);
                    // Others need not wait for this one.
                    drop(upstream);
                    http2::reshape(&mut request, &self.host_and_port());
                    many.send(request).await
                }
                None => {
                    http2::unshape(&mut request, &self.host_and_port());
                    let sent = open.send(request).await;
                    if sent.is_ok() {
                        *upstream = Some(open);
                    }
                    sent
                }
            };
            match sent {
                Ok(response) => return Ok(response),
                Err(mut error) => match error.take_message() {
                    // The server closed the connection before anything was sent.
                    Some(unsent) if again => request = unsent,
                    _ => return Err(self.unreachable(&error.into_error().to_string())),
                },
            }
            again = false;
        }
    }

    fn retire(&self, old: Option<Upstream>) {
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.retain(|driver| !driver.is_finished());
        retired.extend(old.map(|old| old.driver));
    }

    fn unconnected(&self, error: ConnectError) -> Refused {
        let host = self.host();
        match error {
            ConnectError::Dial(DialError::Refused(no)) => self.refused(&host, no),
            ConnectError::Dial(DialError::Failed(error)) => self.unreachable(&error.to_string()),
            ConnectError::Untrusted(why) => {
                let why = format!("its certificate is not to be trusted: {why}");
                let hint = "nothing was sent; if the host is right, the operator of this server can add its authority";
                let refusal = Refusal::new(Reason::Untrusted, why.clone(), hint);
                self.way.deny(&host, refusal);
                self.broken("upstream_untrusted", &why, hint)
            }
        }
    }

    fn pass_back(
        &self,
        mut response: Response<Incoming>,
        from_box: Option<OnUpgrade>,
        search: Option<Search>,
    ) -> Result<Response<Body>, Refused> {
        if let Some(search) = &search {
            if search.is_in(response.headers()) {
                stopped(&self.way, Stop::Reflected, search);
                return Err(self.broken("secret_reflected", REFLECTED, REFLECTED_HINT));
            }
            let (parts, body) = response.into_parts();
            if let Some(why) = unreadable(&parts) {
                return Err(self.broken("unreadable_response", why, "ask for another form of it"));
            }
            response = Response::from_parts(parts, body);
        }
        let switching = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        if switching {
            let Some(from_box) = from_box else {
                let why = "the server switched protocols unasked";
                return Err(self.unreachable(why));
            };
            self.switch(from_box, on(&mut response), search.clone());
        }
        strip_response(response.headers_mut(), switching);
        // Free text that nobody needs, and a place to show a secret.
        response.extensions_mut().remove::<ReasonPhrase>();
        *response.version_mut() = Version::HTTP_11;
        let (way, told) = (self.way.clone(), search.clone());
        let found = move |why| {
            if let Some(search) = told {
                stopped(&way, why, &search);
            }
        };
        Ok(response.map(|body| Either::Left(ScanBody::new(body, search, found))))
    }

    fn switch(&self, from_box: OnUpgrade, from_server: OnUpgrade, search: Option<Search>) {
        let way = self.way.clone();
        let both = tokio::spawn(async move {
            let told = search.clone();
            if let (Err(why), Some(search)) = (relay(from_box, from_server, search).await, told) {
                stopped(&way, why, &search);
            }
        });
        *self.switched.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(AbortOnDropHandle::new(both));
    }
}

const REFLECTED: &str = "the response holds a secret that was added to the request";
const REFLECTED_HINT: &str =
    "it was cut off; ask for something that does not show the credentials of the request";

/// Takes down why an answer did not go on.
fn stopped(way: &Wayout, why: Stop, search: &Search) {
    let host = way.host().to_string();
    let deny = |why: String, hint| {
        way.deny(&host, Refusal::new(Reason::Credential, why, hint));
    };
    match why {
        Stop::Reflected => deny(REFLECTED.to_owned(), REFLECTED_HINT),
        Stop::NearMiss(of) => {
            for (name, count) in search.watched.near_miss(of) {
                let why = format!(
                    "the response stopped after the first bytes of \"{name}\": near-miss {count} of {MOST_NEAR_MISSES}"
                );
                let hint = "it was cut off; a program that guesses a secret does this, and then its host is closed to the sandbox";
                deny(why, hint);
            }
        }
        Stop::Suspended => deny(
            "a secret of this host was suspended while the response was under way".to_owned(),
            "it was cut off; the operator of this server can set the credentials again",
        ),
        Stop::Unreadable => deny(
            "the server sent WebSocket frames that cannot be searched for secrets".to_owned(),
            "it was cut off; it must send them unmasked, not compressed, and as RFC 6455 has them",
        ),
    }
}
