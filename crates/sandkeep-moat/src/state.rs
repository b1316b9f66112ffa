//! What is known of one box while it is attached.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use sandkeep_model::{SandboxId, Secret, Timestamp};
use serde::Serialize;
use tokio::sync::{Semaphore, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    denials::{Denial, Denials, Via},
    dns::{Given, Names, Resolver},
    edge::{Control, Kinds, Plan},
    hooks::{Hooks, Inside, Interceptor},
    intercept::{Authority, BoxKeys},
    kept::{Before, Pen},
    limits::{Bounds, Budget, Limiter},
    memory::Memory,
    policy::{
        AddressGuard, Asked, Decision, Explanation, Host, Policy, Reason, Refusal, Target, explain,
    },
    traffic::{Counters, Traffic},
};

/// Queries of one box under way at the same time, and connections that bring some.
const DNS_AT_ONCE: usize = 64;
const DNS_CONNECTIONS: usize = 16;
/// Lines in the file of a box before it is written anew.
const MOST_NOTED: usize = 4096;
const LONGEST_REASON: usize = 1024;
/// What is counted is in its file after so long, at the latest; a budget at once.
const WRITTEN_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// How long a box may take to say what it wants. No connection is held open by saying nothing.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// For the first byte, where only a name the connection itself says could let it through.
    pub name_within: Duration,
    /// From the first byte to a whole ClientHello or request line.
    pub decide_within: Duration,
    /// For the head of an HTTP request, and for the next one on a connection that is kept.
    pub head_within: Duration,
    /// The same for requests to ourselves: they come from the same machine, and whoever asks
    /// has its question ready.
    pub inside_within: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            name_within: Duration::from_secs(2),
            decide_within: Duration::from_secs(10),
            head_within: Duration::from_secs(30),
            inside_within: Duration::from_secs(2),
        }
    }
}

/// What all boxes share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub guard: AddressGuard,
    pub resolver: Resolver,
    pub hooks: Arc<dyn Hooks>,
    pub interceptor: Option<Arc<dyn Interceptor>>,
    pub inside: Option<Arc<dyn Inside>>,
    pub authority_seed: Option<Secret>,
    pub bounds: Bounds,
    pub budget: Arc<Budget>,
    pub memory: Option<Memory>,
    pub patience: Patience,
    /// Told when the addresses of this machine are others.
    pub own_changed: watch::Sender<()>,
}

impl Shared {
    /// What rules allow may still not be reached: adds what the name resolves to.
    pub async fn resolve(&self, policy: &Policy, found: &mut Explanation) {
        if !found.allowed || found.host.name().is_none() {
            return;
        }
        let looked = self.resolver.look(&found.host).await;
        if let Err(refusal) = looked.open_to(&found.host, found.port, policy, &self.guard) {
            found.but(refusal);
        }
    }
}

#[derive(Debug)]
pub(crate) struct BoxState {
    pub id: SandboxId,
    pub shared: Arc<Shared>,
    policy: watch::Sender<Arc<Policy>>,
    names: Mutex<Names>,
    /// Locked after `names`, never before.
    control: Mutex<Control>,
    noted: AtomicUsize,
    denials: Mutex<Denials>,
    /// `None`: a server that begins anew knows nothing of what is counted here.
    pen: Option<Pen>,
    pub traffic: Counters,
    pub limiter: Arc<Limiter>,
    pub dns_slots: Arc<Semaphore>,
    pub dns_connections: Arc<Semaphore>,
    pub keys: BoxKeys,
    pub gone: CancellationToken,
    /// Connections of now end with it; there is a new one for those after.
    open: Mutex<CancellationToken>,
    /// Everything that runs for this box.
    pub tasks: TaskTracker,
}

/// Something a box tried.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub via: Via,
    pub host: String,
    pub port: u16,
}

impl BoxState {
    pub fn new(
        id: SandboxId,
        shared: Arc<Shared>,
        policy: Policy,
        names: Names,
        control: Control,
        (before, pen): (Before, Option<Pen>),
    ) -> Self {
        let budget = Arc::clone(&shared.budget);
        let limiter = Limiter::new(&policy.limits, shared.bounds, budget, before.spent);
        let mut denials = Denials::default();
        for denial in before.denials {
            denials.restore(denial);
        }
        let gone = CancellationToken::new();
        Self {
            id,
            shared,
            policy: watch::Sender::new(Arc::new(policy)),
            names: Mutex::new(names),
            control: Mutex::new(control),
            noted: AtomicUsize::new(0),
            denials: Mutex::new(denials),
            pen,
            traffic: Counters::after(before.traffic),
            limiter: Arc::new(limiter),
            dns_slots: Arc::new(Semaphore::new(DNS_AT_ONCE)),
            dns_connections: Arc::new(Semaphore::new(DNS_CONNECTIONS)),
            keys: BoxKeys::default(),
            open: Mutex::new(gone.child_token()),
            gone,
            tasks: TaskTracker::new(),
        }
    }

    /// Cancelled when a connection made now has to end.
    pub fn hung_up(&self) -> CancellationToken {
        lock(&self.open).clone()
    }

    pub fn hang_up(&self) {
        let before = std::mem::replace(&mut *lock(&self.open), self.gone.child_token());
        before.cancel();
    }

    pub fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.policy.borrow())
    }

    /// For flows: tells of every change after the policy they were decided by.
    pub fn watch(&self) -> watch::Receiver<Arc<Policy>> {
        self.policy.subscribe()
    }

    pub fn set_policy(&self, policy: Policy) {
        self.limiter.restart(&policy.limits);
        self.write_numbers();
        // First, so that what the kernel lets through by the new policy is decided by it.
        self.policy.send_replace(Arc::new(policy));
        self.renew_rules();
    }

    /// Brings the rules of the kernel to what the policy and the machine's addresses are now.
    pub fn renew_rules(&self) {
        let names = lock(&self.names);
        let mut control = lock(&self.control);
        let plan = Plan::of(&self.policy(), self.guard());
        let given = given_by(&plan, &names);
        if let Err(error) = control.replace(plan, given) {
            // The older rules stay, and the listeners decide by the new policy.
            tracing::error!(box_id = %self.id, %error, "the packet rules of a sandbox could not be changed");
        }
    }

    pub fn authority(&self) -> sandkeep_model::Result<Arc<Authority>> {
        let seed = self.shared.authority_seed.as_ref();
        self.keys.authority(&self.id, seed)
    }

    pub fn guard(&self) -> &AddressGuard {
        &self.shared.guard
    }

    /// The box is about to be told these addresses of a name. When this returns the kernel lets
    /// connections to them begin, if a rule allows any to the name.
    pub async fn tell(
        self: &Arc<Self>,
        name: &Host,
        addresses: impl Iterator<Item = IpAddr>,
        ttl: Duration,
    ) -> io::Result<()> {
        let news = {
            let mut names = lock(&self.names);
            let mut control = lock(&self.control);
            let (mut news, mut wanted) = (Vec::new(), Vec::new());
            for address in addresses {
                let given = Given::by_answer(address, name, ttl);
                let taken = names.take(given.clone());
                wanted.extend(taken.gone.map(|gone| (gone, 0)));
                wanted.push((address, kinds(control.plan(), &names, address)));
                if taken.news {
                    news.push(given);
                }
            }
            control.give(&wanted)?;
            news
        };
        self.note(news).await;
        Ok(())
    }

    /// Written down before it is told, so that a server killed right after it still knows it.
    async fn note(self: &Arc<Self>, news: Vec<Given>) {
        let Some(memory) = self.shared.memory.clone().filter(|_| !news.is_empty()) else {
            return;
        };
        let state = Arc::clone(self);
        let writing = tokio::task::spawn_blocking(move || {
            let lines = state.noted.fetch_add(news.len(), Ordering::Relaxed) + news.len();
            if lines < MOST_NOTED {
                return memory.note(&state.id, &news);
            }
            state.noted.store(0, Ordering::Relaxed);
            memory.rewrite(&state.id, &state.given())
        });
        if let Ok(Err(error)) = writing.await {
            // It works all the same, until the server begins anew.
            tracing::warn!(box_id = %self.id, %error, "what a sandbox was told about a name is not written down");
        }
    }

    /// What the box was told and still counts.
    pub fn given(&self) -> Vec<Given> {
        lock(&self.names).all()
    }

    /// A connection went to this address.
    pub fn used(&self, address: IpAddr) {
        lock(&self.names).used(address);
    }

    /// Takes back what was given for its time.
    pub fn sweep(&self) {
        let mut names = lock(&self.names);
        let mut control = lock(&self.control);
        names.sweep();
        let wanted: Vec<(IpAddr, Kinds)> = control
            .given()
            .into_iter()
            .map(|address| (address, kinds(control.plan(), &names, address)))
            .collect();
        if let Err(error) = control.give(&wanted) {
            tracing::warn!(box_id = %self.id, %error, "addresses whose time is over are still open");
        }
    }

    /// The names that speak for an address where a connection names none.
    pub fn names_of(&self, address: IpAddr) -> Vec<Host> {
        lock(&self.names).speaking_for(address)
    }

    /// The kernel refused a connection with its first packet.
    pub fn refused_at_once(&self, to: SocketAddr) {
        let host = Host::from(to.ip());
        let decide = |host: &Host| {
            let target = Target {
                host,
                port: to.port(),
                http: None,
            };
            self.policy().decide(&target, self.guard())
        };
        let named = lock(&self.names).opening(to.ip());
        // A name tells more than its address, where one was looked up.
        let decision = named
            .iter()
            .filter(|_| self.guard().refuses(to.ip()).is_none())
            .map(decide)
            .find(|decision| !decision.is_allowed())
            .unwrap_or_else(|| decide(&host));
        let refusal = match decision {
            Decision::Deny(refusal) => refusal,
            Decision::Allow { .. } => Refusal::new(
                Reason::Stale,
                format!("{host} was not open to this sandbox when it was dialled"),
                "look the name up again in the sandbox and connect to what it resolves to",
            ),
        };
        let attempt = Attempt {
            via: Via::Tcp,
            host: host.to_string(),
            port: to.port(),
        };
        self.deny(&attempt, refusal);
    }

    /// What it has spent and moved.
    pub fn write_numbers(&self) {
        if let Some(pen) = &self.pen {
            pen.numbers(self.limiter.spent(), &self.traffic());
        }
    }

    /// Writes it soon after it changes, and no oftener than that.
    pub async fn keep_written(&self) {
        loop {
            self.traffic.changed().await;
            self.write_numbers();
            tokio::time::sleep(WRITTEN_AGAIN_AFTER).await;
        }
    }

    /// Whoever attaches the sandbox next goes on from here.
    pub fn put_down_the_pen(&self) {
        if let Some(pen) = &self.pen {
            let denials = lock(&self.denials).oldest_first();
            pen.put_down(self.limiter.spent(), &self.traffic(), &denials);
        }
    }

    pub fn deny(&self, attempt: &Attempt, refusal: Refusal) {
        self.traffic.denied();
        let now = Timestamp::now();
        let denial = Denial {
            via: attempt.via,
            host: attempt.host.clone(),
            port: attempt.port,
            reason: refusal.reason,
            range: refusal.range,
            request: refusal.request.map(|asked| Asked {
                method: bounded(asked.method),
                path: bounded(asked.path),
            }),
            why: bounded(refusal.why),
            hint: bounded(refusal.hint),
            first: now,
            last: now,
            count: 1,
        };
        self.shared.hooks.refused(&self.id, &denial);
        self.write_numbers();
        let report = lock(&self.denials).add(denial);
        if let Some(denial) = report {
            if let Some(pen) = &self.pen {
                pen.refusal(&denial, || lock(&self.denials).oldest_first());
            }
            tracing::debug!(box_id = %self.id, host = %denial.host, port = denial.port, why = %denial.why, "refused");
            self.shared.hooks.denial(&self.id, &denial);
        }
    }

    /// So many more were refused than could be told one by one.
    pub fn refused_unseen(&self, count: u64) {
        if count > 0 {
            self.traffic.denied_unseen(count);
            self.shared.hooks.refused_unseen(&self.id, count);
        }
    }

    pub fn denials(&self) -> Vec<Denial> {
        lock(&self.denials).all()
    }

    pub fn traffic(&self) -> Traffic {
        self.traffic.read(self.limiter.active())
    }
}

fn kinds(plan: &Plan, names: &Names, address: IpAddr) -> Kinds {
    let opening = names.opening(address);
    opening
        .iter()
        .fold(0, |all, name| all | plan.kinds_of(name))
}

/// What the kernel is to know of what a box was told.
pub(crate) fn given_by(plan: &Plan, names: &Names) -> HashMap<IpAddr, Kinds> {
    if !plan.has_names() {
        return HashMap::new();
    }
    names
        .addresses()
        .map(|address| (address, kinds(plan, names, address)))
        .filter(|(_, kinds)| *kinds != 0)
        .collect()
}

/// Boxes choose the paths and names in it; many refusals are kept.
fn bounded(mut reason: String) -> String {
    reason.truncate(reason.floor_char_boundary(LONGEST_REASON));
    reason
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The answer to "why can I not reach this?".
#[derive(Debug, Clone, Serialize)]
pub struct Why {
    #[serde(flatten)]
    pub explanation: Explanation,
    /// What was refused of late for this host.
    pub denials: Vec<Denial>,
}

/// A look at a box, for those who serve it.
#[derive(Debug, Clone)]
pub struct BoxView(pub(crate) Arc<BoxState>);

impl BoxView {
    pub fn id(&self) -> &SandboxId {
        &self.0.id
    }

    pub fn policy(&self) -> Arc<Policy> {
        self.0.policy()
    }

    pub fn guard(&self) -> &AddressGuard {
        self.0.guard()
    }

    pub fn denials(&self) -> Vec<Denial> {
        self.0.denials()
    }

    pub fn traffic(&self) -> Traffic {
        self.0.traffic()
    }

    /// `target`: a host, `host:port` or a URL. Without a port that of HTTPS is meant.
    pub async fn why(&self, target: &str) -> sandkeep_model::Result<Why> {
        let policy = self.policy();
        let asked = |text: &str| explain(&policy, self.guard(), "GET", text);
        let mut explanation = match asked(target) {
            Ok(found) => found,
            Err(error) => asked(&format!("https://{target}")).map_err(|_| error)?,
        };
        // As many as it may look up itself.
        if self.0.limiter.dns_query() {
            self.0.shared.resolve(&policy, &mut explanation).await;
        }
        let host = explanation.host.to_string();
        let mut denials = self.denials();
        denials.retain(|denial| denial.host == host);
        Ok(Why {
            explanation,
            denials,
        })
    }
}
