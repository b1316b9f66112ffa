//! Attaching boxes and letting them go.

use std::{fmt, io, os::fd::OwnedFd, sync::Arc, time::Duration};

use ipnet::IpNet;
use sandkeep_model::{Error, Result, SandboxId, Secret};
use tokio::{
    net::{TcpListener, TcpStream, UdpSocket},
    sync::Semaphore,
};

use crate::{
    denials::Denial,
    dns::{self, Resolver, UpstreamDns},
    edge::{self, Listeners},
    hooks::{Hooks, Inside, Interceptor, NoHooks},
    limits::Bounds,
    policy::{AddressGuard, Binding, Policy},
    proxy,
    state::{BoxState, BoxView, Patience, Shared, Why},
    traffic::Traffic,
};

/// Threads that make edges at the same time.
const EDGES_AT_ONCE: usize = 4;
/// Waits out a want of descriptors or memory, which others cause and cure.
const AFTER_A_FAILED_ACCEPT: Duration = Duration::from_millis(50);

#[derive(Clone)]
pub struct MoatConfig {
    pub upstream_dns: UpstreamDns,
    /// Private ranges that policies may name.
    pub allow_private: Vec<IpNet>,
    pub hooks: Arc<dyn Hooks>,
    /// Without it, policies with HTTP rules let no TLS through to these hosts.
    pub interceptor: Option<Arc<dyn Interceptor>>,
    /// What answers at `sandkeep.internal` and 169.254.169.254.
    pub inside: Option<Arc<dyn Inside>>,
    /// The keys of the boxes' authorities are made from it, so that boxes that are adopted go on
    /// trusting theirs. It signs for every host: keep it as the key of the secrets is kept.
    pub authority_seed: Option<Secret>,
    /// Open connections one box may have, whatever its policy says.
    pub most_connections: u32,
    /// Queries of one box that are looked at in a second.
    pub dns_per_second: u32,
    pub patience: Patience,
}

impl Default for MoatConfig {
    fn default() -> Self {
        Self {
            upstream_dns: UpstreamDns::System,
            allow_private: Vec::new(),
            hooks: Arc::new(NoHooks),
            interceptor: None,
            inside: None,
            authority_seed: None,
            most_connections: 4096,
            dns_per_second: 200,
            patience: Patience::default(),
        }
    }
}

impl fmt::Debug for MoatConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MoatConfig")
            .field("upstream_dns", &self.upstream_dns)
            .field("allow_private", &self.allow_private)
            .field("interceptor", &self.interceptor.is_some())
            .field("inside", &self.inside.is_some())
            .finish_non_exhaustive()
    }
}

/// A box to be given its moat.
#[derive(Debug)]
pub struct AttachSpec {
    pub id: SandboxId,
    /// Owned by the host, with nothing but a loopback device in it.
    pub netns: OwnedFd,
    pub policy: Policy,
    /// See [`BoxMoat::set_bindings`].
    pub bindings: Vec<Binding>,
}

#[derive(Debug)]
pub struct Moat {
    shared: Arc<Shared>,
    builders: Semaphore,
}

impl Moat {
    /// The runtime this is used on dials from the namespace its threads are in.
    pub fn new(config: MoatConfig) -> Arc<Self> {
        let guard = AddressGuard::new(config.allow_private);
        Arc::new(Self {
            shared: Arc::new(Shared {
                resolver: Resolver::new(config.upstream_dns, guard.clone()),
                guard,
                hooks: config.hooks,
                interceptor: config.interceptor,
                inside: config.inside,
                authority_seed: config.authority_seed,
                bounds: Bounds {
                    most_connections: config.most_connections,
                    dns_per_second: config.dns_per_second,
                },
                patience: config.patience,
            }),
            builders: Semaphore::new(EDGES_AT_ONCE),
        })
    }

    pub fn guard(&self) -> &AddressGuard {
        &self.shared.guard
    }

    /// Digs the moat around a box. Also for a box that had one from a server before this.
    pub async fn attach(&self, spec: AttachSpec) -> Result<BoxMoat> {
        let listeners = {
            let _turn = self
                .builders
                .acquire()
                .await
                .map_err(|_| Error::internal("the moat is closing"))?;
            edge::build(spec.netns).await?
        };
        let state = Arc::new(BoxState::new(
            spec.id,
            Arc::clone(&self.shared),
            spec.policy,
        ));
        state.keys.set_bindings(spec.bindings);
        let sockets = Sockets::new(listeners).map_err(|error| {
            Error::internal(format!(
                "the listeners of the moat can not be served: {error}"
            ))
        })?;
        let gone = state.gone.clone();
        let server = serve(Arc::clone(&state), sockets);
        state.tasks.spawn(gone.run_until_cancelled_owned(server));
        Ok(BoxMoat { state })
    }
}

/// The moat of one box. Dropping it closes the box off at once.
#[derive(Debug)]
pub struct BoxMoat {
    state: Arc<BoxState>,
}

impl BoxMoat {
    pub fn id(&self) -> &SandboxId {
        &self.state.id
    }

    pub fn policy(&self) -> Arc<Policy> {
        self.state.policy()
    }

    /// Holds from now on; open connections it does not bear are reset.
    pub fn set_policy(&self, policy: Policy) {
        self.state.set_policy(policy);
    }

    /// The certificate the box must trust for hosts under interception, as PEM. Made when first
    /// asked for. A box that is adopted needs it again, unless there is an `authority_seed`.
    pub fn ca_pem(&self) -> Result<String> {
        Ok(self.state.authority()?.pem().to_owned())
    }

    /// What is added to requests, from the next one on. Never adds to what the policy allows.
    pub fn set_bindings(&self, bindings: Vec<Binding>) {
        self.state.keys.set_bindings(bindings);
    }

    /// Newest first.
    pub fn denials(&self) -> Vec<Denial> {
        self.state.denials()
    }

    pub fn traffic(&self) -> Traffic {
        self.state.traffic()
    }

    /// `target`: a host, `host:port` or a URL.
    pub fn why(&self, target: &str) -> Result<Why> {
        self.view().why(target)
    }

    pub fn view(&self) -> BoxView {
        BoxView(Arc::clone(&self.state))
    }

    /// Ends every connection of the box with a reset. It can make new ones at once.
    pub fn hang_up(&self) {
        self.state.hang_up();
    }

    /// Closes everything and returns when it is closed. Dropping does the same without waiting.
    pub async fn detach(self) {
        let tasks = self.state.tasks.clone();
        drop(self);
        tasks.wait().await;
    }
}

impl Drop for BoxMoat {
    fn drop(&mut self) {
        self.state.gone.cancel();
        self.state.tasks.close();
    }
}

/// One listener and one datagram socket for IPv4, and as many for IPv6 where the host has it.
struct Sockets {
    v4: (TcpListener, Arc<UdpSocket>),
    v6: Option<(TcpListener, Arc<UdpSocket>)>,
}

impl Sockets {
    fn new(listeners: Listeners) -> io::Result<Self> {
        let mut pairs =
            listeners
                .tcp
                .into_iter()
                .zip(listeners.udp)
                .map(|(tcp, udp)| -> io::Result<_> {
                    Ok((
                        TcpListener::from_std(tcp)?,
                        Arc::new(UdpSocket::from_std(udp)?),
                    ))
                });
        Ok(Self {
            v4: pairs
                .next()
                .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))??,
            v6: pairs.next().transpose()?,
        })
    }
}

/// One task for all sockets of a box.
async fn serve(state: Arc<BoxState>, sockets: Sockets) {
    let (tcp, udp) = &sockets.v4;
    let v6 = sockets.v6.as_ref();
    loop {
        let outcome = tokio::select! {
            accepted = tcp.accept() => take(&state, accepted),
            accepted = accept_or_never(v6) => take(&state, accepted),
            done = dns::datagrams(&state, udp) => done,
            done = datagrams_or_never(&state, v6) => done,
        };
        if let Err(error) = outcome {
            tracing::warn!(box_id = %state.id, %error, "the moat could not take up what a box sent");
            tokio::time::sleep(AFTER_A_FAILED_ACCEPT).await;
        }
    }
}

type Pair = (TcpListener, Arc<UdpSocket>);

async fn accept_or_never(pair: Option<&Pair>) -> io::Result<(TcpStream, std::net::SocketAddr)> {
    match pair {
        Some((tcp, _)) => tcp.accept().await,
        None => std::future::pending().await,
    }
}

async fn datagrams_or_never(state: &Arc<BoxState>, pair: Option<&Pair>) -> io::Result<()> {
    match pair {
        Some((_, udp)) => dns::datagrams(state, udp).await,
        None => std::future::pending().await,
    }
}

fn take(
    state: &Arc<BoxState>,
    accepted: io::Result<(TcpStream, std::net::SocketAddr)>,
) -> io::Result<()> {
    match accepted {
        Ok((stream, _)) => {
            state.tasks.spawn(proxy::serve(Arc::clone(state), stream));
            Ok(())
        }
        // The client gave up first.
        Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => Ok(()),
        Err(error) => Err(error),
    }
}
