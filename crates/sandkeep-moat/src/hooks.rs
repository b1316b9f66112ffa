//! Where the moat meets the rest of the server.

use std::{fmt, future::Future, net::IpAddr, pin::Pin};

use bytes::Bytes;
use http::{Request, Response};
use sandkeep_model::{SandboxId, Timestamp};
use serde::Serialize;

use crate::{
    denials::{Denial, Via},
    policy::Host,
    proxy::Intercepted,
    state::BoxView,
};

pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Whether a record is of the beginning or the end of a connection. Both are told, so that a
/// log knows of connections that were open when the server was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    Opened,
    Closed,
}

/// A connection that was let through.
#[derive(Debug, Clone, Serialize)]
pub struct ConnectionRecord {
    pub id: SandboxId,
    pub phase: Phase,
    pub at: Timestamp,
    pub via: Via,
    pub host: Host,
    /// What was dialled, once it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    pub port: u16,
    pub rule: String,
    pub intercepted: bool,
    /// From the box to the outside.
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub milliseconds: u64,
}

/// Told of every decision: audit and events. Called on the path of connections: do not block.
pub trait Hooks: Send + Sync {
    fn connection(&self, record: &ConnectionRecord);

    /// The first time something is refused and then at each doubling of its count.
    fn denial(&self, id: &SandboxId, denial: &Denial);

    /// Every refusal by itself, also what [`Hooks::denial`] is not told of.
    fn refused(&self, _id: &SandboxId, _denial: &Denial) {}

    /// So many refusals, of which no more is known: they came faster than they are looked at.
    fn refused_unseen(&self, _id: &SandboxId, _count: u64) {}

    /// Waited for before a connection is looked at: a log that can not keep up holds new
    /// connections back here. `None`: there is room.
    fn room(&self) -> Option<BoxFuture<'_, ()>> {
        None
    }
}

/// Nobody listens.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoHooks;

impl Hooks for NoHooks {
    fn connection(&self, _record: &ConnectionRecord) {}
    fn denial(&self, _id: &SandboxId, _denial: &Denial) {}
}

/// Sees into TLS where a rule or a credential asks for it.
pub trait Interceptor: Send + Sync {
    /// Whether this connection is to be taken over instead of being passed on unseen. Connections
    /// whose policy has HTTP rules for the host always are.
    fn wants(&self, from: &BoxView, host: &Host, port: u16) -> bool;

    /// Serves the connection to its end. The future is dropped when the policy no longer lets the
    /// host through or the box goes away, so nothing of it may live on in other tasks.
    fn serve(&self, connection: Intercepted) -> BoxFuture<'_, ()>;
}

/// Which of our own addresses a box called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// `sandkeep.internal`
    Internal,
    /// 169.254.169.254
    Metadata,
}

/// A request of a box to ourselves.
#[derive(Debug)]
pub struct Visit {
    pub from: BoxView,
    pub place: Place,
    /// Its body is read whole and bounded.
    pub request: Request<Bytes>,
}

/// What a box can ask us: why something is refused, who it is.
pub trait Inside: Send + Sync {
    fn answer(&self, visit: Visit) -> BoxFuture<'_, Response<Bytes>>;
}

impl fmt::Debug for dyn Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hooks")
    }
}

impl fmt::Debug for dyn Interceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Interceptor")
    }
}

impl fmt::Debug for dyn Inside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Inside")
    }
}
