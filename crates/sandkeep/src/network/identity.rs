//! Who boxes are: what they ask their metadata service, and tokens the edge attaches for them.

use std::{
    cell::RefCell,
    collections::HashMap,
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode};
use sandkeep_audit::{Action, Actor, Audit, Entry};
use sandkeep_identity::{
    BoxIdentity, Claims, Issuer, IssuerConfig, IssuerUrl, Minted, Sessions, SigningAlgorithm,
    TrustDomain,
    metadata::{self, MetadataContext, Source},
};
use sandkeep_keeper::BoxFinder;
use sandkeep_moat::{BoxFuture, Inside, Visit};
use sandkeep_model::{Audience, Code, Error, Result, Sandbox, SandboxId, Secret, Timestamp};
use serde_json::Value;

use super::secrets::Tokens;

/// What boxes are forgotten that are gone, and whether the key is old.
const ROUND: Duration = Duration::from_secs(60);
/// The edge asks for each request; a token that is good for longer than this is used again.
const GOOD_ENOUGH: Duration = Duration::from_secs(5 * 60);
/// Where the issuer's host can not be one, like an IPv6 address.
const TRUST_DOMAIN: &str = "sandkeep";

/// What the operator decided about identities.
#[derive(Debug, Clone, Default)]
pub struct IdentitySettings {
    /// `None`: where the server listens.
    pub url: Option<IssuerUrl>,
    /// `None`: the host of the URL.
    pub trust_domain: Option<TrustDomain>,
    pub algorithm: SigningAlgorithm,
    /// `None`: only when somebody asks for it.
    pub key_age: Option<Duration>,
}

/// Opens the issuer with its keys below the state directory.
pub fn open(state: &Path, listen: SocketAddr, settings: &IdentitySettings) -> Result<Arc<Issuer>> {
    let url = match &settings.url {
        Some(url) => url.clone(),
        None => format!("http://{listen}").parse()?,
    };
    let trust_domain = match &settings.trust_domain {
        Some(domain) => domain.clone(),
        None => url.host().parse().or_else(|_| TRUST_DOMAIN.parse())?,
    };
    let config = IssuerConfig {
        url,
        trust_domain,
        algorithm: settings.algorithm,
    };
    Issuer::open(&state.join("identity"), config).map(Arc::new)
}

/// The identities of all boxes.
pub struct Identities {
    issuer: Arc<Issuer>,
    audit: Audit,
    /// The keeper comes after the moat that asks us.
    boxes: OnceLock<BoxFinder>,
    rooms: Mutex<HashMap<SandboxId, Arc<Room>>>,
}

/// What is kept for one box as long as it lives.
#[derive(Default)]
struct Room {
    sessions: Sessions,
    /// Those the edge attaches.
    tokens: Mutex<HashMap<Audience, (Secret, Timestamp)>>,
}

impl Identities {
    pub fn new(issuer: Arc<Issuer>, audit: Audit) -> Arc<Self> {
        Arc::new(Self {
            issuer,
            audit,
            boxes: OnceLock::new(),
            rooms: Mutex::default(),
        })
    }

    /// From now on boxes are known.
    pub fn meet(&self, boxes: BoxFinder) {
        // There is one keeper; a second one would be the same.
        let _ = self.boxes.set(boxes);
    }

    fn living(&self, id: &SandboxId) -> Result<Sandbox> {
        let Some(boxes) = self.boxes.get() else {
            return Err(Error::host_not_ready("the server is just starting").hint("ask again"));
        };
        boxes
            .living(id)
            .ok_or_else(|| Error::new(Code::PermissionDenied, "this box is nobody's"))
    }

    fn room(&self, id: &SandboxId) -> Arc<Room> {
        let mut rooms = self.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(rooms.entry(id.clone()).or_default())
    }

    /// No token leaves before its issue is on record.
    async fn record(&self, id: &SandboxId, audience: &Audience, minted: &Minted) -> Result<()> {
        let action = Action::TokenIssued {
            audience: audience.as_str().into(),
            jti: minted.jti.as_str().into(),
            expires: minted.expires,
        };
        let entry = Entry::now(Actor::sandbox(id), Some(id.clone()), action);
        self.audit.append(entry).await.map(drop)
    }

    /// Forgets boxes that are gone and makes a new key when the old one is old, for ever.
    pub async fn upkeep(&self, key_age: Option<Duration>) {
        let mut interval = tokio::time::interval(ROUND);
        loop {
            interval.tick().await;
            if let Some(boxes) = self.boxes.get() {
                let mut rooms = self.rooms.lock().unwrap_or_else(PoisonError::into_inner);
                rooms.retain(|id, _| boxes.living(id).is_some());
            }
            if let Some(age) = key_age {
                self.rotate_when_older(age).await;
            }
        }
    }

    async fn rotate_when_older(&self, age: Duration) {
        let issuer = Arc::clone(&self.issuer);
        let rotated = tokio::task::spawn_blocking(move || issuer.rotate_when_older(age)).await;
        let kid = match rotated {
            Ok(Ok(Some(kid))) => kid,
            Ok(Ok(None)) | Err(_) => return,
            Ok(Err(error)) => {
                tracing::error!(%error, "the signing key is old, and no new one could be made");
                return;
            }
        };
        tracing::info!(%kid, "a new key signs the tokens of boxes");
        let action = Action::SigningKeyRotated {
            kid: kid.as_str().into(),
        };
        let entry = Entry::now(Actor::server(), None, action);
        if let Err(error) = self.audit.append(entry).await {
            tracing::error!(%error, "the rotation is not in the audit log");
        }
    }

    async fn answer_visit(&self, visit: Visit) -> Result<Response<Bytes>> {
        let id = visit.from.id();
        let sandbox = self.living(id)?;
        let room = self.room(id);
        let asked = Asked {
            issuer: &self.issuer,
            identity: BoxIdentity::from(&sandbox),
            minted: RefCell::default(),
        };
        let (answer, minted) = asked.answer(&room.sessions, &visit);
        if let Some((audience, minted)) = minted {
            self.record(id, &audience, &minted).await?;
        }
        Ok(answer)
    }
}

/// One question of one box.
struct Asked<'a> {
    issuer: &'a Issuer,
    identity: BoxIdentity,
    minted: RefCell<Option<(Audience, Minted)>>,
}

impl Asked<'_> {
    fn answer(
        self,
        sessions: &Sessions,
        visit: &Visit,
    ) -> (Response<Bytes>, Option<(Audience, Minted)>) {
        let request = &visit.request;
        let headers: Vec<(&str, &[u8])> = request
            .headers()
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_bytes()))
            .collect();
        let context = MetadataContext {
            sessions,
            source: &self,
        };
        let answer = metadata::handle(
            &context,
            &metadata::Request {
                method: request.method().as_str(),
                path: request.uri().path(),
                query: request.uri().query(),
                headers: &headers,
            },
        );
        (response(answer), self.minted.into_inner())
    }
}

impl Source for Asked<'_> {
    fn identity(&self) -> Result<Value> {
        serde_json::to_value(&self.identity)
            .map_err(|error| Error::internal(format!("writing an identity: {error}")))
    }

    fn named(&self, name: &str) -> Option<Audience> {
        self.identity.tokens.audience(name).cloned()
    }

    fn token(&self, audience: &Audience) -> Result<Secret> {
        let minted = self
            .issuer
            .mint(&Claims::of(&self.identity, audience.clone()))?;
        let token = minted.token.clone();
        *self.minted.borrow_mut() = Some((audience.clone(), minted));
        Ok(token)
    }
}

fn response(answer: metadata::Response) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from(answer.body));
    *response.status_mut() =
        StatusCode::from_u16(answer.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    for (name, value) in answer.headers {
        // All of them are our own words.
        if let Ok(value) = HeaderValue::from_str(&value) {
            response
                .headers_mut()
                .insert(HeaderName::from_static(name), value);
        }
    }
    response
}

impl Inside for Identities {
    fn answer(&self, visit: Visit) -> BoxFuture<'_, Response<Bytes>> {
        Box::pin(async move {
            self.answer_visit(visit)
                .await
                .unwrap_or_else(|error| response(metadata::refusal(error)))
        })
    }
}

impl std::fmt::Debug for Identities {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Identities")
    }
}

impl Tokens for Identities {
    fn token<'a>(
        &'a self,
        id: &'a SandboxId,
        audience: &'a Audience,
    ) -> BoxFuture<'a, Result<Secret>> {
        Box::pin(async move {
            let sandbox = self.living(id)?;
            let room = self.room(id);
            let tokens = || room.tokens.lock().unwrap_or_else(PoisonError::into_inner);
            let wanted = Timestamp::now().plus(GOOD_ENOUGH);
            if let Some((token, expires)) = tokens().get(audience)
                && *expires > wanted
            {
                return Ok(token.clone());
            }
            let identity = BoxIdentity::from(&sandbox);
            let minted = self.issuer.mint(&Claims::of(&identity, audience.clone()))?;
            self.record(id, audience, &minted).await?;
            let mut kept = tokens();
            kept.retain(|_, (_, expires)| *expires > wanted);
            kept.insert(audience.clone(), (minted.token.clone(), minted.expires));
            Ok(minted.token)
        })
    }
}
