//! `logs` and `events`: what happened, and what happens.

use std::time::Duration;

use http::Method;
use sandkeep_model::Error;
use serde_json::Value;
use tokio::time::sleep;

use super::{
    client::Client,
    output::{Output, clean},
    sse::Parser,
};

/// How often a log is asked for news.
const LOG_INTERVAL: Duration = Duration::from_millis(500);

pub async fn logs(
    client: &Client,
    output: Output,
    sandbox: &str,
    follow: bool,
) -> anyhow::Result<u8> {
    let id = client.find(sandbox).await?;
    let mut after = 0;
    loop {
        let request = client
            .request(Method::GET, &["sandboxes", &id, "logs"])?
            .query(&[("after", after)]);
        let answer = client.json(request).await?;
        for entry in answer["entries"].as_array().into_iter().flatten() {
            after = entry["seq"].as_u64().unwrap_or(after).max(after);
            if output.json {
                output.json_line(entry)?;
            } else {
                output.line(&log_line(entry))?;
            }
        }
        if !follow {
            return Ok(0);
        }
        sleep(LOG_INTERVAL).await;
    }
}

fn log_line(entry: &Value) -> String {
    let text = |name: &str| clean(entry[name].as_str().unwrap_or_default());
    format!("{} {:<5} {}", text("at"), text("level"), text("message"))
}

/// Without `follow` everything up to now; with it, until Ctrl-C.
pub async fn events(
    client: &Client,
    output: Output,
    sandbox: Option<&str>,
    follow: bool,
) -> anyhow::Result<u8> {
    let mut request = client.request(Method::GET, &["events"])?.query(&[
        ("after", "0"),
        ("follow", if follow { "true" } else { "false" }),
    ]);
    if let Some(name) = sandbox {
        let id = client.find(name).await?;
        request = request.query(&[("sandbox_id", id)]);
    }
    let mut response = client.send(request).await?;
    let mut parser = Parser::default();
    let broke = |error: reqwest::Error| {
        Error::internal(format!(
            "the stream of events broke: {}",
            error.without_url()
        ))
    };
    // The server ends the stream, when it stops or has told what was asked for.
    while let Some(chunk) = response.chunk().await.map_err(broke)? {
        for data in parser.feed(&chunk)? {
            let event: Value = serde_json::from_str(&data)
                .map_err(|error| Error::internal(format!("an event is not JSON: {error}")))?;
            if output.json {
                output.json_line(&event)?;
            } else {
                output.line(&event_line(&event))?;
            }
        }
    }
    Ok(0)
}

fn event_line(event: &Value) -> String {
    let text = |name: &str| event[name].as_str().map(clean).unwrap_or_default();
    let what = match event["event"].as_str() {
        Some("state") => {
            let why = event["why"]["reason"].as_str().map(clean);
            match why {
                Some(why) => format!("{} ({why})", text("to")),
                None => text("to"),
            }
        }
        Some("out_of_memory") => {
            format!("out of memory, {} processes killed so far", event["kills"])
        }
        Some("expiry_changed") => match event["end_at"].as_str() {
            Some(end) => format!("ends at {}", clean(end)),
            None => "has no end".to_owned(),
        },
        Some("storage_low") => "held: it writes and the storage is nearly full".to_owned(),
        Some("storage_back") => "goes on: the storage has room again".to_owned(),
        Some("egress_denied") => {
            format!(
                "refused {}:{}: {}",
                text("host"),
                event["port"],
                text("why")
            )
        }
        Some(other) => clean(other),
        None => String::new(),
    };
    format!("{} {} {what}", text("at"), text("sandbox_id"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_tell_what_happened_and_nothing_of_the_terminal() {
        let event = json!({"at": "T", "sandbox_id": "i1", "event": "state", "from": "stopping", "to": "gone", "why": {"reason": "killed"}});
        assert_eq!(event_line(&event), "T i1 gone (killed)");
        let event = json!({"at": "T", "sandbox_id": "i1", "event": "out_of_memory", "kills": 3});
        assert_eq!(
            event_line(&event),
            "T i1 out of memory, 3 processes killed so far"
        );
        let event =
            json!({"at": "T", "sandbox_id": "i1", "event": "expiry_changed", "end_at": null});
        assert_eq!(event_line(&event), "T i1 has no end");
        let entry = json!({"at": "T", "level": "info", "message": "started \u{1b}[2Jx"});
        assert_eq!(log_line(&entry), "T info  started [2Jx");
    }
}
