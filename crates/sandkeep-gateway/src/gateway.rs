use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::extract::ConnectInfo;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header::AUTHORIZATION, request::Parts};
use http_body_util::{BodyExt, Limited};
use sandkeep_agent_api::ENVD_PORT;
use sandkeep_agent_client::BoxError;
use sandkeep_keeper::Keeper;
use sandkeep_model::{Code, Error, PortAccess, SandboxId, traffic_token};

use crate::{
    Body, Boxes, GatewayConfig, OverTls, Route, Target,
    access::{Door, TOKEN_HEADER, check, door},
    answer::{self, Failure},
    api_key,
    headers::{Asked, wanted_upgrade},
    pool::Pool,
    port_lock::{self, Entry},
    signature::{FileQuery, Operation},
    target, to_agent, to_port,
};

/// A request that wakes a box waits this long for it.
const WAKE_DEADLINE: Duration = Duration::from_secs(60);

/// The way from outside to a port of a box; clones share one.
pub struct Gateway<K = Keeper> {
    boxes: K,
    pool: Pool<K>,
    config: Arc<GatewayConfig>,
}

impl<K: Clone> Clone for Gateway<K> {
    fn clone(&self) -> Self {
        Self {
            boxes: self.boxes.clone(),
            pool: self.pool.clone(),
            config: Arc::clone(&self.config),
        }
    }
}

impl<K> std::fmt::Debug for Gateway<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl<K: Boxes> Gateway<K> {
    pub fn new(boxes: K, config: GatewayConfig) -> Self {
        let config = Arc::new(config);
        Self {
            pool: Pool::new(boxes.clone(), Arc::clone(&config)),
            boxes,
            config,
        }
    }

    /// What the client of this request came by.
    fn scheme(&self, parts: &Parts) -> &'static str {
        match parts.extensions.get::<OverTls>() {
            Some(OverTls) => "https",
            None => self.config.scheme,
        }
    }

    /// The box a request is for; `None` when it is for the API. An answer right away when
    /// it wants a box but says so wrongly.
    #[expect(
        clippy::result_large_err,
        reason = "the error is the answer, and is sent as it is"
    )]
    pub fn target(&self, parts: &Parts) -> Result<Option<Target>, Response<Body>> {
        match target::of_request(parts, self.config.domain.as_deref()) {
            Ok(Route::Box(target)) => Ok(Some(target)),
            Ok(Route::Api) => self.by_signature(parts),
            Err(bad) => Err(counted("refused", answer::bad_target(bad))),
        }
    }

    /// A file URL under a shared host names no box; only its signature does.
    #[expect(clippy::result_large_err, reason = "as above")]
    fn by_signature(&self, parts: &Parts) -> Result<Option<Target>, Response<Body>> {
        let operation = match (parts.uri.path(), &parts.method) {
            ("/files", &Method::GET | &Method::HEAD) => Operation::Read,
            ("/files", &Method::POST) => Operation::Write,
            _ => return Ok(None),
        };
        let query = FileQuery::parse(parts.uri.query().unwrap_or_default());
        if query.signature.is_none() {
            return Ok(None);
        }
        match query.signer(operation, self.boxes.live_tokens()) {
            Some(id) => Ok(Some(Target {
                sandbox: id.into(),
                port: ENVD_PORT,
            })),
            None => {
                let refused = answer::refused(StatusCode::UNAUTHORIZED, "invalid signature");
                Err(counted("refused", refused))
            }
        }
    }

    /// Carries a request to its box. The caller's address is taken from axum's `ConnectInfo`
    /// if the request has one.
    pub async fn serve<B>(&self, target: Target, request: Request<B>) -> Response<Body>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let kind = if target.port == ENVD_PORT {
            "agent"
        } else {
            "port"
        };
        counted(kind, self.carry(target, request).await)
    }

    async fn carry<B>(&self, target: Target, mut request: Request<B>) -> Response<Body>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        if let Some(refused) = self.without_api_key(&target, &mut request).await {
            return refused;
        }
        let upgrade = wanted_upgrade(request.headers()).map(|_| hyper::upgrade::on(&mut request));
        let (mut parts, body) = request.into_parts();
        let body = match self.bounded(body) {
            Ok(body) => body,
            Err(refused) => return refused,
        };
        let accept = parts.headers.clone();
        let failed = |failure| answer::unreachable(&target, &accept, failure);
        // A name that can not be one of ours is a box that does not exist.
        let Ok(id) = target.sandbox.parse::<SandboxId>() else {
            return failed(Failure::NoBox);
        };
        let carried = if target.port == ENVD_PORT {
            match self.admit(&id, &parts) {
                Err(answer) => return *answer,
                Ok(false) => Err(Failure::NoBox),
                Ok(true) => {
                    if let Err(error) = self.awake(&id).await {
                        return failed(to_agent::failure(&error));
                    }
                    if !parts.headers.contains_key(TOKEN_HEADER) {
                        // Let in by a signature, which names the user; only the token may name another.
                        parts.headers.remove(AUTHORIZATION);
                    }
                    to_agent::forward(&self.boxes, &self.pool, &id, parts, body).await
                }
            }
        } else {
            if parts.method == Method::CONNECT {
                let what = "tunnels from outside are not offered";
                return answer::refused(StatusCode::METHOD_NOT_ALLOWED, what);
            }
            // Before it is woken: who may not reach it does not wake it either.
            if let Some(answer) = self.locked(&id, &target, &parts) {
                return answer;
            }
            if let Err(error) = self.awake(&id).await {
                return failed(to_agent::failure(&error));
            }
            let host = target::host(&parts).ok().flatten().map(str::to_owned);
            let asked = Asked {
                client: client(&parts),
                host: host.as_deref(),
                mask: self.boxes.host_mask(&id).map(|mask| mask.host(target.port)),
                scheme: self.scheme(&parts),
            };
            let to = (&id, target.port);
            to_port::forward(&self.boxes, &self.pool, to, parts, body, &asked, upgrade).await
        };
        carried.unwrap_or_else(failed)
    }

    /// The server's own key goes to no sandbox. Clients of E2B send theirs along to the agent, for
    /// which it is taken out; a program gets nothing of a request that carries it, because its
    /// sender should learn of the mistake.
    async fn without_api_key<B>(
        &self,
        target: &Target,
        request: &mut Request<B>,
    ) -> Option<Response<Body>> {
        let key = self.config.api_key.as_ref()?;
        let stripped = api_key::strip(request.headers_mut(), key);
        let in_address = api_key::in_address(request.uri(), key);
        if !in_address && (!stripped || target.port == ENVD_PORT) {
            return None;
        }
        if let Ok(id) = target.sandbox.parse::<SandboxId>() {
            self.boxes.note_api_key_refused(&id, target.port).await;
        }
        let what = "the request carries the server's API key, which must not reach a sandbox: \
                    leave out X-API-Key and Authorization, and send the sandbox's own token";
        Some(answer::refused(StatusCode::FORBIDDEN, what))
    }

    /// The answer to a request that may not reach its port.
    fn locked(&self, id: &SandboxId, target: &Target, parts: &Parts) -> Option<Response<Body>> {
        // A sandbox that is not there is told by whoever wakes it.
        if self.boxes.port_access(id)? == PortAccess::Public {
            return None;
        }
        let token = traffic_token(&self.boxes.access_token(id)?);
        match port_lock::entry(parts, &token, self.scheme(parts)) {
            Entry::Granted => None,
            Entry::Redirect(answer) => Some(*answer),
            Entry::Preflight => Some(answer::preflight()),
            Entry::Refused(why) => Some(answer::private(target, &parts.headers, why)),
        }
    }

    /// Waking takes as long as the memory of a box is large, but not for ever.
    async fn awake(&self, id: &SandboxId) -> sandkeep_model::Result<()> {
        tokio::time::timeout(WAKE_DEADLINE, self.boxes.awake(id))
            .await
            .unwrap_or_else(|_| {
                Err(Error::new(
                    Code::DeadlineExceeded,
                    "the sandbox did not wake up in time",
                ))
            })
    }

    /// Whether the agent may be asked this; `false` when there is no such box.
    fn admit(&self, id: &SandboxId, parts: &Parts) -> Result<bool, Box<Response<Body>>> {
        let Some(door) = door(&parts.method, parts.uri.path()) else {
            let refused = answer::refused(StatusCode::NOT_FOUND, "there is nothing at this path");
            return Err(Box::new(refused));
        };
        if door == Door::Preflight {
            return Err(Box::new(answer::preflight()));
        }
        let Some(token) = self.boxes.access_token(id) else {
            return Ok(false);
        };
        let query = parts.uri.query().unwrap_or_default();
        match check(door, &parts.headers, query, &token, now()) {
            Ok(()) => Ok(true),
            Err(why) => Err(Box::new(answer::refused(StatusCode::UNAUTHORIZED, why))),
        }
    }

    #[expect(clippy::result_large_err, reason = "the error is the answer")]
    fn bounded<B>(&self, body: B) -> Result<Body, Response<Body>>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let Some(most) = self.config.max_request_bytes else {
            return Ok(body.map_err(Into::into).boxed_unsync());
        };
        if body.size_hint().lower() > most {
            let what = format!("the request is larger than the {most} bytes allowed");
            return Err(answer::refused(StatusCode::PAYLOAD_TOO_LARGE, &what));
        }
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        Ok(Limited::new(body, most).boxed_unsync())
    }
}

fn client(parts: &Parts) -> Option<IpAddr> {
    let ConnectInfo(address) = parts.extensions.get::<ConnectInfo<SocketAddr>>()?;
    Some(address.ip())
}

fn now() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|since| i64::try_from(since.as_secs()).ok())
        .unwrap_or(i64::MAX)
}

fn counted(kind: &'static str, response: Response<Body>) -> Response<Body> {
    let class = match response.status().as_u16() {
        100..=199 => "1xx",
        200..=299 => "2xx",
        300..=399 => "3xx",
        400..=499 => "4xx",
        _ => "5xx",
    };
    metrics::counter!("sandkeep_gateway_requests_total", "kind" => kind, "status" => class)
        .increment(1);
    response
}
