//! The policy of a box as a whole, and how it is written down.

use ipnet::IpNet;
use sandkeep_model::{Error, Isolation, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{HttpRule, PathPattern, Ports, Rule};

/// More rules than this are refused: a policy is for people to read.
pub const MAX_RULES: usize = 512;

/// What happens to a destination no rule names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Standing {
    #[default]
    Deny,
    /// Everything public; forbidden ranges stay forbidden.
    Open,
}

/// Bounds on what a box sends out, all optional.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EgressLimits {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// Both directions together, over the life of the policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub new_connections_per_second: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concurrent_connections: Option<u32>,
}

/// What a box may reach. The default reaches nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Policy {
    pub standing: Standing,
    pub allow: Vec<Rule>,
    /// Taken out of `open`; a rule in `allow` beats it.
    pub deny: Vec<IpNet>,
    pub limits: EgressLimits,
    /// A sandbox that is isolated less does not get this policy.
    pub isolation_minimum: Option<Isolation>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default)]
    default: Standing,
    #[serde(default)]
    allow: Vec<RuleDocument>,
    #[serde(default)]
    deny: Vec<String>,
    #[serde(default)]
    limits: EgressLimits,
    #[serde(default)]
    isolation_minimum: Option<Isolation>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RuleDocument {
    Short(String),
    Long(LongRule),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LongRule {
    to: String,
    #[serde(default)]
    ports: Vec<Value>,
    #[serde(default)]
    http: Vec<HttpDocument>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpDocument {
    #[serde(default)]
    methods: Vec<String>,
    path: String,
}

/// Derived code would take a list by position for an object.
fn no_lists_for_objects(value: &Value) -> Result<()> {
    let rules = || value["allow"].as_array().into_iter().flatten();
    let http = || rules().filter_map(|rule| rule["http"].as_array()).flatten();
    let place = if value.is_array() {
        "network"
    } else if value["limits"].is_array() {
        "network.limits"
    } else if rules().any(Value::is_array) || http().any(Value::is_array) {
        "network.allow"
    } else {
        return Ok(());
    };
    Err(Error::invalid(
        place,
        format!("{place} has a list where an object belongs"),
    ))
}

impl Policy {
    pub fn air_gapped() -> Self {
        Self::default()
    }

    pub fn open() -> Self {
        Self {
            standing: Standing::Open,
            ..Self::default()
        }
    }

    /// Only these, on every port.
    pub fn allowing<'a>(to: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        let allow = to
            .into_iter()
            .map(Rule::parse_short)
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            allow,
            ..Self::default()
        })
    }

    /// Reads the written form; the error names the place.
    pub fn from_json(value: &Value) -> Result<Self> {
        no_lists_for_objects(value)?;
        let document: Document = serde_json::from_value(value.clone()).map_err(|error| {
            Error::invalid("network", format!("the policy can not be read: {error}"))
                .hint("it looks like {\"default\": \"deny\", \"allow\": [\"example.org\", {\"to\": \"*.example.org\", \"ports\": [443]}]}")
        })?;
        if document.allow.len() + document.deny.len() > MAX_RULES {
            return Err(Error::invalid(
                "network.allow",
                format!("a policy has at most {MAX_RULES} rules"),
            ));
        }
        let mut policy = Self {
            standing: document.default,
            limits: document.limits,
            isolation_minimum: document.isolation_minimum,
            ..Self::default()
        };
        for (at, rule) in document.allow.into_iter().enumerate() {
            let rule = parse_rule(rule).map_err(|error| {
                let inner = error.field.clone().unwrap_or_default();
                error.field(format!("network.allow[{at}].{inner}"))
            })?;
            policy.allow.push(rule);
        }
        for (at, text) in document.deny.iter().enumerate() {
            policy
                .deny
                .push(parse_net(text).map_err(|error| error.field(format!("network.deny[{at}]")))?);
        }
        Ok(policy)
    }

    pub fn to_json(&self) -> Value {
        let allow: Vec<Value> = self
            .allow
            .iter()
            .map(|rule| {
                let mut object = serde_json::Map::from_iter([(
                    "to".to_owned(),
                    Value::String(rule.to.to_string()),
                )]);
                let ports = rule.ports.to_json();
                if !ports.is_empty() {
                    object.insert("ports".to_owned(), Value::Array(ports));
                }
                if !rule.http.is_empty() {
                    object.insert("http".to_owned(), serde_json::json!(rule.http));
                }
                Value::Object(object)
            })
            .collect();
        let deny: Vec<String> = self.deny.iter().map(ToString::to_string).collect();
        let mut written = serde_json::json!({ "default": self.standing, "allow": allow, "deny": deny, "limits": self.limits });
        if let Some(level) = self.isolation_minimum {
            written["isolation_minimum"] = level.name().into();
        }
        written
    }

    /// Hosts whose requests must be seen one by one, which inside TLS takes interception.
    pub fn needs_interception(&self, host: &super::Host, port: u16) -> bool {
        let mut matching = self
            .allow
            .iter()
            .filter(|rule| rule.matches(host, port))
            .peekable();
        matching.peek().is_some() && matching.all(|rule| !rule.http.is_empty())
    }
}

/// A network, or one address as a network of one.
pub(super) fn parse_net(text: &str) -> Result<IpNet> {
    text.parse::<IpNet>()
        .map(|net| net.trunc())
        .or_else(|_| text.parse::<std::net::IpAddr>().map(IpNet::from))
        .map_err(|_| {
            Error::invalid(
                "deny",
                format!("\"{}\" is no address or network", text.escape_debug()),
            )
            .hint("names can not be denied one by one: deny is the default, allow what is needed")
        })
}

fn parse_rule(document: RuleDocument) -> Result<Rule> {
    let long = match document {
        RuleDocument::Short(text) => return Rule::parse_short(&text),
        RuleDocument::Long(long) => long,
    };
    let mut rule = Rule {
        to: long.to.parse()?,
        ports: Ports::parse(&long.ports)?,
        http: Vec::new(),
    };
    for http in long.http {
        for method in &http.methods {
            if method.is_empty()
                || method.len() > 32
                || !method.bytes().all(|b| b.is_ascii_alphabetic() || b == b'-')
            {
                return Err(Error::invalid(
                    "http.methods",
                    format!("\"{}\" is no HTTP method", method.escape_debug()),
                ));
            }
        }
        rule.http.push(HttpRule {
            methods: http
                .methods
                .iter()
                .map(|m| m.to_ascii_uppercase())
                .collect(),
            path: PathPattern::new(&http.path)?,
        });
    }
    if !rule.http.is_empty() && !rule.to.needs_a_name() {
        return Err(Error::invalid(
            "http",
            "HTTP rules need a name: requests are told apart by their host",
        )
        .hint("give the rule a host name"));
    }
    Ok(rule)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn written_and_read_back() {
        let value = json!({
            "default": "deny",
            "allow": ["example.org:443", {"to": "*.example.net", "ports": [443, "8000-8100"], "http": [{"methods": ["get"], "path": "/v1/*"}]}],
            "deny": ["192.0.2.0/24"],
            "limits": {"total_bytes": 1000}
        });
        let policy = Policy::from_json(&value).unwrap();
        assert_eq!(Policy::from_json(&policy.to_json()).unwrap(), policy);
        assert_eq!(policy.allow[1].http[0].methods, ["GET"]);
    }

    #[test]
    fn mistakes_name_the_place() {
        for (value, place) in [
            (
                json!({"allow": ["ok.test", "*.com"]}),
                "network.allow[1].to",
            ),
            (
                json!({"allow": [{"to": "a.test", "ports": [0]}]}),
                "network.allow[0].ports",
            ),
            (json!({"deny": ["evil.test"]}), "network.deny[0]"),
            (json!({"alow": []}), "network"),
            (
                json!({"allow": [{"to": "192.0.2.1", "http": [{"path": "/"}]}]}),
                "network.allow[0].http",
            ),
        ] {
            let error = Policy::from_json(&value).unwrap_err();
            assert_eq!(error.field.as_deref(), Some(place), "{value} {error}");
        }
    }
}
