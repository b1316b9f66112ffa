//! E2B's `network` object, read with E2B's meaning.

use std::collections::BTreeMap;

use sandkeep_model::{Error, Result};
use serde::{Deserialize, Serialize};

use super::{MAX_RULES, Policy, Rule, Standing, To, document::parse_net};

/// The fields of `network` that speak of egress.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct E2bNetwork {
    pub allow_out: Option<Vec<String>>,
    pub deny_out: Option<Vec<String>>,
    pub rules: Option<BTreeMap<String, Vec<E2bRule>>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct E2bRule {
    pub transform: Option<E2bTransform>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct E2bTransform {
    pub headers: Option<BTreeMap<String, String>>,
}

const MAX_RULE_HOSTS: usize = 10;
const MAX_HEADERS: usize = 20;

impl Policy {
    /// `allow_internet_access: false` is a denial of everything; `allowOut` beats `denyOut`; names in
    /// `allowOut` need everything else denied. `None` when the request says nothing: the operator decides.
    pub fn from_e2b(
        network: Option<&E2bNetwork>,
        allow_internet_access: Option<bool>,
    ) -> Result<Option<Self>> {
        let allow = network
            .and_then(|n| n.allow_out.as_deref())
            .unwrap_or_default();
        let deny = network
            .and_then(|n| n.deny_out.as_deref())
            .unwrap_or_default();
        if let Some(network) = network {
            network.check_rules()?;
        }
        // A policy that can not be written down could not be read again after a restart.
        if allow.len() + deny.len() > MAX_RULES {
            return Err(Error::invalid(
                "network.allowOut",
                format!("allowOut and denyOut have at most {MAX_RULES} entries together"),
            ));
        }
        if allow_internet_access.is_none() && allow.is_empty() && deny.is_empty() {
            return Ok(None);
        }
        let mut policy = Self {
            standing: Standing::Open,
            ..Self::default()
        };
        for text in deny {
            let net = parse_net(text).map_err(|error| error.field("network.denyOut"))?;
            if net.prefix_len() == 0 {
                policy.standing = Standing::Deny;
            } else {
                policy.deny.push(net);
            }
        }
        if allow_internet_access == Some(false) {
            policy.standing = Standing::Deny;
        }
        for text in allow {
            let to: To = text
                .parse()
                .map_err(|error: Error| error.field("network.allowOut"))?;
            if to.needs_a_name() && policy.standing != Standing::Deny {
                return Err(Error::invalid(
                    "network.allowOut",
                    format!("\"{to}\": names in allowOut need denyOut to hold 0.0.0.0/0"),
                )
                .hint("add 0.0.0.0/0 (ALL_TRAFFIC) to denyOut"));
            }
            match to {
                To::Net(net) if net.prefix_len() == 0 => policy.standing = Standing::Open,
                to => policy.allow.push(Rule::to(to)),
            }
        }
        Ok(Some(policy))
    }
}

impl E2bNetwork {
    fn check_rules(&self) -> Result<()> {
        let Some(rules) = &self.rules else {
            return Ok(());
        };
        let bad = |message: String| Error::invalid("network.rules", message);
        if rules.len() > MAX_RULE_HOSTS {
            return Err(bad(format!("rules name at most {MAX_RULE_HOSTS} hosts")));
        }
        for (host, list) in rules {
            host.parse::<To>()
                .map_err(|error| error.field("network.rules"))?;
            if list.len() > 1 {
                return Err(bad(format!("{host}: one transform for each host")));
            }
            for headers in list
                .iter()
                .filter_map(|rule| rule.transform.as_ref()?.headers.as_ref())
            {
                if headers.len() > MAX_HEADERS {
                    return Err(bad(format!("{host}: at most {MAX_HEADERS} headers")));
                }
                for (name, value) in headers {
                    let good = !name.is_empty()
                        && name.len() <= 64
                        && name
                            .bytes()
                            .all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b));
                    if !good {
                        return Err(bad(format!(
                            "{host}: \"{}\" is no header name of at most 64 characters",
                            name.escape_debug()
                        )));
                    }
                    if value.len() > 2048 || value.chars().any(char::is_control) {
                        return Err(bad(format!(
                            "{host}: the value of {name} is longer than 2048 characters or holds control characters"
                        )));
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(allow: &[&str], deny: &[&str]) -> E2bNetwork {
        let list = |items: &[&str]| Some(items.iter().map(ToString::to_string).collect());
        E2bNetwork {
            allow_out: list(allow),
            deny_out: list(deny),
            rules: None,
        }
    }

    #[test]
    fn nothing_said_leaves_it_to_the_operator() {
        assert_eq!(Policy::from_e2b(None, None).unwrap(), None);
        assert_eq!(
            Policy::from_e2b(None, Some(true)).unwrap(),
            Some(Policy::open())
        );
        assert_eq!(
            Policy::from_e2b(None, Some(false)).unwrap(),
            Some(Policy::air_gapped())
        );
    }

    #[test]
    fn names_need_deny_all() {
        assert!(Policy::from_e2b(Some(&network(&["example.org"], &[])), None).is_err());
        let policy = Policy::from_e2b(
            Some(&network(&["example.org", "1.1.1.1"], &["0.0.0.0/0"])),
            None,
        )
        .unwrap()
        .unwrap();
        assert_eq!(policy.standing, Standing::Deny);
        assert_eq!(policy.allow.len(), 2);
    }

    #[test]
    fn more_entries_than_a_policy_may_have_are_refused() {
        let most = vec!["192.0.2.1"; MAX_RULES];
        let policy = Policy::from_e2b(Some(&network(&most, &[])), None)
            .unwrap()
            .unwrap();
        assert_eq!(Policy::from_json(&policy.to_json()).unwrap(), policy);
        assert!(Policy::from_e2b(Some(&network(&most, &["192.0.2.1"])), None).is_err());
    }

    #[test]
    fn names_can_not_be_denied() {
        let error = Policy::from_e2b(Some(&network(&[], &["evil.test"])), None).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("network.denyOut"));
    }

    #[test]
    fn deny_of_a_range_leaves_the_rest_open() {
        let policy = Policy::from_e2b(Some(&network(&[], &["8.8.8.0/24"])), None)
            .unwrap()
            .unwrap();
        assert_eq!(policy.standing, Standing::Open);
        assert_eq!(policy.deny.len(), 1);
    }
}
