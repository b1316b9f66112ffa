//! What is known of one box while it is attached.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use sandkeep_model::{SandboxId, Secret, Timestamp};
use serde::Serialize;
use tokio::sync::{Semaphore, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    denials::{Denial, Denials, Via},
    dns::{Names, Resolver},
    hooks::{Hooks, Inside, Interceptor},
    intercept::{Authority, BoxKeys},
    limits::{Bounds, Limiter},
    policy::{AddressGuard, Explanation, Host, Policy, explain},
    traffic::{Counters, Traffic},
};

/// Queries of one box under way at the same time.
const DNS_AT_ONCE: usize = 64;
const LONGEST_REASON: usize = 1024;

/// How long a box may take to say what it wants. No connection is held open by saying nothing.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// For the first byte, where only a name the connection itself says could let it through.
    pub name_within: Duration,
    /// From the first byte to a whole ClientHello or request line.
    pub decide_within: Duration,
    /// For the head of an HTTP request, and for the next one on a connection that is kept.
    pub head_within: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            name_within: Duration::from_secs(2),
            decide_within: Duration::from_secs(10),
            head_within: Duration::from_secs(30),
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
    pub patience: Patience,
}

#[derive(Debug)]
pub(crate) struct BoxState {
    pub id: SandboxId,
    pub shared: Arc<Shared>,
    policy: watch::Sender<Arc<Policy>>,
    names: Mutex<Names>,
    denials: Mutex<Denials>,
    pub traffic: Counters,
    pub limiter: Arc<Limiter>,
    pub dns_slots: Arc<Semaphore>,
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
    pub fn new(id: SandboxId, shared: Arc<Shared>, policy: Policy) -> Self {
        let limiter = Limiter::new(&policy.limits, shared.bounds);
        let gone = CancellationToken::new();
        Self {
            id,
            shared,
            policy: watch::Sender::new(Arc::new(policy)),
            names: Mutex::default(),
            denials: Mutex::default(),
            traffic: Counters::default(),
            limiter: Arc::new(limiter),
            dns_slots: Arc::new(Semaphore::new(DNS_AT_ONCE)),
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
        self.policy.send_replace(Arc::new(policy));
    }

    pub fn authority(&self) -> sandkeep_model::Result<Arc<Authority>> {
        let seed = self.shared.authority_seed.as_ref();
        self.keys.authority(&self.id, seed)
    }

    pub fn guard(&self) -> &AddressGuard {
        &self.shared.guard
    }

    pub fn remember(&self, address: IpAddr, name: &Host, ttl: Duration) {
        lock(&self.names).remember(address, name, ttl);
    }

    pub fn names_of(&self, address: IpAddr) -> Vec<Host> {
        lock(&self.names).of(address)
    }

    pub fn deny(&self, attempt: &Attempt, why: String, hint: String) {
        self.traffic.denied();
        let now = Timestamp::now();
        let denial = Denial {
            via: attempt.via,
            host: attempt.host.clone(),
            port: attempt.port,
            why: bounded(why),
            hint: bounded(hint),
            first: now,
            last: now,
            count: 1,
        };
        self.shared.hooks.refused(&self.id, &denial);
        let report = lock(&self.denials).add(denial);
        if let Some(denial) = report {
            tracing::debug!(box_id = %self.id, host = %denial.host, port = denial.port, why = %denial.why, "refused");
            self.shared.hooks.denial(&self.id, &denial);
        }
    }

    pub fn denials(&self) -> Vec<Denial> {
        lock(&self.denials).all()
    }

    pub fn traffic(&self) -> Traffic {
        self.traffic.read(self.limiter.active())
    }
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
    pub fn why(&self, target: &str) -> sandkeep_model::Result<Why> {
        let policy = self.policy();
        let asked = |text: &str| explain(&policy, self.guard(), "GET", text);
        let explanation = match asked(target) {
            Ok(found) => found,
            Err(error) => asked(&format!("https://{target}")).map_err(|_| error)?,
        };
        let host = explanation.host.to_string();
        let mut denials = self.denials();
        denials.retain(|denial| denial.host == host);
        Ok(Why {
            explanation,
            denials,
        })
    }
}
