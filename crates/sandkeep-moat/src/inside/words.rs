//! A policy in words.

use crate::policy::{Policy, Rule, Standing};

/// One sentence for each thing that holds.
pub fn policy(policy: &Policy) -> Vec<String> {
    let mut said = vec![
        match (policy.standing, policy.allow.is_empty()) {
            (Standing::Open, _) => "Everything public can be reached; private, link-local and metadata addresses can not.",
            (Standing::Deny, true) => "Nothing can be reached.",
            (Standing::Deny, false) => "Only what follows can be reached.",
        }
        .to_owned(),
    ];
    said.extend(policy.allow.iter().map(rule));
    said.extend(policy.deny.iter().map(|net| format!("{net} is closed.")));
    let limits = &policy.limits;
    let numbers = [
        (limits.bytes_per_second, "bytes in a second"),
        (limits.total_bytes, "bytes in all"),
        (
            limits.new_connections_per_second.map(u64::from),
            "new connections in a second",
        ),
        (
            limits.concurrent_connections.map(u64::from),
            "open connections",
        ),
    ];
    said.extend(
        numbers
            .into_iter()
            .filter_map(|(number, what)| Some(format!("At most {} {what}.", number?))),
    );
    said
}

fn rule(rule: &Rule) -> String {
    let requests: Vec<String> = rule
        .http
        .iter()
        .map(|http| {
            let methods = if http.methods.is_empty() {
                "any method".to_owned()
            } else {
                http.methods.join(", ")
            };
            format!("{methods} on {}", http.path)
        })
        .collect();
    if requests.is_empty() {
        format!("{} is open.", rule.name())
    } else {
        format!("{} is open for: {}.", rule.name(), requests.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sentences() {
        assert_eq!(policy(&Policy::air_gapped()), ["Nothing can be reached."]);
        let some = Policy::from_json(&json!({
            "allow": ["a.test:443", {"to": "b.test", "http": [{"methods": ["GET"], "path": "/v1/*"}]}],
            "deny": ["192.0.2.0/24"],
            "limits": {"total_bytes": 1000}
        }));
        assert_eq!(
            policy(&some.unwrap()),
            [
                "Only what follows can be reached.",
                "a.test port 443 is open.",
                "b.test is open for: GET on /v1/*.",
                "192.0.2.0/24 is closed.",
                "At most 1000 bytes in all.",
            ]
        );
    }
}
