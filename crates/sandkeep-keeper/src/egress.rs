//! What a box may reach, and what is added to its requests on the way.

use sandkeep_moat::policy::{Binding, Policy, Standing};
use sandkeep_model::{Error, Result, SecretName};
use serde_json::Value;

/// In the written form beside the policy.
const CREDENTIALS: &str = "credentials";

/// The network of one box as it holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Egress {
    pub policy: Policy,
    /// They never add to what the policy allows.
    pub credentials: Vec<Binding>,
}

/// What somebody asks for. At a create what is left out is the operator's word, later it
/// stays as it is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EgressWish {
    pub policy: Option<Policy>,
    pub credentials: Option<Vec<Binding>>,
}

impl From<Policy> for Egress {
    fn from(policy: Policy) -> Self {
        Self {
            policy,
            credentials: Vec::new(),
        }
    }
}

impl From<Option<Policy>> for EgressWish {
    fn from(policy: Option<Policy>) -> Self {
        Self {
            policy,
            credentials: None,
        }
    }
}

impl EgressWish {
    /// Whole again, with what `now` says where it says nothing.
    pub fn over(self, now: &Egress) -> Egress {
        Egress {
            policy: self.policy.unwrap_or_else(|| now.policy.clone()),
            credentials: self.credentials.unwrap_or_else(|| now.credentials.clone()),
        }
    }

    /// For telling one request from another.
    pub fn to_json(&self) -> Option<Value> {
        if *self == Self::default() {
            return None;
        }
        let policy = self.policy.as_ref().map(Policy::to_json);
        let credentials = self.credentials.as_ref().map(|list| written(list));
        Some(match credentials {
            // As it was written before there were credentials.
            None => policy.unwrap_or_default(),
            Some(credentials) => serde_json::json!([policy, credentials]),
        })
    }
}

fn written(credentials: &[Binding]) -> Value {
    credentials.iter().map(Binding::to_json).collect()
}

impl Egress {
    /// The policy document, with the credentials if there are any. It names secrets, it never
    /// holds one.
    pub fn to_json(&self) -> Value {
        let mut document = self.policy.to_json();
        if !self.credentials.is_empty() {
            document[CREDENTIALS] = written(&self.credentials);
        }
        document
    }

    pub fn from_json(document: &Value) -> Result<Self> {
        let mut document = document.clone();
        let credentials = document
            .as_object_mut()
            .and_then(|object| object.remove(CREDENTIALS));
        let credentials = match credentials {
            None => Vec::new(),
            Some(Value::Array(list)) => Binding::list_from_json(&list)?,
            Some(_) => {
                return Err(Error::invalid(
                    "network.credentials",
                    "credentials are a list",
                ));
            }
        };
        Ok(Self {
            policy: Policy::from_json(&document)?,
            credentials,
        })
    }

    pub(crate) fn reaches_nothing(&self) -> bool {
        self.policy.standing == Standing::Deny && self.policy.allow.is_empty()
    }

    /// Whether any of its connections is looked into, for which the box must trust us.
    pub(crate) fn is_looked_into(&self) -> bool {
        !self.credentials.is_empty() || self.policy.allow.iter().any(|rule| !rule.http.is_empty())
    }
}

/// A box that a secret goes out for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundTo {
    pub sandbox_id: sandkeep_model::SandboxId,
    pub secret: SecretName,
    pub host: String,
    pub port: u16,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn binding() -> Binding {
        Binding::from_json(&json!({"secret": "github", "host": "api.test"})).unwrap()
    }

    #[test]
    fn what_is_written_is_read_again() {
        let bare = Egress::from(Policy::open());
        assert_eq!(bare.to_json(), Policy::open().to_json());
        let full = Egress {
            credentials: vec![binding()],
            ..bare
        };
        assert_eq!(Egress::from_json(&full.to_json()).unwrap(), full);
        assert!(Egress::from_json(&json!({"credentials": {}})).is_err());
    }

    #[test]
    fn what_is_left_out_stays() {
        let now = Egress {
            policy: Policy::open(),
            credentials: vec![binding()],
        };
        let closed = EgressWish::from(Some(Policy::air_gapped())).over(&now);
        assert_eq!(closed.credentials, now.credentials);
        assert!(closed.reaches_nothing() && closed.is_looked_into());
        let bare = EgressWish {
            credentials: Some(Vec::new()),
            policy: None,
        };
        assert_eq!(bare.over(&now), Egress::from(Policy::open()));
        assert_eq!(EgressWish::default().over(&now), now);
    }
}
