//! One rule: where to, on which ports, and for HTTP which requests.

use std::{fmt, net::IpAddr, str::FromStr};

use ipnet::IpNet;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use sandkeep_model::{Error, Result};
use serde::{Deserialize, Serialize};

use super::{Host, PlainPath};

/// What a rule points at.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum To {
    Host(Host),
    /// `*.domain`: everything below it, not the domain itself.
    Below(String),
    Net(IpNet),
}

impl To {
    pub fn matches(&self, host: &Host) -> bool {
        match self {
            Self::Host(own) => own == host,
            Self::Below(domain) => host.is_below(domain),
            Self::Net(net) => matches!(host, Host::Address(address) if net.contains(address)),
        }
    }

    /// Whether this rule can only be decided by name, so that an address proves nothing.
    pub const fn needs_a_name(&self) -> bool {
        matches!(self, Self::Host(Host::Name(_)) | Self::Below(_))
    }
}

impl FromStr for To {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some(domain) = text.strip_prefix("*.") {
            return match domain.parse::<Host>() {
                // `*.org` would open half the internet by a slip of the pen.
                Ok(Host::Name(name)) if name.contains('.') => Ok(Self::Below(name)),
                Ok(Host::Name(name)) => Err(Error::invalid(
                    "to",
                    format!("\"*.{name}\" names a whole top-level domain"),
                )
                .hint("name the domains one by one, or use the profile `open`")),
                Ok(Host::Address(_)) => Err(Error::invalid(
                    "to",
                    format!(
                        "\"{}\": a wildcard stands before a name, not an address",
                        text.escape_debug()
                    ),
                )),
                Err(error) => Err(Error::invalid("to", error.to_string())),
            };
        }
        if text.contains('/') {
            return text
                .parse::<IpNet>()
                .map(|net| Self::Net(net.trunc()))
                .map_err(|_| {
                    Error::invalid(
                        "to",
                        format!(
                            "\"{}\" is no network like 192.0.2.0/24",
                            text.escape_debug()
                        ),
                    )
                });
        }
        let plain = text
            .strip_prefix('[')
            .and_then(|t| t.strip_suffix(']'))
            .unwrap_or(text);
        plain
            .parse()
            .map(Self::Host)
            .map_err(|error: super::HostError| {
                Error::invalid("to", error.to_string())
                    .hint("write a name, *.name, an address or a network like 192.0.2.0/24")
            })
    }
}

impl fmt::Display for To {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(host) => host.fmt(f),
            Self::Below(domain) => write!(f, "*.{domain}"),
            Self::Net(net) => net.fmt(f),
        }
    }
}

/// Ports a rule opens; empty means every port.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct Ports(Vec<(u16, u16)>);

impl Ports {
    pub fn any() -> Self {
        Self::default()
    }

    pub fn one(port: u16) -> Self {
        Self(vec![(port, port)])
    }

    /// From each first port to its last.
    pub fn ranges(&self) -> &[(u16, u16)] {
        const ALL: &[(u16, u16)] = &[(0, u16::MAX)];
        if self.0.is_empty() { ALL } else { &self.0 }
    }

    pub fn contains(&self, port: u16) -> bool {
        self.0.is_empty()
            || self
                .0
                .iter()
                .any(|(low, high)| (*low..=*high).contains(&port))
    }

    pub fn parse(items: &[serde_json::Value]) -> Result<Self> {
        let bad = |shown: &dyn fmt::Display| {
            Error::invalid("ports", format!("{shown} is no port or range"))
                .hint("write 443 or \"8000-8100\"")
        };
        let mut ranges = Vec::new();
        for item in items {
            let range = match item {
                serde_json::Value::Number(number) => {
                    let port = number
                        .as_u64()
                        .and_then(|n| u16::try_from(n).ok())
                        .ok_or_else(|| bad(number))?;
                    (port, port)
                }
                serde_json::Value::String(text) => {
                    let (low, high) = text.split_once('-').unwrap_or((text, text));
                    (
                        low.trim().parse().map_err(|_| bad(text))?,
                        high.trim().parse().map_err(|_| bad(text))?,
                    )
                }
                other => return Err(bad(other)),
            };
            if range.0 == 0 || range.0 > range.1 {
                return Err(bad(item));
            }
            ranges.push(range);
        }
        Ok(Self(ranges))
    }

    pub fn to_json(&self) -> Vec<serde_json::Value> {
        self.0
            .iter()
            .map(|(low, high)| {
                if low == high {
                    (*low).into()
                } else {
                    format!("{low}-{high}").into()
                }
            })
            .collect()
    }
}

/// What patterns may hold and paths may not; all that is no ASCII goes with it.
const UNWRITTEN: &AsciiSet = &CONTROLS.add(b' ');

/// A path with `*` for any characters, `/` included; matched against the path as servers read it,
/// which is decoded.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PathPattern(String);

impl PathPattern {
    pub fn new(text: &str) -> Result<Self> {
        if text.starts_with('/') && text.len() <= 2048 && !text.chars().any(char::is_control) {
            return Ok(Self(text.to_owned()));
        }
        Err(Error::invalid(
            "path",
            "a path starts with / and has at most 2048 characters",
        ))
    }

    /// Whether it takes every path, also one that can be read in two ways.
    pub fn is_any(&self) -> bool {
        self.0 == "/*" || self.0 == "*"
    }

    /// `path` without its query. A path that can be read in two ways matches nothing but a pattern
    /// for everything.
    pub fn matches(&self, path: &str) -> bool {
        if self.is_any() {
            return true;
        }
        // Patterns may be written encoded, like the paths they are for, or not.
        let pattern = utf8_percent_encode(&self.0, UNWRITTEN).to_string();
        let (Ok(path), Ok(pattern)) = (PlainPath::read(path), PlainPath::read(&pattern)) else {
            return false;
        };
        let (pattern, _) = pattern.readings();
        let (whole, bare) = path.readings();
        glob(pattern.as_bytes(), whole.as_bytes()) && glob(pattern.as_bytes(), bare.as_bytes())
    }
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `*` matches any run of bytes. Linear in both lengths for one star, bounded by their product.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        if p < pattern.len() && pattern[p] == b'*' {
            star = Some((p, t));
            p += 1;
        } else if p < pattern.len() && pattern[p] == text[t] {
            p += 1;
            t += 1;
        } else if let Some((at, from)) = star {
            p = at + 1;
            t = from + 1;
            star = Some((at, from + 1));
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|b| *b == b'*')
}

/// Which HTTP requests a rule lets through. Seeing them inside TLS needs interception.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpRule {
    /// Upper case; empty means every method.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<String>,
    pub path: PathPattern,
}

impl HttpRule {
    pub fn matches(&self, method: &str, path: &str) -> bool {
        (self.methods.is_empty() || self.methods.iter().any(|own| own == method))
            && self.path.matches(path)
    }
}

/// One thing a box may reach.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rule {
    pub to: To,
    pub ports: Ports,
    /// Empty: any traffic. Else only these requests, and nothing that is not HTTP.
    pub http: Vec<HttpRule>,
}

impl Rule {
    pub fn to(to: To) -> Self {
        Self {
            to,
            ports: Ports::any(),
            http: Vec::new(),
        }
    }

    /// `example.org`, `*.example.org:443`, `192.0.2.0/24:22`.
    pub fn parse_short(text: &str) -> Result<Self> {
        let (to, ports) = match text.rsplit_once(':') {
            Some((to, port))
                if !port.is_empty()
                    && port.bytes().all(|b| b.is_ascii_digit())
                    && !is_bare_v6(text) =>
            {
                (
                    to,
                    Ports::parse(&[serde_json::Value::String(port.to_owned())])?,
                )
            }
            _ => (text, Ports::any()),
        };
        Ok(Self {
            to: to.parse()?,
            ports,
            http: Vec::new(),
        })
    }

    pub fn matches(&self, host: &Host, port: u16) -> bool {
        self.to.matches(host) && self.ports.contains(port)
    }

    /// How the rule is named in refusals, audits and explanations.
    pub fn name(&self) -> String {
        let ports = self.ports.to_json();
        if ports.is_empty() {
            return self.to.to_string();
        }
        let list: Vec<String> = ports
            .iter()
            .map(|p| p.as_str().map_or_else(|| p.to_string(), str::to_owned))
            .collect();
        format!("{} port {}", self.to, list.join(","))
    }
}

fn is_bare_v6(text: &str) -> bool {
    let address = text.split('/').next().unwrap_or(text);
    address.parse::<IpAddr>().is_ok_and(|a| a.is_ipv6())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_forms() {
        let rule = Rule::parse_short("*.Example.org:443").unwrap();
        assert!(rule.matches(&"a.example.org".parse().unwrap(), 443));
        assert!(!rule.matches(&"a.example.org".parse().unwrap(), 80));
        assert!(!rule.matches(&"example.org".parse().unwrap(), 443));
        assert!(
            Rule::parse_short("2001:db8::/32")
                .unwrap()
                .matches(&"2001:db8::5".parse().unwrap(), 1)
        );
        assert!(
            Rule::parse_short("192.0.2.0/24:22")
                .unwrap()
                .matches(&"192.0.2.9".parse().unwrap(), 22)
        );
        for bad in ["*.org", "*.*", "*", "a/b", "*.192.0.2.1", "a b", ""] {
            assert!(Rule::parse_short(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn path_tricks_match_nothing() {
        let pattern = PathPattern::new("/repos/me/*").unwrap();
        assert!(pattern.matches("/repos/me/x"));
        for trick in [
            "/repos/me/../you",
            "/repos/me/%2e%2e/you",
            "/repos/me/..;/you",
            "/repos/me//x",
            "/repos/me/%2fx",
            "/repos/me/\\x",
            "/repos/me/..%3b/you",
            "/repos/me/%c0%ae%c0%ae/you",
            "/repos/me/%u002e%u002e/you",
            "/repos/you/x",
        ] {
            assert!(!pattern.matches(trick), "{trick}");
        }
    }

    #[test]
    fn patterns_and_paths_may_be_encoded() {
        let pattern = PathPattern::new("/a%20b/\u{e9}/*").unwrap();
        assert!(pattern.matches("/a%20b/%C3%A9/x"));
        assert!(pattern.matches("/a%20b/%c3%a9/x"));
        let pattern = PathPattern::new("/public*").unwrap();
        assert!(pattern.matches("/public/x;v=1"));
        // To some servers it is /open/private.
        assert!(
            !PathPattern::new("/open;*")
                .unwrap()
                .matches("/open;/private")
        );
    }

    #[test]
    fn a_pattern_with_many_stars_is_quick() {
        let pattern = PathPattern::new(&format!("/{}b", "*a".repeat(100))).unwrap();
        assert!(!pattern.matches(&format!("/{}", "a".repeat(5000))));
    }
}
