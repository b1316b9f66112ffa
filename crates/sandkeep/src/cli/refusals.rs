//! What a command was refused while it ran, in a few words at its end.

use std::collections::HashMap;

use serde_json::Value;

use super::{client::Client, denials, exec::After, output::clean};

/// So many hosts are named in the summary.
const NAMED: usize = 3;
/// So many refusals are told whole where nobody can ask for them later.
const TOLD: usize = 5;

/// All refusals of a sandbox until now. Only what they name is missing where it cannot be asked.
pub async fn of(client: &Client, sandbox: &str) -> Value {
    client
        .get(&["sandboxes", sandbox, "network", "denials"])
        .await
        .unwrap_or_default()
}

/// Those of a new sandbox.
pub const fn none() -> Value {
    Value::Null
}

/// What came between two moments: whatever the command made of it, people should know why.
pub fn lines(before: &Value, now: &Value, sandbox: &str, after: After) -> Vec<String> {
    let grown = grown(before, now);
    let mut said: Vec<String> = Kind::ALL
        .iter()
        .filter_map(|kind| kind.summary(&grown))
        .collect();
    if said.is_empty() {
        said.push("the network refused something".to_owned());
    }
    let summary = said.join("; ");
    if after == After::Stays {
        return vec![format!("{summary}; details: sandkeep denials {sandbox}")];
    }
    let told = grown.iter().take(TOLD).map(|(denial, _)| {
        format!(
            "  {}: {}; {}",
            host(denial),
            reason(denial),
            clean(denial["hint"].as_str().unwrap_or_default())
        )
    });
    let mut lines = vec![summary];
    lines.extend(told);
    if grown.len() > TOLD {
        lines.push(format!("  and {} more", grown.len() - TOLD));
    }
    lines
}

/// Those met between, oldest first, with how often.
fn grown<'a>(before: &Value, now: &'a Value) -> Vec<(&'a Value, u64)> {
    let listed = |answer: &'a Value| answer["denials"].as_array().into_iter().flatten();
    let known: HashMap<String, u64> = before["denials"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|denial| (denials::key(denial), denials::count(denial)))
        .collect();
    let mut grown: Vec<(&Value, u64)> = listed(now)
        .filter_map(|denial| {
            let count = denials::count(denial);
            let old = known.get(&denials::key(denial)).copied().unwrap_or(0);
            // Fewer than before: it was forgotten meanwhile, and met again.
            let more = if old > count { count } else { count - old };
            (more > 0).then_some((denial, more))
        })
        .collect();
    grown.reverse();
    grown
}

/// What happened, as people would say it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    LookupFailed,
    LookupRefused,
    Failed,
    Closed,
    Refused,
}

impl Kind {
    const ALL: [Self; 5] = [
        Self::LookupFailed,
        Self::LookupRefused,
        Self::Failed,
        Self::Closed,
        Self::Refused,
    ];

    fn of(denial: &Value) -> Self {
        let lookup = denial["via"] == "dns";
        match denial["reason"].as_str().unwrap_or_default() {
            "no_such_name" | "no_address" | "dns_failed" if lookup => Self::LookupFailed,
            _ if lookup => Self::LookupRefused,
            "no_such_name" | "no_address" | "dns_failed" | "untrusted" | "stale" => Self::Failed,
            // No policy of a sandbox opens these.
            "closed_range" | "metadata" | "own_address" | "never_reached" => Self::Closed,
            _ => Self::Refused,
        }
    }

    fn summary(self, grown: &[(&Value, u64)]) -> Option<String> {
        let of_this: Vec<_> = grown
            .iter()
            .filter(|(denial, _)| Self::of(denial) == self)
            .collect();
        let count: u64 = of_this.iter().map(|(_, count)| count).sum();
        let words = match (self, count) {
            (_, 0) => return None,
            (Self::LookupFailed, 1) => "1 lookup failed".to_owned(),
            (Self::LookupFailed, many) => format!("{many} lookups failed"),
            (Self::LookupRefused, 1) => "1 lookup was refused by policy".to_owned(),
            (Self::LookupRefused, many) => format!("{many} lookups were refused by policy"),
            (Self::Failed, 1) => "1 connection failed".to_owned(),
            (Self::Failed, many) => format!("{many} connections failed"),
            (Self::Closed, 1) => "1 connection was refused".to_owned(),
            (Self::Closed, many) => format!("{many} connections were refused"),
            (Self::Refused, 1) => "1 connection was refused by policy".to_owned(),
            (Self::Refused, many) => format!("{many} connections were refused by policy"),
        };
        let mut named: Vec<String> = Vec::new();
        for (denial, _) in of_this {
            let one = format!("{} ({})", host(denial), reason(denial));
            if !named.contains(&one) {
                named.push(one);
            }
        }
        let more = match named.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        named.truncate(NAMED);
        Some(format!("{words}: {}{more}", named.join(", ")))
    }
}

fn host(denial: &Value) -> String {
    let host = clean(denial["host"].as_str().unwrap_or_default());
    match denial["port"].as_u64() {
        Some(0) | None => host,
        Some(port) => format!("{host}:{port}"),
    }
}

fn reason(denial: &Value) -> String {
    clean(denial["reason"].as_str().unwrap_or_default()).replace('_', " ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn denial(via: &str, host: &str, port: u16, reason: &str, count: u64) -> Value {
        json!({"via": via, "host": host, "port": port, "reason": reason, "why": reason, "hint": "do", "count": count})
    }

    #[test]
    fn a_name_that_does_not_exist_is_not_refused_by_policy() {
        let before = json!({"denials": [denial("tcp", "old.test", 443, "no_rule", 4)]});
        let now = json!({"denials": [
            denial("tcp", "10.0.0.1", 80, "closed_range", 1),
            denial("dns", "typo.invalid", 0, "no_such_name", 2),
            denial("tcp", "old.test", 443, "no_rule", 4),
        ]});
        assert_eq!(
            lines(&before, &now, "iabc", After::Stays),
            [
                "2 lookups failed: typo.invalid (no such name); 1 connection was refused: 10.0.0.1:80 (closed range); \
              details: sandkeep denials iabc"
            ]
        );
    }

    #[test]
    fn only_what_came_since_counts() {
        let at = |count| json!({"denials": [denial("tcp", "a.test", 443, "no_rule", count)]});
        let said = lines(&at(4), &at(6), "iabc", After::Stays).join("\n");
        assert!(
            said.starts_with("2 connections were refused by policy: a.test:443 (no rule)"),
            "{said}"
        );
    }

    #[test]
    fn of_a_sandbox_that_ends_a_few_are_told_whole() {
        let many: Vec<Value> = (0..7)
            .map(|at| denial("tcp", &format!("{at}.test"), 443, "no_rule", 1))
            .collect();
        let lines = lines(&none(), &json!({ "denials": many }), "iabc", After::Ends);
        assert_eq!(lines.len(), 1 + TOLD + 1, "{lines:?}");
        assert_eq!(lines[1], "  6.test:443: no rule; do");
        assert!(!lines.join(" ").contains("sandkeep denials"), "{lines:?}");
    }
}
