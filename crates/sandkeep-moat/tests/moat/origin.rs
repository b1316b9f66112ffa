//! A site under TLS that shows what it is asked, and a box that has credentials for it.

use std::{
    collections::HashMap,
    convert::Infallible,
    io::{self, Read, Write},
    net::SocketAddr,
    sync::{Arc, LazyLock, Mutex},
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{
    body::{Frame, Incoming},
    ext::ReasonPhrase,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use sandkeep_moat::{
    BoxFuture, BoxMoat, InterceptConfig, SecretSource, SecretUse, TlsInterceptor, Trust,
    policy::{Binding, Policy, Source},
};
use sandkeep_model::{Error, Result, SandboxId, Secret};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::{Barrier, Semaphore},
};

use crate::world::{GOOD, World, at, dial, in_world_with};

pub const CANARY: &str = "canary-6f1d/90\"ab";

/// Secrets by name, and what was told of their use.
#[derive(Default)]
pub struct Vault {
    pub values: Mutex<HashMap<String, String>>,
    pub uses: Mutex<Vec<String>>,
}

impl SecretSource for Vault {
    fn value<'a>(&'a self, _: &'a SandboxId, source: &'a Source) -> BoxFuture<'a, Result<Secret>> {
        let found = self.values.lock().unwrap().get(&source.key()).cloned();
        Box::pin(std::future::ready(
            found
                .map(Secret::new)
                .ok_or_else(|| Error::not_found("it is not there")),
        ))
    }

    fn used(&self, occasion: &SecretUse<'_>) {
        self.uses.lock().unwrap().push(format!("{occasion:?}"));
    }
}

/// Who a server says it is.
#[derive(Clone)]
pub struct Identity {
    pub certificate: CertificateDer<'static>,
    key: Arc<Vec<u8>>,
}

impl Identity {
    pub fn of(names: &[&str]) -> Self {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let made = rcgen::generate_simple_self_signed(names).unwrap();
        Self {
            certificate: made.cert.der().clone(),
            key: Arc::new(made.signing_key.serialize_der()),
        }
    }
}

/// One request as it arrived.
#[derive(Debug, Clone)]
pub struct Heard {
    pub line: String,
    pub headers: Vec<(String, String)>,
    pub body: usize,
}

impl Heard {
    pub fn all(&self, name: &str) -> Vec<&str> {
        self.headers
            .iter()
            .filter(|(own, _)| own == name)
            .map(|(_, value)| value.as_str())
            .collect()
    }
}

pub type Log = Arc<Mutex<Vec<Heard>>>;

/// Speaks HTTP/2 with those who ask for it.
pub async fn serve(address: SocketAddr, identity: &Identity) -> Log {
    serve_speaking(&["h2", "http/1.1"], address, identity).await
}

pub async fn serve_speaking(protocols: &[&str], address: SocketAddr, identity: &Identity) -> Log {
    let key = PrivateKeyDer::try_from((*identity.key).clone()).unwrap();
    let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![identity.certificate.clone()], key)
        .unwrap();
    config.alpn_protocols = named(protocols);
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind(address).await.unwrap();
    let log = Log::default();
    let taken = Arc::clone(&log);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, log) = (acceptor.clone(), Arc::clone(&log));
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else {
                    return;
                };
                let service = service_fn(move |request| answer(Arc::clone(&log), request));
                if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
                    let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    let served = server.serve_connection(TokioIo::new(stream), service);
                    return drop(served.await);
                }
                // The client may leave when it likes.
                drop(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .with_upgrades()
                        .await,
                );
            });
        }
    });
    taken
}

/// Requests with `x-meet` are answered when two of them are there.
static MEETING: LazyLock<Arc<Barrier>> = LazyLock::new(|| Arc::new(Barrier::new(2)));

type Body = BoxBody<Bytes, Infallible>;

async fn answer(
    log: Log,
    mut request: Request<Incoming>,
) -> std::result::Result<Response<Body>, Infallible> {
    let headers: Vec<(String, String)> = request
        .headers()
        .iter()
        .map(|(name, value)| {
            let text = String::from_utf8_lossy(value.as_bytes());
            (name.to_string(), text.into_owned())
        })
        .collect();
    let line = format!("{} {}", request.method(), request.uri());
    let meets = request
        .headers()
        .get("x-meet")
        .map(|_| Arc::clone(&MEETING));
    let shown = format!("{line}\n{headers:#?}\n{}", authorization(&headers));
    let upgrade = (request.uri().path() == "/ws").then(|| hyper::upgrade::on(&mut request));
    let path = request.uri().path().to_owned();
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let auth = authorization(&headers);
    let never = headers.iter().any(|(name, _)| name == "x-never");
    let go = headers.iter().find(|(name, _)| name == "x-go");
    let go = go.map(|(_, name)| signal(name));
    log.lock().unwrap().push(Heard {
        line: line.clone(),
        headers,
        body: body.len(),
    });
    if path == "/go" {
        go.as_ref().unwrap().add_permits(1);
    }
    if never {
        std::future::pending::<()>().await;
    }
    if let Some(meeting) = meets {
        meeting.wait().await;
    }
    if let Some(upgrade) = upgrade {
        tokio::spawn(async move {
            let mut stream = TokioIo::new(upgrade.await.unwrap());
            // What it is sent, each with its length before it, it sends back as it is.
            while let Ok(length) = stream.read_u32().await {
                let mut said = vec![0; usize::try_from(length).unwrap()];
                stream.read_exact(&mut said).await.unwrap();
                if said == b"auth" {
                    said = frame(0x81, auth.as_bytes());
                }
                // The box may be gone.
                if stream.write_all(&said).await.is_err() {
                    break;
                }
            }
        });
        let mut response = Response::builder()
            .status(StatusCode::SWITCHING_PROTOCOLS)
            .header(header::CONNECTION, "Upgrade")
            .header(header::UPGRADE, "websocket");
        if line.ends_with("?packed") {
            response = response.header("sec-websocket-extensions", "permessage-deflate");
        }
        return Ok(response.body(whole("")).unwrap());
    }
    let response = Response::builder();
    Ok(match path.as_str() {
        "/echo" => response.body(whole(shown)),
        "/echo/header" => response.header("x-seen", auth).body(whole("")),
        "/echo/reason" => {
            let reason = ReasonPhrase::try_from(auth.into_bytes()).unwrap();
            response.extension(reason).body(whole("hello"))
        }
        // Byte by byte, each in its own piece.
        "/echo/slowly" => response.body(pieces(shown.into_bytes())),
        "/packed" => response
            .header(header::CONTENT_ENCODING, "gzip")
            .body(whole("not really")),
        "/trailers" => response.body(with_trailers("message", "grpc-status", "0")),
        "/echo/trailers" => response.body(with_trailers("message", "x-seen", &auth)),
        "/packed/messages" => response
            .header("grpc-encoding", "gzip")
            .body(whole("not really")),
        // Bytes the box chose, in pieces it chose.
        "/say" => response.body(said(&body, None)),
        // The same, but every piece after the first waits for a request to `/go`.
        "/say/paused" => response.body(said(&body, go)),
        "/say/header" => response
            .header("x-said", http::HeaderValue::from_bytes(&body).unwrap())
            .body(whole("")),
        "/say/halves" => {
            let (one, other) = body.split_at(body.len() / 2);
            response
                .header("x-one", one)
                .header("x-other", other)
                .body(whole(""))
        }
        "/part" => response
            .status(StatusCode::PARTIAL_CONTENT)
            .header(header::CONTENT_RANGE, "bytes 0-3/8")
            .body(whole("half")),
        "/large" => response.body(whole(vec![b'x'; 8 << 20])),
        _ => response.body(whole("hello")),
    }
    .unwrap())
}

/// What a site in a test waits for.
fn signal(name: &str) -> Arc<Semaphore> {
    static SIGNALS: LazyLock<Mutex<HashMap<String, Arc<Semaphore>>>> =
        LazyLock::new(Mutex::default);
    let mut signals = SIGNALS.lock().unwrap();
    let made = || Arc::new(Semaphore::new(0));
    Arc::clone(signals.entry(name.to_owned()).or_insert_with(made))
}

/// Between two pieces.
pub const NEXT_PIECE: u8 = 0x1e;

fn said(body: &Bytes, go: Option<Arc<Semaphore>>) -> Body {
    let pieces: Vec<Bytes> = body
        .split(|byte| *byte == NEXT_PIECE)
        .map(Bytes::copy_from_slice)
        .collect();
    let stream = futures_util::stream::unfold(
        (pieces.into_iter(), None::<Arc<Semaphore>>, go),
        |(mut pieces, wait, go)| async move {
            let piece = pieces.next()?;
            if let Some(wait) = wait {
                wait.acquire().await.unwrap().forget();
            }
            Some((Ok(Frame::data(piece)), (pieces, go.clone(), go)))
        },
    );
    StreamBody::new(stream).boxed()
}

/// A WebSocket frame of a server.
pub fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![first];
    match u8::try_from(payload.len()) {
        Ok(length @ ..126) => frame.push(length),
        _ => {
            frame.push(126);
            let length = u16::try_from(payload.len()).unwrap();
            frame.extend_from_slice(&length.to_be_bytes());
        }
    }
    frame.extend_from_slice(payload);
    frame
}

/// For the site at `/ws`.
pub fn told(said: &[u8]) -> Vec<u8> {
    let length = u32::try_from(said.len()).unwrap();
    [&length.to_be_bytes(), said].concat()
}

fn authorization(headers: &[(String, String)]) -> String {
    headers
        .iter()
        .find(|(name, _)| name == "authorization")
        .map(|(_, value)| value.clone())
        .unwrap_or_default()
}

fn whole(body: impl Into<Bytes>) -> Body {
    Full::new(body.into()).boxed()
}

/// As gRPC ends its answers.
fn with_trailers(body: &'static str, name: &'static str, value: &str) -> Body {
    let mut trailers = HeaderMap::new();
    trailers.insert(name, value.parse().unwrap());
    let frames = [
        Ok(Frame::data(Bytes::from_static(body.as_bytes()))),
        Ok(Frame::trailers(trailers)),
    ];
    StreamBody::new(futures_util::stream::iter(frames)).boxed()
}

fn pieces(bytes: Vec<u8>) -> Body {
    let mut bytes = bytes.into_iter();
    let stream = std::iter::from_fn(move || {
        bytes
            .next()
            .map(|byte| Ok(Frame::data(Bytes::copy_from_slice(&[byte]))))
    });
    StreamBody::new(futures_util::stream::iter(stream)).boxed()
}

/// A box, its credentials and the sites `good.test` and `other.test`.
pub struct Scene {
    pub world: World,
    pub vault: Arc<Vault>,
    pub identity: Identity,
    /// Both sites are one server, as on a large hoster.
    pub log: Log,
}

pub fn scene<F: Future<Output = ()>>(test: impl FnOnce(Scene) -> F + Send + 'static) {
    let identity = Identity::of(&["good.test", "other.test"]);
    let vault = Arc::new(Vault::default());
    vault
        .values
        .lock()
        .unwrap()
        .insert("key".to_owned(), CANARY.to_owned());
    let interceptor = TlsInterceptor::new(InterceptConfig {
        trust: Trust::Only(vec![identity.certificate.clone()]),
        secrets: vault.clone(),
    });
    in_world_with(
        move |config| config.interceptor = Some(Arc::new(interceptor.unwrap())),
        move |world| async move {
            world.zone.address("good.test", GOOD);
            world.zone.address("other.test", GOOD);
            let log = serve(at(GOOD, 443), &identity).await;
            test(Scene {
                world,
                vault,
                identity,
                log,
            })
            .await;
        },
    );
}

pub fn binding(document: &Value) -> Binding {
    Binding::from_json(document).unwrap()
}

/// `key` as a bearer token for `good.test`.
pub fn bearer() -> Binding {
    binding(&json!({"secret": "key", "host": "good.test"}))
}

/// What came back, and the error it ended with.
#[derive(Debug)]
pub struct Got {
    pub text: String,
    pub error: Option<io::Error>,
}

impl Got {
    pub fn whole(self) -> String {
        assert!(self.error.is_none(), "{self:?}");
        self.text
    }
}

impl Scene {
    pub async fn attach(&self, policy: &Value, bindings: Vec<Binding>) -> BoxMoat {
        let moat = self.world.attach(Policy::from_json(policy).unwrap()).await;
        moat.set_bindings(bindings);
        moat
    }

    pub async fn ask(
        &self,
        moat: &BoxMoat,
        server: &'static str,
        request: impl Into<Vec<u8>>,
    ) -> Got {
        self.ask_trusting(authority(moat), server, request).await
    }

    /// Sends these bytes over TLS from the box and reads to the end.
    pub async fn ask_trusting(
        &self,
        trusted: CertificateDer<'static>,
        server: &'static str,
        request: impl Into<Vec<u8>>,
    ) -> Got {
        let request = request.into();
        self.world
            .in_box(move || {
                let mut tls = connect(server, &trusted);
                let mut text = Vec::new();
                let error = tls
                    .write_all(&request)
                    .and_then(|()| tls.read_to_end(&mut text))
                    .err();
                Got {
                    text: String::from_utf8_lossy(&text).into_owned(),
                    error,
                }
            })
            .await
    }

    pub fn heard(&self) -> Vec<Heard> {
        self.log.lock().unwrap().clone()
    }
}

pub fn authority(moat: &BoxMoat) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(moat.ca_pem().unwrap().as_bytes()).unwrap()
}

fn named(protocols: &[&str]) -> Vec<Vec<u8>> {
    let name = |name: &&str| name.as_bytes().to_vec();
    protocols.iter().map(name).collect()
}

pub type Tls = rustls::StreamOwned<ClientConnection, std::net::TcpStream>;

/// Makes a connection from the namespace of this thread.
pub fn connect(server: &'static str, trusted: &CertificateDer<'static>) -> Tls {
    connect_speaking(&[], server, trusted)
}

pub fn connect_speaking(
    protocols: &[&str],
    server: &'static str,
    trusted: &CertificateDer<'static>,
) -> Tls {
    let config = client(protocols, trusted);
    let session = ClientConnection::new(config, server.try_into().unwrap()).unwrap();
    rustls::StreamOwned::new(session, dial(at(GOOD, 443)).unwrap())
}

pub fn client(protocols: &[&str], trusted: &CertificateDer<'static>) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = named(protocols);
    Arc::new(config)
}

/// A request that ends its connection.
pub fn request(line: &str, host: &str, headers: &str) -> String {
    format!("{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{headers}\r\n")
}

/// Waits for what happens on the other side of a connection that ended here already.
pub async fn until(done: impl Fn() -> bool) {
    while !done() {
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
}

pub fn refused_because(moat: &BoxMoat, why: &str) -> bool {
    moat.denials().iter().any(|denial| denial.why.contains(why))
}
