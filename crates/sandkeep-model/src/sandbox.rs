//! A box as the ledger knows it, and the request that makes one.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    BoxTime, Built, E2bSettings, GoneReason, Identity, Isolation, IsolationWish, Limits,
    LimitsWish, SandboxId, Secret, State, TemplateName, TimeWish, Timestamp,
};

/// The envd version our agent fulfils; every feature gate of the SDKs opens at it.
pub const ENVD_VERSION: &str = "0.6.13";

/// What to do when the time of a box is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnTimeout {
    #[default]
    Kill,
    Pause,
}

/// Who reaches the ports of a sandbox through the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PortAccess {
    /// Requests that carry the sandbox's traffic token.
    #[default]
    Private,
    /// Every request that reaches the gateway.
    Public,
}

impl PortAccess {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Private => "private",
            Self::Public => "public",
        }
    }
}

impl std::str::FromStr for PortAccess {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "private" => Ok(Self::Private),
            "public" => Ok(Self::Public),
            other => Err(format!("{other:?} is neither private nor public")),
        }
    }
}

/// How long a box lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiry {
    /// Until somebody ends it.
    Never,
    After(Duration),
}

/// A request for a box, parsed and bounded.
#[derive(Debug, Clone)]
pub struct CreateSandbox {
    pub template: TemplateName,
    pub isolation: IsolationWish,
    pub limits: LimitsWish,
    pub expiry: Expiry,
    pub on_timeout: OnTimeout,
    pub env: BTreeMap<String, String>,
    pub metadata: BTreeMap<String, String>,
    pub ports: PortAccess,
    pub e2b: E2bSettings,
    /// Who it is to be, for its tokens.
    pub identity: Identity,
    /// Pausing, waking, and the point it is made from.
    pub time: TimeWish,
    /// The same key with the same request gives the same box.
    pub idempotency_key: Option<String>,
    /// Who asks, for the records: `key:…`, never the key.
    pub by: Option<String>,
}

/// A box: what was asked for and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    pub id: SandboxId,
    pub template: TemplateName,
    pub isolation: Isolation,
    pub limits: Limits,
    pub state: State,
    pub created_at: Timestamp,
    /// When it began to run for its owner; a pooled box is older than that.
    pub started_at: Timestamp,
    /// `None`: it has no end of its own.
    pub end_at: Option<Timestamp>,
    pub on_timeout: OnTimeout,
    pub env: BTreeMap<String, String>,
    pub metadata: BTreeMap<String, String>,
    pub ports: PortAccess,
    pub e2b: E2bSettings,
    pub identity: Identity,
    /// What a client of the box's envd must show. Never enters the box.
    pub access_token: Secret,
    pub gone: Option<GoneReason>,
    pub gone_at: Option<Timestamp>,
    pub oom_kills: u64,
    /// Pauses, and where in time it is.
    pub time: BoxTime,
}

/// What opens the ports of a sandbox with this access token, and nothing else: the access token
/// opens its agent too, so clients of a port get one that is derived from it and does not lead back.
pub fn traffic_token(access_token: &Secret) -> Secret {
    access_token.derive("sandkeep traffic token")
}

impl Sandbox {
    /// What a client of its ports must show; `None`: nothing.
    pub fn traffic_token(&self) -> Option<Secret> {
        (self.ports == PortAccess::Private).then(|| traffic_token(&self.access_token))
    }
}

/// What boxes are made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    pub name: TemplateName,
    pub created_at: Timestamp,
    /// Bytes on disk as counted when it was made.
    pub size_bytes: u64,
    /// Where it came from, in words: `mmdebstrap bookworm`, `import root.tar`.
    pub origin: String,
    /// Set when it was built from a recipe.
    pub built: Option<Built>,
    /// A mark of clients of E2B; it opens and closes nothing.
    pub public: bool,
}
