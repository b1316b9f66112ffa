//! Attaching boxes and letting them go.

use std::{fmt, io, net::SocketAddr, os::fd::OwnedFd, path::PathBuf, sync::Arc, time::Duration};

use ipnet::IpNet;
use sandkeep_model::{Error, Result, SandboxId, Secret};
use tokio::{
    io::unix::AsyncFd,
    net::{TcpListener, TcpStream, UdpSocket},
    runtime::Handle,
    sync::{Semaphore, watch},
    time::{Instant, Interval, MissedTickBehavior, interval, sleep, sleep_until},
};

use tokio_util::task::AbortOnDropHandle;

use crate::{
    denials::Denial,
    dns::{self, Names, Resolver, UpstreamDns},
    edge::{self, Edge, Heard, Listeners, Plan, Refusals},
    hooks::{Hooks, Inside, Interceptor, NoHooks},
    kept::{Before, Pen},
    limits::{Bounds, Budget},
    memory::Memory,
    own,
    policy::{AddressGuard, Binding, Explanation, Policy, explain},
    proxy,
    state::{BoxState, BoxView, Patience, Shared, Why, given_by},
    traffic::Traffic,
};

/// Threads that make edges at the same time.
const EDGES_AT_ONCE: usize = 4;
/// Waits out a want of descriptors or memory, which others cause and cure. Longer each time.
const AFTER_A_FAILED_ACCEPT: Duration = Duration::from_millis(50);
const LONGEST_REST: Duration = Duration::from_secs(1);
/// A box whose loop fails again and again says so this often.
const TOLD_EVERY: Duration = Duration::from_secs(60);
/// What was given for a time is taken back after it, at the latest by so much.
const SWEPT_EVERY: Duration = Duration::from_secs(60);

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
    /// Networks no policy and no `allow_private` opens, besides those known here.
    pub never: Vec<IpNet>,
    /// Open connections one box may have, whatever its policy says.
    pub most_connections: u32,
    /// Open connections one box may have to `sandkeep.internal` and 169.254.169.254.
    pub most_inside: u32,
    /// Open connections of all boxes together. Each takes two descriptors when it is passed on.
    pub most_in_all: u32,
    /// Where it is written down what boxes were told about names. `None`: a server that begins
    /// anew knows nothing of it, and boxes ask again.
    pub memory: Option<PathBuf>,
    /// Where everything of the boxes runs, and dials from. `None`: the runtime it is made on.
    pub runtime: Option<Handle>,
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
            never: Vec::new(),
            most_connections: 256,
            most_inside: 32,
            most_in_all: 4096,
            memory: None,
            runtime: None,
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
    /// The point whose memory the box begins with: what it was told about names until then
    /// counts on.
    pub from_point: Option<String>,
    /// The sandbox it is a copy of, if it is one: what that has spent of its bytes counts for the
    /// copy, too, from when it is attached first.
    pub copy_of: Option<SandboxId>,
}

#[derive(Debug)]
pub struct Moat {
    shared: Arc<Shared>,
    builders: Semaphore,
    runtime: Handle,
    /// Whether the machine's own addresses are known.
    ready: watch::Receiver<bool>,
    _following: AbortOnDropHandle<()>,
}

impl Moat {
    /// The runtime it works on dials from the namespace its threads are in.
    ///
    /// # Panics
    /// Without a runtime, given or around it.
    pub fn new(config: MoatConfig) -> Arc<Self> {
        let guard = AddressGuard::new(config.allow_private).never(config.never);
        let runtime = config.runtime.unwrap_or_else(Handle::current);
        let memory = config.memory.and_then(|dir| match Memory::open(&dir) {
            Ok(memory) => Some(memory),
            Err(error) => {
                tracing::warn!(dir = %dir.display(), %error, "what sandboxes are told about names cannot be written down: after a restart of the server they have to ask again");
                None
            }
        });
        let shared = Arc::new(Shared {
            resolver: Resolver::new(config.upstream_dns, guard.clone()),
            guard,
            hooks: config.hooks,
            interceptor: config.interceptor,
            inside: config.inside,
            authority_seed: config.authority_seed,
            bounds: Bounds {
                most_connections: config.most_connections,
                most_inside: config.most_inside,
                dns_per_second: config.dns_per_second,
            },
            budget: Budget::new(config.most_in_all),
            memory,
            patience: config.patience,
            own_changed: watch::Sender::new(()),
        });
        let (told, ready) = watch::channel(false);
        let following = runtime.spawn(own::follow(Arc::clone(&shared), told));
        Arc::new(Self {
            shared,
            builders: Semaphore::new(EDGES_AT_ONCE),
            runtime,
            ready,
            _following: AbortOnDropHandle::new(following),
        })
    }

    pub fn guard(&self) -> &AddressGuard {
        &self.shared.guard
    }

    /// Decides on a URL or `host:port` as a sandbox with this policy would find it: by its rules,
    /// and by what the name resolves to. Nothing is dialled.
    pub async fn explain(&self, policy: &Policy, method: &str, url: &str) -> Result<Explanation> {
        let mut found = explain(policy, self.guard(), method, url)?;
        self.shared.resolve(policy, &mut found).await;
        Ok(found)
    }

    /// Connections of all boxes that are open now.
    pub fn open_connections(&self) -> u32 {
        self.shared.budget.used()
    }

    /// Digs the moat around a box. Also for a box that had one from a server before this.
    pub async fn attach(&self, spec: AttachSpec) -> Result<BoxMoat> {
        // Before anything is let through it is known what this machine itself is.
        self.ready
            .clone()
            .wait_for(|ready| *ready)
            .await
            .map_err(|_| Error::internal("the moat is closing"))?;
        let names = self.remembered(&spec).await;
        let plan = Plan::of(&spec.policy, &self.shared.guard);
        let given = given_by(&plan, &names);
        let edge = {
            let _turn = self
                .builders
                .acquire()
                .await
                .map_err(|_| Error::internal("the moat is closing"))?;
            edge::build(spec.netns, plan, given).await?
        };
        let Edge {
            listeners,
            control,
            refusals,
        } = edge;
        let kept = self.kept_by(spec.id.clone(), spec.copy_of).await;
        let state = Arc::new(BoxState::new(
            spec.id,
            Arc::clone(&self.shared),
            spec.policy,
            names,
            control,
            kept,
        ));
        state.write_numbers();
        state.keys.set_bindings(spec.bindings);
        let sockets = {
            let _on_it = self.runtime.enter();
            Sockets::new(listeners, refusals).map_err(|error| {
                Error::internal(format!(
                    "the listeners of the moat can not be served: {error}"
                ))
            })?
        };
        let gone = state.gone.clone();
        let writer = Arc::clone(&state);
        let writing = async move { writer.keep_written().await };
        let until = gone.clone();
        state.tasks.spawn_on(
            async move { until.run_until_cancelled_owned(writing).await },
            &self.runtime,
        );
        let server = serve(Arc::clone(&state), sockets);
        state
            .tasks
            .spawn_on(gone.run_until_cancelled_owned(server), &self.runtime);
        Ok(BoxMoat { state })
    }

    async fn remembered(&self, spec: &AttachSpec) -> Names {
        let mut names = Names::default();
        let Some(memory) = self.shared.memory.clone() else {
            return names;
        };
        let (id, point) = (spec.id.clone(), spec.from_point.clone());
        let reading = tokio::task::spawn_blocking(move || {
            let before = point
                .map(|point| memory.of_point(&point))
                .unwrap_or_default();
            let all: Vec<_> = memory.of_sandbox(&id).into_iter().chain(before).collect();
            if !all.is_empty()
                && let Err(error) = memory.rewrite(&id, &all)
            {
                tracing::warn!(box_id = %id, %error, "what a sandbox was told about names is not written down");
            }
            all
        });
        for given in reading.await.unwrap_or_default() {
            names.take(given);
        }
        names
    }

    /// What it has spent, moved and been refused until now, and the pen to go on with.
    async fn kept_by(&self, id: SandboxId, copy_of: Option<SandboxId>) -> (Before, Option<Pen>) {
        let Some(memory) = self.shared.memory.clone() else {
            return (Before::default(), None);
        };
        let reading = tokio::task::spawn_blocking(move || {
            let places = memory.kept(&id);
            let mut before = places.read();
            if let Some(source) = copy_of
                && places.numbers().is_none()
            {
                let source = memory.kept(&source).numbers();
                before.spent = source.map_or(0, |(spent, _)| spent);
            }
            let pen = Pen::take_up(places).map_err(|error| {
                tracing::warn!(box_id = %id, %error, "what a sandbox spends cannot be written down: a restart of the server gives it back");
            });
            (before, pen.ok())
        });
        reading.await.unwrap_or_default()
    }

    /// What a sandbox that is not attached now has moved, and was refused (newest first).
    pub fn kept(&self, id: &SandboxId) -> (Traffic, Vec<Denial>) {
        let Some(memory) = &self.shared.memory else {
            return Default::default();
        };
        let before = memory.kept(id).read();
        (before.traffic, before.denials.into_iter().rev().collect())
    }

    /// The sandbox is gone for good.
    pub fn forget(&self, id: &SandboxId) {
        if let Some(memory) = &self.shared.memory {
            memory.forget_sandbox(id);
        }
    }

    /// The point is gone for good.
    pub fn forget_point(&self, point: &str) {
        if let Some(memory) = &self.shared.memory {
            memory.forget_point(point);
        }
    }

    /// Forgets what was told to all sandboxes, and is kept with all points, but those that are
    /// there.
    pub fn forget_all_but(&self, sandbox: impl Fn(&str) -> bool, point: impl Fn(&str) -> bool) {
        if let Some(memory) = &self.shared.memory
            && let Err(error) = memory.keep_only(sandbox, point)
        {
            tracing::warn!(%error, "files of sandboxes that are gone could not be looked for");
        }
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

    /// Keeps with a point what the box was told about names until now.
    pub fn keep_at(&self, point: &str) {
        if let Some(memory) = &self.state.shared.memory
            && let Err(error) = memory.keep_at(point, &self.state.given())
        {
            tracing::warn!(box_id = %self.state.id, point, %error, "a sandbox that comes back from this point has to ask for names again");
        }
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
    pub async fn why(&self, target: &str) -> Result<Why> {
        self.view().why(target).await
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
        self.state.put_down_the_pen();
        self.state.tasks.close();
    }
}

/// One listener and one datagram socket for IPv4, and as many for IPv6 where the host has it.
struct Sockets {
    v4: Pair,
    v6: Option<Pair>,
    refusals: Option<AsyncFd<Refusals>>,
}

impl Sockets {
    fn new(listeners: Listeners, refusals: Option<Refusals>) -> io::Result<Self> {
        let mut pairs =
            listeners
                .tcp
                .into_iter()
                .zip(listeners.udp)
                .map(|(tcp, udp)| -> io::Result<Pair> {
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
            refusals: refusals
                // SAFETY: it owns its descriptor and has the same one until it is dropped.
                .map(|refusals| unsafe { AsyncFd::register(refusals) })
                .transpose()?,
        })
    }
}

/// One task for all sockets of a box.
async fn serve(state: Arc<BoxState>, sockets: Sockets) {
    let (tcp, udp) = &sockets.v4;
    let v6 = sockets.v6.as_ref();
    let mut own_changed = state.shared.own_changed.subscribe();
    let mut sweeps = slow_interval(SWEPT_EVERY);
    let mut trouble = Trouble::default();
    let mut refusals_after = Instant::now();
    loop {
        let outcome = tokio::select! {
            accepted = tcp.accept() => take(&state, accepted).await,
            accepted = accept_or_never(v6) => take(&state, accepted).await,
            done = dns::datagrams(&state, udp) => done,
            done = datagrams_or_never(&state, v6) => done,
            heard = refusals_or_never(refusals_after, sockets.refusals.as_ref()) => {
                heard.map(|heard| refusals_after = Instant::now() + note_refusals(&state, heard))
            }
            Ok(()) = own_changed.changed() => {
                state.renew_rules();
                Ok(())
            }
            _ = sweeps.tick() => {
                state.sweep();
                Ok(())
            }
        };
        match outcome {
            Ok(()) => trouble.is_over(),
            Err(error) => trouble.rest(&state, &error).await,
        }
    }
}

fn slow_interval(every: Duration) -> Interval {
    let mut interval = interval(every);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

/// What goes wrong in the loop of a box is mostly a want of descriptors: it must neither spin nor
/// fill the log.
#[derive(Default)]
struct Trouble {
    in_a_row: u32,
    told: Option<Instant>,
}

impl Trouble {
    fn is_over(&mut self) {
        self.in_a_row = 0;
    }

    async fn rest(&mut self, state: &BoxState, error: &io::Error) {
        if self.told.is_none_or(|told| told.elapsed() > TOLD_EVERY) {
            self.told = Some(Instant::now());
            tracing::warn!(box_id = %state.id, %error, "the moat could not take up what a box sent; this is not told again for a minute");
        }
        self.in_a_row = self.in_a_row.saturating_add(1);
        let rest = AFTER_A_FAILED_ACCEPT.saturating_mul(1 << self.in_a_row.min(8));
        sleep(rest.min(LONGEST_REST)).await;
    }
}

type Pair = (TcpListener, Arc<UdpSocket>);

async fn accept_or_never(pair: Option<&Pair>) -> io::Result<(TcpStream, SocketAddr)> {
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

/// What the kernel refused with its first packet, not before `after`.
async fn refusals_or_never(
    after: Instant,
    refusals: Option<&AsyncFd<Refusals>>,
) -> io::Result<Heard> {
    let Some(refusals) = refusals else {
        return std::future::pending().await;
    };
    sleep_until(after).await;
    let mut ready = refusals.readable().await?;
    match ready.try_io(|refusals| refusals.get_ref().take_up()) {
        Ok(heard) => heard,
        Err(_would_block) => Ok(Heard::default()),
    }
}

/// They are refusals like any other. Says how long not to listen: a flood of them takes no more of
/// the server than so much, and what comes meanwhile is counted.
fn note_refusals(state: &BoxState, heard: Heard) -> Duration {
    let count = heard.refused.len();
    for to in heard.refused {
        state.refused_at_once(to);
    }
    state.refused_unseen(heard.lost);
    state.limiter.after_refusals(count)
}

async fn take(
    state: &Arc<BoxState>,
    accepted: io::Result<(TcpStream, SocketAddr)>,
) -> io::Result<()> {
    match accepted {
        Ok((stream, _)) => {
            if let Some(pause) = proxy::take_on(state, stream) {
                // What it sends meanwhile waits in the kernel, where its own room is small.
                sleep(pause).await;
            }
            Ok(())
        }
        // The client gave up first.
        Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => Ok(()),
        Err(error) => Err(error),
    }
}
