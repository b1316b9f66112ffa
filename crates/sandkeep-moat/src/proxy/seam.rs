//! What an interceptor gets: a connection, and the only ways out for it.

use std::{net::SocketAddr, sync::Arc};

use sandkeep_model::SandboxId;
use tokio::net::TcpStream;

use super::{
    dial::{self, DialError},
    meter::Flow,
    stream::BoxStream,
};
use crate::{
    denials::Via,
    policy::{AddressGuard, Host, Policy, Refusal},
    state::{Attempt, BoxState, BoxView},
};

/// A TLS connection to take over: the stream begins with the ClientHello.
#[derive(Debug)]
pub struct Intercepted {
    pub stream: BoxStream,
    pub way: Wayout,
}

/// The way to the one host this connection was let through for.
#[derive(Debug, Clone)]
pub struct Wayout {
    host: Host,
    to: SocketAddr,
    state: Arc<BoxState>,
    flow: Arc<Flow>,
}

impl Intercepted {
    pub(super) fn new(
        stream: BoxStream,
        host: Host,
        to: SocketAddr,
        state: Arc<BoxState>,
        flow: Arc<Flow>,
    ) -> Self {
        let way = Wayout {
            host,
            to,
            state,
            flow,
        };
        Self { stream, way }
    }
}

impl Wayout {
    pub fn id(&self) -> &SandboxId {
        &self.state.id
    }

    /// The host the ClientHello named; every request must name the same.
    pub const fn host(&self) -> &Host {
        &self.host
    }

    pub const fn port(&self) -> u16 {
        self.to.port()
    }

    /// The policy as it is now: ask again for every request.
    pub fn policy(&self) -> Arc<Policy> {
        self.state.policy()
    }

    pub fn guard(&self) -> &AddressGuard {
        self.state.guard()
    }

    pub fn view(&self) -> BoxView {
        BoxView(Arc::clone(&self.state))
    }

    /// Resolves the host and dials an address that was checked.
    pub async fn dial(&self) -> Result<TcpStream, DialError> {
        let stream = dial::name(&self.state, &self.host, self.port(), Some(self.to.ip())).await?;
        if let Ok(peer) = stream.peer_addr() {
            self.flow.dialled(peer.ip());
        }
        Ok(stream)
    }

    /// Takes down that a request was refused. Telling the box is the caller's.
    pub fn deny(&self, host: &str, refusal: Refusal) {
        let attempt = Attempt {
            via: Via::Http,
            host: host.chars().take(Host::MAX_LENGTH).collect(),
            port: self.port(),
        };
        self.state.deny(&attempt, refusal);
    }
}
