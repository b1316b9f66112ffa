//! `ls`, `inspect`, `kill`, `timeout`, `templates`: looking at boxes and ending them.

use http::Method;
use sandkeep_model::{State, Timestamp, human_bytes};
use serde_json::{Value, json};

use super::{
    client::Client,
    output::{Output, clean},
};
use crate::{args::LsArgs, quantity::Span};

pub async fn ls(client: &Client, output: Output, args: &LsArgs) -> anyhow::Result<u8> {
    let mut query: Vec<(String, String)> = args
        .metadata
        .iter()
        .map(|(name, value)| (format!("metadata[{name}]"), value.clone()))
        .collect();
    if args.all {
        let every = State::ALL.map(State::name).join(",");
        query.push(("state".to_owned(), every));
    }
    let boxes = client.list(&query).await?;
    if output.json {
        output.json(&boxes)?;
        return Ok(0);
    }
    if args.quiet {
        for item in &boxes {
            output.line(&clean(text(item, "id")))?;
        }
        return Ok(0);
    }
    let now = Timestamp::now();
    let rows: Vec<Vec<String>> = boxes.iter().map(|item| row(item, now)).collect();
    output.table(
        &[
            "ID", "TEMPLATE", "LEVEL", "STATE", "AGE", "ENDS", "METADATA",
        ],
        &rows,
    )?;
    Ok(0)
}

fn row(item: &Value, now: Timestamp) -> Vec<String> {
    let started = time(item, "started_at");
    let ends = match (&item["gone"]["message"], time(item, "end_at")) {
        (Value::String(why), _) => why.clone(),
        // The time of a box that rests stands still.
        _ if item["state"] == "paused" => "-".to_owned(),
        (_, Some(end)) => format!("in {}", span(end.millis() - now.millis())),
        (_, None) => "never".to_owned(),
    };
    let metadata = item["metadata"]
        .as_object()
        .map_or_else(String::new, |map| {
            let pairs: Vec<String> = map
                .iter()
                .map(|(name, value)| format!("{name}={}", value.as_str().unwrap_or_default()))
                .collect();
            pairs.join(" ")
        });
    vec![
        text(item, "id").to_owned(),
        text(item, "template").to_owned(),
        text(item, "isolation").to_owned(),
        text(item, "state").to_owned(),
        started.map_or_else(String::new, |at| span(now.millis() - at.millis())),
        ends,
        metadata,
    ]
}

pub async fn inspect(client: &Client, output: Output, sandbox: &str) -> anyhow::Result<u8> {
    let id = client.find(sandbox).await?;
    let mut view = client.get(&["sandboxes", &id]).await?;
    // Boxes that are gone reach nothing.
    if let Ok(network) = client.get(&["sandboxes", &id, "network"]).await {
        view["network"] = network;
    }
    if output.json {
        output.json(&view)?;
        return Ok(0);
    }
    // The tokens open the box; on a screen they have no use.
    if let Some(object) = view.as_object_mut() {
        object.remove("access_token");
        object.remove("traffic_token");
    }
    for (name, shown) in flat("", &view) {
        output.line(&format!("{name:<18} {}", clean(&shown)))?;
    }
    Ok(0)
}

/// `{"a": {"b": 1}}` -> `a.b 1`, one line per value.
fn flat(prefix: &str, value: &Value) -> Vec<(String, String)> {
    match value {
        Value::Object(map) if !map.is_empty() => map
            .iter()
            .flat_map(|(name, inner)| {
                let full = if prefix.is_empty() {
                    clean(name)
                } else {
                    format!("{prefix}.{}", clean(name))
                };
                flat(&full, inner)
            })
            .collect(),
        Value::String(text) => vec![(prefix.to_owned(), text.clone())],
        Value::Null => vec![(prefix.to_owned(), "-".to_owned())],
        Value::Number(number) if prefix.ends_with("_bytes") => {
            let bytes = number.as_u64().unwrap_or_default();
            vec![(prefix.to_owned(), human_bytes(bytes))]
        }
        other => vec![(prefix.to_owned(), other.to_string())],
    }
}

pub async fn kill(client: &Client, output: Output, names: &[String]) -> anyhow::Result<u8> {
    let mut failed = None;
    let mut killed = Vec::new();
    for name in names {
        // The others are to be ended even if this one can not be.
        match kill_one(client, name).await {
            Ok(id) => killed.push(id),
            Err(error) => {
                if let Some(earlier) = failed.replace(error) {
                    super::complain(&earlier.into(), output.json);
                }
            }
        }
    }
    if output.json {
        output.json(&json!({ "killed": killed }))?;
    } else {
        for id in &killed {
            output.line(id)?;
        }
    }
    match failed {
        Some(error) => Err(error.into()),
        None => Ok(0),
    }
}

async fn kill_one(client: &Client, name: &str) -> sandkeep_model::Result<String> {
    let id = client.find(name).await?;
    client
        .json(client.request(Method::DELETE, &["sandboxes", &id])?)
        .await?;
    Ok(id)
}

pub async fn set_timeout(
    client: &Client,
    output: Output,
    sandbox: &str,
    wanted: Span,
) -> anyhow::Result<u8> {
    let id = client.find(sandbox).await?;
    let request = client
        .request(Method::POST, &["sandboxes", &id, "timeout"])?
        .json(&json!({ "timeout_seconds": wanted.seconds() }));
    let view = client.json(request).await?;
    if output.json {
        output.json(&view)?;
    } else {
        match time(&view, "end_at") {
            Some(end) => output.line(&format!("{id} ends at {end}"))?,
            None => output.line(&format!("{id} has no end"))?,
        }
    }
    Ok(0)
}

pub async fn templates(client: &Client, output: Output) -> anyhow::Result<u8> {
    let answer = client.get(&["templates"]).await?;
    let list = answer["templates"].as_array().cloned().unwrap_or_default();
    show_templates(output, &list)
}

pub fn show_templates(output: Output, list: &[Value]) -> anyhow::Result<u8> {
    if output.json {
        output.json(&list)?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = list
        .iter()
        .map(|item| {
            vec![
                text(item, "name").to_owned(),
                human_bytes(item["size_bytes"].as_u64().unwrap_or_default()),
                text(item, "created_at").to_owned(),
                warmth(&item["built"]),
                text(&item["built"], "start").to_owned(),
                text(item, "origin").to_owned(),
            ]
        })
        .collect();
    let headings = ["NAME", "SIZE", "CREATED", "WARM", "START", "ORIGIN"];
    output.table(&headings, &rows)?;
    Ok(0)
}

/// The levels at which boxes of a template begin with their processes; `no` where they could not.
pub fn warmth(built: &Value) -> String {
    let levels = built["levels"].as_array().map_or(&[][..], Vec::as_slice);
    let warm: Vec<_> = levels
        .iter()
        .filter(|level| level["warm"] == true)
        .filter_map(|level| level["isolation"].as_str())
        .collect();
    match warm.as_slice() {
        [] if built["start"].is_string() => "no".to_owned(),
        [] => "-".to_owned(),
        warm => warm.join(","),
    }
}

fn text<'a>(item: &'a Value, name: &str) -> &'a str {
    item[name].as_str().unwrap_or_default()
}

fn time(item: &Value, name: &str) -> Option<Timestamp> {
    item[name].as_str()?.parse().ok()
}

/// Milliseconds as people say them, in the one unit that matters.
fn span(millis: i64) -> String {
    let seconds = millis.max(0) / 1000;
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_when_a_box_ends_or_why_it_ended() {
        let now = Timestamp::from_millis(1_700_000_000_000);
        let running = json!({
            "id": "i1", "template": "base", "isolation": "container", "state": "running",
            "started_at": Timestamp::from_millis(1_700_000_000_000 - 90_000).to_string(),
            "end_at": Timestamp::from_millis(1_700_000_000_000 + 600_000).to_string(),
            "metadata": {"a": "1", "b": "2"}, "gone": null,
        });
        assert_eq!(row(&running, now)[4..], ["90s", "in 10m", "a=1 b=2"]);
        let mut resting = running;
        resting["state"] = json!("paused");
        assert_eq!(row(&resting, now)[5], "-");
        let endless = json!({"id": "i2", "end_at": null});
        assert_eq!(row(&endless, now)[5], "never");
        let gone =
            json!({"id": "i3", "gone": {"reason": "killed", "message": "killed on request"}});
        assert_eq!(row(&gone, now)[5], "killed on request");
    }

    #[test]
    fn nested_values_become_lines() {
        let view = json!({"id": "i1", "limits": {"pids": 5}, "usage": {"memory_bytes": 1536}, "gone": null});
        let lines = flat("", &view);
        assert!(lines.contains(&("limits.pids".to_owned(), "5".to_owned())));
        assert!(lines.contains(&("usage.memory_bytes".to_owned(), "1.5 KiB".to_owned())));
        assert!(lines.contains(&("gone".to_owned(), "-".to_owned())));
    }

    #[test]
    fn spans_have_one_unit() {
        assert_eq!(span(-5), "0s");
        assert_eq!(span(119_000), "119s");
        assert_eq!(span(7_199_000), "119m");
        assert_eq!(span(86_400_000), "24h");
        assert_eq!(span(864_000_000), "10d");
    }
}
