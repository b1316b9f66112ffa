//! Why something was refused: one list, for denials, the audit log, events and suggestions.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{AddressGuard, Forbidden, Host};

/// The kind of a refusal, for programs. What to do differs from one to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// No rule of the policy names it.
    NoRule,
    /// A rule names it, with other ports.
    WrongPort,
    /// A rule names it, with other requests.
    RequestNotAllowed,
    /// The policy itself denies the range of its address.
    DeniedRange,
    /// Its address lies in a range this server keeps closed, and its operator can open.
    ClosedRange,
    /// Services of clouds. Nobody can open them.
    Metadata,
    /// The server's own machine. Nobody can open it.
    OwnAddress,
    /// Loopback, link-local and multicast addresses. Nobody can open them.
    NeverReached,
    /// Allowed, but the resolver of the server says that there is no such name.
    NoSuchName,
    /// Allowed, but the name has no address.
    NoAddress,
    /// Allowed, but the resolver of the server did not answer, or could not find out.
    DnsFailed,
    /// Its address alone is not allowed, and it does not say which host it is for.
    NoName,
    /// In a form that could hide what it asks for.
    UnsafeRequest,
    /// A limit of the policy or of the server is reached.
    Limit,
    /// To protect a credential.
    Credential,
    /// One side of a TLS connection does not trust the other.
    Untrusted,
    /// Allowed, but the sandbox dialled an address that was not open to it then.
    Stale,
}

impl Reason {
    pub const ALL: [Self; 17] = [
        Self::NoRule,
        Self::WrongPort,
        Self::RequestNotAllowed,
        Self::DeniedRange,
        Self::ClosedRange,
        Self::Metadata,
        Self::OwnAddress,
        Self::NeverReached,
        Self::NoSuchName,
        Self::NoAddress,
        Self::DnsFailed,
        Self::NoName,
        Self::UnsafeRequest,
        Self::Limit,
        Self::Credential,
        Self::Untrusted,
        Self::Stale,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::NoRule => "no_rule",
            Self::WrongPort => "wrong_port",
            Self::RequestNotAllowed => "request_not_allowed",
            Self::DeniedRange => "denied_range",
            Self::ClosedRange => "closed_range",
            Self::Metadata => "metadata",
            Self::OwnAddress => "own_address",
            Self::NeverReached => "never_reached",
            Self::NoSuchName => "no_such_name",
            Self::NoAddress => "no_address",
            Self::DnsFailed => "dns_failed",
            Self::NoName => "no_name",
            Self::UnsafeRequest => "unsafe_request",
            Self::Limit => "limit",
            Self::Credential => "credential",
            Self::Untrusted => "untrusted",
            Self::Stale => "stale",
        }
    }

    /// Whether the name is allowed and only its address could not be found out.
    pub const fn is_of_a_lookup(self) -> bool {
        matches!(self, Self::NoSuchName | Self::NoAddress | Self::DnsFailed)
    }

    /// Whether another rule in the policy of the sandbox can change the answer.
    pub const fn is_for_the_policy(self) -> bool {
        matches!(
            self,
            Self::NoRule
                | Self::WrongPort
                | Self::RequestNotAllowed
                | Self::DeniedRange
                | Self::NoName
        )
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A request that was refused, as far as a rule could name it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    pub method: String,
    /// Without the query.
    pub path: String,
}

/// A refusal, and the words for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub reason: Reason,
    pub why: String,
    pub hint: String,
    /// Where an address is the reason: the range it lies in.
    pub range: Option<IpNet>,
    /// Where the connection may be and this request in it may not.
    pub request: Option<Asked>,
}

impl Refusal {
    pub fn new(reason: Reason, why: impl Into<String>, hint: impl Into<String>) -> Self {
        Self {
            reason,
            why: why.into(),
            hint: hint.into(),
            range: None,
            request: None,
        }
    }

    /// Of a request in a form that could hide what it asks for.
    pub fn of_form(why: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(Reason::UnsafeRequest, why, hint)
    }

    /// Of an address, whatever the policy says. `None`: it may be dialled. `name`: what resolved
    /// to it.
    pub fn of_address(guard: &AddressGuard, address: IpAddr, name: Option<&Host>) -> Option<Self> {
        let kind = guard.refuses(address)?;
        let range = guard.range_of(address);
        let what = match range {
            Some(range) if range.prefix_len() < range.max_prefix_len() => {
                format!("{} ({range})", kind.words())
            }
            _ => kind.words().to_owned(),
        };
        let is_what = match name {
            Some(name) => format!("{name} resolves to {address}, {what}"),
            None => format!("{address} is {what}"),
        };
        Some(Self::of_kind(kind, range, &is_what, IpNet::from(address)))
    }

    /// Of a whole network. `None`: some address in it may be dialled.
    pub fn of_network(guard: &AddressGuard, net: IpNet) -> Option<Self> {
        if !guard.closed().covers(&net) {
            return None;
        }
        let kind = guard.refuses(net.network())?;
        let range = guard.range_of(net.network());
        let is_what = format!(
            "{net} holds nothing but what is closed, the first of it {}",
            kind.words()
        );
        Some(Self::of_kind(kind, range, &is_what, net))
    }

    fn of_kind(kind: Forbidden, range: Option<IpNet>, is_what: &str, opening: IpNet) -> Self {
        let reason = match kind {
            Forbidden::Private | Forbidden::Reserved => Reason::ClosedRange,
            Forbidden::Metadata => Reason::Metadata,
            Forbidden::Own => Reason::OwnAddress,
            Forbidden::Loopback | Forbidden::LinkLocal | Forbidden::Multicast => {
                Reason::NeverReached
            }
        };
        let (end, hint) = match reason {
            Reason::ClosedRange => (
                "which this server keeps closed",
                format!(
                    "no rule changes this: the operator of this server can add \"{opening}\", or a wider range, to its setting `allow_private`"
                ),
            ),
            Reason::OwnAddress => (
                "which no sandbox can reach",
                "no rule or setting opens it: run what sandboxes need on another machine, or in a sandbox"
                    .to_owned(),
            ),
            _ => (
                "which no sandbox can reach",
                "no rule or setting opens it".to_owned(),
            ),
        };
        Self {
            reason,
            why: format!("{is_what}, {end}"),
            hint,
            range,
            request: None,
        }
    }

    /// Of a name that is allowed and has no address to dial.
    pub fn of_lookup(name: &Host, failure: LookupFailure) -> Self {
        let (reason, why, hint) = match failure {
            LookupFailure::NoSuchName => (
                Reason::NoSuchName,
                "the server's DNS resolver says there is no such name",
                "check how the name is spelt, and that the resolver of the server (setting `dns`) knows it",
            ),
            LookupFailure::NoAddress => (
                Reason::NoAddress,
                "the server's DNS resolver knows no address of it",
                "check the name, and that the resolver of the server (setting `dns`) knows its addresses",
            ),
            LookupFailure::NoAnswer => (
                Reason::DnsFailed,
                "the DNS lookup failed: the server's resolver did not answer",
                "the operator of this server can check its resolver (setting `dns`); try again later",
            ),
        };
        Self::new(reason, format!("{name} is allowed, but {why}"), hint)
    }
}

/// How a lookup of an allowed name came to nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LookupFailure {
    NoSuchName,
    NoAddress,
    NoAnswer,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_the_wire() {
        for reason in Reason::ALL {
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.name());
        }
    }

    #[test]
    fn addresses_say_which_setting_opens_them_and_which_nothing_opens() {
        let guard = AddressGuard::default();
        let of = |text: &str, name: Option<&str>| {
            let name = name.map(|name| name.parse().unwrap());
            Refusal::of_address(&guard, text.parse().unwrap(), name.as_ref()).unwrap()
        };
        let private = of("172.20.0.3", Some("packages.example"));
        assert_eq!(private.reason, Reason::ClosedRange);
        assert_eq!(
            private.why,
            "packages.example resolves to 172.20.0.3, a private address (172.16.0.0/12), which this server keeps closed"
        );
        assert!(
            private.hint.contains("\"172.20.0.3/32\"") && private.hint.contains("`allow_private`")
        );
        assert_eq!(private.range, Some("172.16.0.0/12".parse().unwrap()));
        for (address, reason) in [
            ("169.254.169.254", Reason::Metadata),
            ("169.254.1.1", Reason::NeverReached),
            ("127.0.0.1", Reason::NeverReached),
            ("224.0.0.1", Reason::NeverReached),
        ] {
            let refusal = of(address, None);
            assert_eq!(refusal.reason, reason, "{address}");
            assert!(!refusal.hint.contains("allow_private"), "{address}");
        }
        assert_eq!(
            Refusal::of_address(&guard, "9.9.9.9".parse().unwrap(), None),
            None
        );
    }
}
