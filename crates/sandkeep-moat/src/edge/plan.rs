//! What the kernel can know of a policy: which connections can be allowed at all.
//!
//! It decides on addresses and ports alone. What may be allowed goes to our listener, where the
//! whole policy decides; the rest is refused with the first packet.

use ipnet::IpNet;

use crate::policy::{AddressGuard, Addresses, Host, Policy, Standing, To};

/// Ports from the first of each pair to the last.
type Ranges = Vec<(u16, u16)>;

/// A number has so many bits, and each kind of name rule (by its ports) has one.
const KINDS: usize = 32;

/// Which kinds of rules an address was given for, a bit each.
pub type Kinds = u32;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Everything but `closed` and `denied` may be tried.
    pub open: bool,
    /// Never, whatever else is said.
    pub closed: Addresses,
    /// Not by an address alone.
    pub denied: Addresses,
    pub nets: Vec<(IpNet, (u16, u16))>,
    /// The ports of each kind.
    pub kinds: Vec<Ranges>,
    names: Vec<(To, Kinds)>,
}

impl Plan {
    pub fn of(policy: &Policy, guard: &AddressGuard) -> Self {
        let open = policy.standing == Standing::Open;
        let mut plan = Self {
            open,
            ..Self::default()
        };
        // Where everything may be tried anyway, names add nothing.
        let names_count = !open || !policy.deny.is_empty();
        for rule in &policy.allow {
            let ports = rule.ports.ranges();
            let net = match &rule.to {
                To::Net(net) => *net,
                To::Host(Host::Address(address)) => IpNet::from(*address),
                To::Host(Host::Name(_)) | To::Below(_) => {
                    if names_count {
                        let kind = plan.kind(ports);
                        plan.names.push((rule.to.clone(), kind));
                    }
                    continue;
                }
            };
            plan.nets.extend(ports.iter().map(|range| (net, *range)));
        }
        if open {
            plan.denied = Addresses::of(&policy.deny);
        }
        // Our resolver gives out no address that is closed, so names alone need no second look.
        if open || !plan.nets.is_empty() {
            plan.closed = guard.closed();
        }
        plan
    }

    fn kind(&mut self, ports: &[(u16, u16)]) -> Kinds {
        let known = self.kinds.iter().position(|kind| kind == ports);
        let at = known.unwrap_or_else(|| {
            if self.kinds.len() < KINDS {
                self.kinds.push(ports.to_vec());
            } else {
                // The last one stands for all the others. What it lets through too much is
                // refused after the handshake.
                self.kinds[KINDS - 1].extend_from_slice(ports);
            }
            self.kinds.len() - 1
        });
        1 << at
    }

    /// What it means that a sandbox was given an address for this name.
    pub fn kinds_of(&self, name: &Host) -> Kinds {
        self.names
            .iter()
            .filter(|(to, _)| to.matches(name))
            .fold(0, |all, (_, kind)| all | kind)
    }

    /// Whether addresses given for names matter at all.
    pub fn has_names(&self) -> bool {
        !self.names.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn plan(policy: &serde_json::Value) -> Plan {
        Plan::of(
            &Policy::from_json(policy).unwrap(),
            &AddressGuard::default(),
        )
    }

    fn kinds(plan: &Plan, name: &str) -> Kinds {
        plan.kinds_of(&name.parse().unwrap())
    }

    #[test]
    fn names_of_the_same_ports_are_of_a_kind() {
        let plan = plan(&json!({"allow": [
            "a.test:443", "b.test:443", "*.b.test", {"to": "a.test", "ports": [22, "80-90"]}, "9.9.9.0/24:53"
        ]}));
        assert_eq!(plan.kinds.len(), 3);
        assert_eq!(kinds(&plan, "a.test"), 0b101);
        assert_eq!(kinds(&plan, "b.test"), 0b001);
        assert_eq!(kinds(&plan, "x.b.test"), 0b010);
        assert_eq!(kinds(&plan, "c.test"), 0);
        assert_eq!(plan.nets, [("9.9.9.0/24".parse().unwrap(), (53, 53))]);
        assert!(!plan.open && !plan.closed.is_empty());
    }

    #[test]
    fn more_kinds_than_bits_share_the_last() {
        let rules: Vec<String> = (0..40)
            .map(|at| format!("n{at}.test:{}", 1000 + at))
            .collect();
        let plan = plan(&json!({"allow": rules}));
        assert_eq!(plan.kinds.len(), KINDS);
        assert_eq!(kinds(&plan, "n39.test"), 1 << 31);
        assert!(plan.kinds[31].contains(&(1039, 1039)));
    }

    #[test]
    fn nothing_is_asked_of_the_kernel_that_is_not_needed() {
        let names = plan(&json!({"allow": ["a.test"]}));
        assert!(names.closed.is_empty() && names.has_names());
        assert!(!plan(&json!({"default": "open", "allow": ["a.test"]})).has_names());
        let some = plan(&json!({"default": "open", "deny": ["9.0.0.0/8"], "allow": ["a.test"]}));
        assert!(some.has_names() && !some.denied.is_empty() && !some.closed.is_empty());
    }
}
