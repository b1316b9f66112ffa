//! `denials`: what a sandbox was refused, and why.

use std::{collections::HashMap, time::Duration};

use serde_json::Value;
use tokio::time::sleep;

use super::{
    client::Client,
    output::{Output, clean},
};

/// How often the list is asked for news.
const INTERVAL: Duration = Duration::from_millis(500);

/// Oldest first. With `follow` each refusal again whenever it is met again, until Ctrl-C.
pub async fn denials(
    client: &Client,
    output: Output,
    sandbox: &str,
    follow: bool,
) -> anyhow::Result<u8> {
    let id = client.find(sandbox).await?;
    let mut seen = HashMap::new();
    loop {
        let answer = client
            .get(&["sandboxes", &id, "network", "denials"])
            .await?;
        if output.json && !follow {
            output.json(&answer)?;
            return Ok(0);
        }
        for denial in news(&answer, &mut seen) {
            if output.json {
                output.json_line(denial)?;
            } else {
                output.line(&line(denial))?;
            }
        }
        if !follow {
            return Ok(0);
        }
        sleep(INTERVAL).await;
    }
}

/// Those that are new, or were met again since.
fn news<'a>(answer: &'a Value, seen: &mut HashMap<String, u64>) -> Vec<&'a Value> {
    let listed = answer["denials"].as_array().into_iter().flatten();
    let all: Vec<(String, &Value)> = listed.map(|denial| (key(denial), denial)).collect();
    let mut fresh: Vec<&Value> = all
        .iter()
        .filter(|(key, denial)| seen.get(key) != Some(&count(denial)))
        .map(|(_, denial)| *denial)
        .collect();
    // What the server has forgotten is forgotten here, too.
    *seen = all
        .into_iter()
        .map(|(key, denial)| (key, count(denial)))
        .collect();
    fresh.reverse();
    fresh
}

/// What tells two refusals apart.
pub fn key(denial: &Value) -> String {
    ["via", "host", "port", "why"]
        .map(|name| denial[name].to_string())
        .join(" ")
}

pub fn count(denial: &Value) -> u64 {
    denial["count"].as_u64().unwrap_or_default()
}

fn line(denial: &Value) -> String {
    let text = |name: &str| clean(denial[name].as_str().unwrap_or_default());
    let to = match denial["port"].as_u64() {
        Some(0) | None => text("host"),
        Some(port) => format!("{}:{port}", text("host")),
    };
    let times = match count(denial) {
        0 | 1 => String::new(),
        many => format!(" ({many} times)"),
    };
    format!(
        "{} {to} {}: {}{times}\n  hint: {}",
        text("last"),
        text("reason"),
        text("why"),
        text("hint")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_news_is_told_oldest_first() {
        let denial = |host: &str, count: u64| json!({"via": "dns", "host": host, "port": 0, "why": "w", "count": count});
        let mut seen = HashMap::new();
        let first = json!({"denials": [denial("b.test", 1), denial("a.test", 1)]});
        let hosts = |found: Vec<&Value>| -> Vec<String> {
            let host = |denial: &&Value| denial["host"].as_str().map(str::to_owned);
            found.iter().filter_map(host).collect()
        };
        assert_eq!(hosts(news(&first, &mut seen)), ["a.test", "b.test"]);
        assert!(news(&first, &mut seen).is_empty());
        let again = json!({"denials": [denial("a.test", 2), denial("b.test", 1)]});
        assert_eq!(hosts(news(&again, &mut seen)), ["a.test"]);
    }

    #[test]
    fn a_line_names_the_reason() {
        let denial = json!({"last": "T", "host": "a.test", "port": 443, "count": 3,
            "reason": "wrong_port", "why": "a.test is allowed, but not on port 443", "hint": "h\u{1b}"});
        assert_eq!(
            line(&denial),
            "T a.test:443 wrong_port: a.test is allowed, but not on port 443 (3 times)\n  hint: h"
        );
    }
}
