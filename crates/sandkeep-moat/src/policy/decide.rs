//! The one place that says yes or no.

use std::net::IpAddr;

use sandkeep_model::{Error, Result};
use serde::Serialize;

use super::{AddressGuard, Asked, Host, PlainPath, Policy, Reason, Refusal, Rule, Standing, To};

/// A request inside a connection, when it can be seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HttpTarget<'a> {
    pub method: &'a str,
    /// Without the query.
    pub path: &'a str,
}

/// Where something in a box wants to go.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    pub host: &'a Host,
    pub port: u16,
    /// `None`: not HTTP, or not visible.
    pub http: Option<HttpTarget<'a>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// By this rule; `open` when the standing lets it through.
    Allow {
        rule: String,
    },
    Deny(Refusal),
}

impl Decision {
    pub const fn is_allowed(&self) -> bool {
        matches!(self, Self::Allow { .. })
    }

    pub fn refusal(self) -> Option<Refusal> {
        match self {
            Self::Allow { .. } => None,
            Self::Deny(refusal) => Some(refusal),
        }
    }
}

impl Policy {
    /// Whether a connection to this host and port may be made at all. With HTTP rules the
    /// requests inside it are decided again, one by one.
    pub fn decide(&self, target: &Target<'_>, guard: &AddressGuard) -> Decision {
        if let Host::Address(address) = target.host
            && let Some(refusal) = Refusal::of_address(guard, *address, None)
        {
            return Decision::Deny(refusal);
        }
        let mut near = None;
        let mut narrowed = None;
        for rule in &self.allow {
            if !rule.to.matches(target.host) {
                continue;
            }
            if !rule.ports.contains(target.port) {
                near = Some((
                    Reason::WrongPort,
                    format!(
                        "{} is allowed, but not on port {}",
                        target.host, target.port
                    ),
                ));
                continue;
            }
            match target.http {
                _ if rule.http.is_empty() => return Decision::Allow { rule: rule.name() },
                None => return Decision::Allow { rule: rule.name() },
                Some(http)
                    if rule
                        .http
                        .iter()
                        .any(|own| own.matches(http.method, http.path)) =>
                {
                    return Decision::Allow { rule: rule.name() };
                }
                Some(http) => {
                    let host = target.host;
                    narrowed = Some(http);
                    let words = match PlainPath::read(http.path) {
                        Err(why) if rule.http.iter().any(|own| !own.path.is_any()) => format!(
                            "only some paths of {host} are allowed, and {} can be read in two ways: {why}",
                            http.path
                        ),
                        _ => format!(
                            "{} {} is not among the requests allowed to {host}",
                            http.method, http.path
                        ),
                    };
                    near = Some((Reason::RequestNotAllowed, words));
                }
            }
        }
        if self.standing == Standing::Open && near.is_none() {
            let denied = matches!(target.host, Host::Address(address) if self.denies(*address));
            if !denied {
                return Decision::Allow {
                    rule: "open".to_owned(),
                };
            }
            let why = format!("{} is in a range this policy denies", target.host);
            near = Some((Reason::DeniedRange, why));
        }
        let (reason, why) = near.unwrap_or_else(|| {
            let why = format!("{} is not in the policy of this sandbox", target.host);
            (Reason::NoRule, why)
        });
        let narrowed = narrowed.filter(|_| reason == Reason::RequestNotAllowed);
        let hint = match narrowed {
            Some(http) => hint_for_request(target, http),
            None => hint_for(target),
        };
        Decision::Deny(Refusal {
            request: narrowed.map(|http| Asked {
                method: http.method.to_owned(),
                path: http.path.to_owned(),
            }),
            ..Refusal::new(reason, why, hint)
        })
    }

    /// Whether an address a name resolved to may be dialled for that name.
    pub fn allows_resolved(
        &self,
        host: &Host,
        port: u16,
        address: IpAddr,
        guard: &AddressGuard,
    ) -> Decision {
        if let Some(refusal) = Refusal::of_address(guard, address, Some(host)) {
            return Decision::Deny(refusal);
        }
        let by_rule = self.allow.iter().find(|rule| rule.matches(host, port));
        match by_rule {
            Some(rule) => Decision::Allow { rule: rule.name() },
            None if self.standing == Standing::Open && !self.denies(address) => Decision::Allow {
                rule: "open".to_owned(),
            },
            None => Decision::Deny(Refusal::new(
                Reason::DeniedRange,
                format!("{host} resolves to {address}, which this policy denies"),
                hint_for(&Target {
                    host,
                    port,
                    http: None,
                }),
            )),
        }
    }

    /// Whether a name may be looked up: only when some connection to it could be allowed.
    pub fn allows_lookup(&self, name: &Host) -> bool {
        self.standing == Standing::Open
            || self
                .allow
                .iter()
                .any(|rule| rule.to.needs_a_name() && rule.to.matches(name))
    }

    /// The rules that can let nothing through, because every address they name is closed here.
    pub fn dead_rules(&self, guard: &AddressGuard) -> Vec<(String, Refusal)> {
        let refused = |rule: &Rule| match &rule.to {
            To::Host(Host::Address(address)) => Refusal::of_address(guard, *address, None),
            To::Net(net) => Refusal::of_network(guard, *net),
            To::Host(Host::Name(_)) | To::Below(_) => None,
        };
        self.allow
            .iter()
            .filter_map(|rule| Some((rule.name(), refused(rule)?)))
            .collect()
    }

    /// Whether some rule names this host, on whatever port.
    pub fn names(&self, host: &Host) -> bool {
        self.allow.iter().any(|rule| rule.to.matches(host))
    }

    fn denies(&self, address: IpAddr) -> bool {
        self.deny.iter().any(|net| net.contains(&address))
    }
}

fn hint_for(target: &Target<'_>) -> String {
    format!(
        "if the task needs it, ask for \"{}:{}\" to be added to the policy of this sandbox; `sandkeep policy suggest SANDBOX` proposes it",
        target.host, target.port
    )
}

/// The host is in the policy already; only requests to it may be missing.
fn hint_for_request(target: &Target<'_>, http: HttpTarget<'_>) -> String {
    format!(
        "if the task needs it, ask for {} {} to be added to the `http` list of {} in the policy of this sandbox; `sandkeep policy suggest SANDBOX` proposes it",
        http.method, http.path, target.host
    )
}

/// The answer to "would this URL pass, and by which rule?".
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explanation {
    pub allowed: bool,
    pub host: Host,
    pub port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// Decides on a URL (`https://host/path`) or a plain `host:port`.
pub fn explain(
    policy: &Policy,
    guard: &AddressGuard,
    method: &str,
    url: &str,
) -> Result<Explanation> {
    let invalid = |message: String| {
        Error::invalid("url", message).hint("write https://host/path or host:port")
    };
    let (scheme, rest) = url
        .split_once("://")
        .map_or((None, url), |(scheme, rest)| (Some(scheme), rest));
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, tail) = rest.split_at(end);
    let (host, port) =
        Host::parse_authority(authority).map_err(|error| invalid(error.to_string()))?;
    let default = match scheme {
        Some("http" | "ws") => Some(80),
        Some("https" | "wss") => Some(443),
        Some("ssh") => Some(22),
        Some("git") => Some(9418),
        Some(other) => {
            return Err(invalid(format!(
                "the scheme \"{}\" is not known",
                other.escape_debug()
            )));
        }
        None => None,
    };
    let port = port
        .or(default)
        .ok_or_else(|| invalid("no port and no scheme that has one".to_owned()))?;
    let path = tail.split(['?', '#']).next().unwrap_or("");
    let path = if path.is_empty() { "/" } else { path };
    let http = matches!(scheme, Some("http" | "https" | "ws" | "wss"))
        .then_some(HttpTarget { method, path });
    let target = Target {
        host: &host,
        port,
        http,
    };
    let decision = policy.decide(&target, guard);
    Ok(Explanation::of(decision, host, port))
}

impl Explanation {
    fn of(decision: Decision, host: Host, port: u16) -> Self {
        let (rule, refusal) = match decision {
            Decision::Allow { rule } => (Some(rule), None),
            Decision::Deny(refusal) => (None, Some(refusal)),
        };
        let mut found = Self {
            allowed: refusal.is_none(),
            host,
            port,
            rule,
            reason: None,
            why: None,
            hint: None,
        };
        if let Some(refusal) = refusal {
            found.say(refusal);
        }
        found
    }

    /// The rules let it through, and what its name resolves to does not. A lookup that failed is
    /// no refusal, and said all the same.
    pub(crate) fn but(&mut self, refusal: Refusal) {
        self.allowed = refusal.reason.is_of_a_lookup();
        self.say(refusal);
    }

    fn say(&mut self, refusal: Refusal) {
        self.reason = Some(refusal.reason);
        self.why = Some(refusal.why);
        self.hint = Some(refusal.hint);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn policy(value: &serde_json::Value) -> Policy {
        Policy::from_json(value).unwrap()
    }

    fn allowed(policy: &Policy, method: &str, url: &str) -> bool {
        explain(policy, &AddressGuard::default(), method, url)
            .unwrap()
            .allowed
    }

    #[test]
    fn the_default_reaches_nothing() {
        let none = Policy::default();
        for url in ["https://example.org", "http://1.1.1.1", "a.test:22"] {
            let answer = explain(&none, &AddressGuard::default(), "GET", url).unwrap();
            assert!(!answer.allowed && answer.hint.is_some(), "{url}");
        }
    }

    #[test]
    fn names_ports_and_requests() {
        let p = policy(
            &json!({"allow": ["a.test:443", "*.b.test", {"to": "c.test", "http": [{"methods": ["GET"], "path": "/v1/*"}]}]}),
        );
        assert!(allowed(&p, "GET", "https://a.test/x"));
        assert!(!allowed(&p, "GET", "http://a.test/x"));
        assert!(allowed(&p, "POST", "https://x.b.test/"));
        assert!(!allowed(&p, "GET", "https://b.test/"));
        assert!(allowed(&p, "GET", "https://c.test/v1/x?y=1"));
        assert!(!allowed(&p, "DELETE", "https://c.test/v1/x"));
        assert!(!allowed(&p, "GET", "https://c.test/v1/../admin"));
        assert!(p.needs_interception(&"c.test".parse().unwrap(), 443));
        assert!(!p.needs_interception(&"a.test".parse().unwrap(), 443));
    }

    #[test]
    fn open_still_refuses_inner_addresses() {
        let open = Policy::open();
        assert!(allowed(&open, "GET", "https://example.org"));
        for url in [
            "http://127.0.0.1",
            "http://169.254.169.254/latest",
            "http://10.0.0.1",
            "http://[::1]/",
            "http://[fd00:ec2::254]/",
        ] {
            assert!(!allowed(&open, "GET", url), "{url}");
        }
        assert!(
            !open
                .allows_resolved(
                    &"evil.test".parse().unwrap(),
                    80,
                    "192.168.0.1".parse().unwrap(),
                    &AddressGuard::default()
                )
                .is_allowed()
        );
    }

    #[test]
    fn allow_beats_deny() {
        let p = policy(&json!({"default": "open", "deny": ["1.1.1.0/24"], "allow": ["1.1.1.1"]}));
        assert!(allowed(&p, "GET", "http://1.1.1.1"));
        assert!(!allowed(&p, "GET", "http://1.1.1.2"));
        assert!(allowed(&p, "GET", "http://2.2.2.2"));
    }

    #[test]
    fn denied_names_are_not_even_looked_up() {
        let p = policy(&json!({"allow": ["a.test", "192.0.2.0/24"]}));
        assert!(p.allows_lookup(&"a.test".parse().unwrap()));
        assert!(!p.allows_lookup(&"data.evil.test".parse().unwrap()));
    }
}
