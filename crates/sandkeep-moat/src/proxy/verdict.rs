//! What a connection stands on, and whether that still holds.

use std::net::{IpAddr, SocketAddr};

use futures_util::{StreamExt as _, stream::FuturesUnordered};

use crate::{
    policy::{AddressGuard, Decision, Host, Policy, Refusal, Target, To},
    state::BoxState,
};

/// Names looked up at the same time.
const ASKED_AT_ONCE: usize = 16;

/// The rule of those that no rule names but that are let through all the same.
pub const OPEN: &str = "open";

/// Why a connection was let through. Kept with it, and asked again when the policy changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Basis {
    /// A rule names the address itself, or everything is open.
    Address(IpAddr),
    /// A rule names the name our resolver gave this address for.
    NameAt(Host, IpAddr),
    /// A rule names the name the connection itself said.
    Name(Host),
}

/// How a name is going to be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sight {
    /// Requests are seen and decided one by one.
    Seen,
    /// Only bytes: rules about requests could not be kept.
    Unseen,
}

impl Basis {
    pub fn host(&self) -> Host {
        match self {
            Self::Address(address) => Host::Address(*address),
            Self::NameAt(host, _) | Self::Name(host) => host.clone(),
        }
    }

    /// The decision by this policy.
    pub fn decide(
        &self,
        port: u16,
        sight: Sight,
        policy: &Policy,
        guard: &AddressGuard,
    ) -> Decision {
        let host = self.host();
        let target = Target {
            host: &host,
            port,
            http: None,
        };
        let decision = policy.decide(&target, guard);
        if !decision.is_allowed() {
            return decision;
        }
        if sight == Sight::Unseen && policy.needs_interception(&host, port) {
            return Decision::Deny(Refusal::of_form(
                format!("only some requests to {host} are allowed, and these cannot be seen"),
                "use HTTP or HTTPS with the name of the host",
            ));
        }
        match self {
            Self::NameAt(_, address) => policy.allows_resolved(&host, port, *address, guard),
            _ => decision,
        }
    }
}

/// A connection decided by where it goes alone, before it said anything.
#[derive(Debug, Clone)]
pub struct ByAddress {
    pub basis: Basis,
    pub rule: String,
    /// Whether it does not matter what the connection says, because the address itself is
    /// allowed. Not where everything is open but requests to some host are narrowed: then a
    /// connection must say which host it is for.
    pub whatever_is_said: bool,
}

pub fn by_address(state: &BoxState, policy: &Policy, to: SocketAddr) -> Option<ByAddress> {
    let named = state
        .names_of(to.ip())
        .into_iter()
        .map(|host| Basis::NameAt(host, to.ip()));
    let (basis, rule) = std::iter::once(Basis::Address(to.ip()))
        .chain(named)
        .find_map(
            |basis| match basis.decide(to.port(), Sight::Unseen, policy, state.guard()) {
                Decision::Allow { rule } => Some((basis, rule)),
                Decision::Deny(_) => None,
            },
        )?;
    let whatever_is_said = matches!(basis, Basis::Address(_))
        && (rule != OPEN || !narrows_requests(policy, to.port()));
    Some(ByAddress {
        basis,
        rule,
        whatever_is_said,
    })
}

/// Whether some rule lets only some requests through on this port.
pub fn narrows_requests(policy: &Policy, port: u16) -> bool {
    policy
        .allow
        .iter()
        .any(|rule| !rule.http.is_empty() && rule.ports.contains(port))
}

/// A name that only some requests are allowed to and that is, or may be, at this address too: what
/// is sent there without being looked at may be a request to it.
///
/// Names the box asked for are known. Those that rules spell out are looked up here, for a box
/// knows addresses without asking. Behind a wildcard only the first kind is found.
pub async fn narrowed_at(state: &BoxState, policy: &Policy, to: SocketAddr) -> Option<Host> {
    let port = to.port();
    if !narrows_requests(policy, port) {
        return None;
    }
    let narrowed = |host: &Host| policy.needs_interception(host, port);
    if let Some(known) = state.names_of(to.ip()).into_iter().find(narrowed) {
        return Some(known);
    }
    let mut asked: FuturesUnordered<_> = FuturesUnordered::new();
    let mut left = spelt_out(policy, port).into_iter();
    asked.extend(
        left.by_ref()
            .take(ASKED_AT_ONCE)
            .map(|host| at(state, host, to.ip())),
    );
    while let Some(found) = asked.next().await {
        if found.is_some() {
            return found;
        }
        asked.extend(left.next().map(|host| at(state, host, to.ip())));
    }
    None
}

/// Names with rules about requests, without those behind a wildcard.
fn spelt_out(policy: &Policy, port: u16) -> Vec<Host> {
    let hosts = policy.allow.iter().filter_map(|rule| match &rule.to {
        To::Host(host @ Host::Name(_)) if !rule.http.is_empty() => Some(host),
        _ => None,
    });
    hosts
        .filter(|host| policy.needs_interception(host, port))
        .cloned()
        .collect()
}

/// This host, if it is or may be at this address.
async fn at(state: &BoxState, host: Host, address: IpAddr) -> Option<Host> {
    match state.shared.resolver.addresses(&host).await {
        Ok(found) => found.contains(&address).then_some(host),
        // It was not there to be asked.
        Err(_) => Some(host),
    }
}

/// Whether a name could still save a connection to this port.
pub fn names_may_help(policy: &Policy, port: u16) -> bool {
    policy.standing == crate::policy::Standing::Open
        || policy
            .allow
            .iter()
            .any(|rule| rule.to.needs_a_name() && rule.ports.contains(port))
}
