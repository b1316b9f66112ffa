//! `pause`, `resume`, `snapshot`, `fork`, `rollback`, `timeline`, `points`, `diff`.

use http::Method;
use sandkeep_model::{Code, Error, Result, human_bytes};
use serde_json::{Value, json};

use super::{
    carry,
    client::Client,
    output::{Output, clean},
    race, timeline,
};
use crate::{
    auto_rule::AutoRule,
    time_args::{PointsCommand, TimeCommand},
};

pub async fn time(client: &Client, output: Output, command: TimeCommand) -> anyhow::Result<u8> {
    match command {
        TimeCommand::Pause {
            sandbox,
            files_only,
        } => {
            let view = pause(client, &sandbox, files_only).await?;
            show(output, &view, &paused(&view))
        }
        TimeCommand::Resume {
            sandbox,
            timeout,
            cold,
        } => {
            let mut body = json!({ "memory": !cold });
            if let Some(span) = timeout {
                body["timeout_seconds"] = match span.seconds() {
                    Some(seconds) => seconds.into(),
                    None => "never".into(),
                };
            }
            let view = post(client, &sandbox, "resume", &body).await?;
            if !output.json {
                // Not on standard output: scripts read the id there.
                match view["end_at"].as_str() {
                    Some(end) => output.note(&format!("it runs, and ends at {}", clean(end)))?,
                    None => output.note("it runs, and has no end")?,
                }
            }
            show(output, &view, text(&view, "id"))
        }
        TimeCommand::Snapshot {
            sandbox,
            name,
            tag,
            files_only,
            memory,
        } => {
            let mut body = json!({ "name": name, "tags": tag });
            if files_only || memory {
                body["memory"] = memory.into();
            }
            let view = post(client, &sandbox, "points", &body).await?;
            if let Some(why) = view["why_disk_only"].as_str() {
                output.warn(&format!("the memory is not in the point: {why}"))?;
            }
            show(output, &view, text(&view, "id"))
        }
        TimeCommand::Fork {
            sandbox,
            count,
            at,
            memory,
        } => {
            let mut body = json!({ "count": count, "at": at });
            if memory {
                body["memory"] = true.into();
            }
            let view = post(client, &sandbox, "fork", &body).await?;
            warn_of_cold_forks(output, &view)?;
            forks(output, &view)
        }
        TimeCommand::Rollback {
            sandbox,
            to,
            foreign,
        } => {
            let body = json!({ "to": to, "foreign": foreign });
            let view = post(client, &sandbox, "rollback", &body).await?;
            show(output, &view, text(&view, "id"))
        }
        TimeCommand::Timeline { sandbox } => timeline::timeline(client, output, &sandbox).await,
        TimeCommand::Points(PointsCommand::Ls) => points(client, output).await,
        TimeCommand::Points(PointsCommand::Export { point, file }) => {
            carry::export(client, output, &point, file.as_deref()).await
        }
        TimeCommand::Points(PointsCommand::Import { file, files_only }) => {
            carry::import(client, output, &file, files_only).await
        }
        TimeCommand::Points(PointsCommand::Key) => {
            let request = client.request(Method::GET, &["host", "key"])?;
            let view = client.json(request).await?;
            show(output, &view, text(&view, "key"))
        }
        TimeCommand::Points(PointsCommand::Rm { points }) => {
            for point in points {
                let request = client.request(Method::DELETE, &["points", &point])?;
                client.json(request).await?;
            }
            Ok(0)
        }
        TimeCommand::Points(PointsCommand::Name { point, name }) => {
            let view = patch(client, &point, &json!({ "name": name })).await?;
            show(output, &view, text(&view, "id"))
        }
        TimeCommand::Points(PointsCommand::Tag { point, tags }) => {
            let view = patch(client, &point, &json!({ "tags": tags })).await?;
            show(output, &view, text(&view, "id"))
        }
        TimeCommand::AutoPoints { sandbox, rules } => {
            auto_points(client, output, &sandbox, &rules).await
        }
        TimeCommand::Diff {
            before,
            after,
            text,
        } => diff(client, output, &before, &after, text).await,
        TimeCommand::Race(args) => race::race(client, output, args).await,
    }
}

pub async fn post(client: &Client, sandbox: &str, what: &str, body: &Value) -> Result<Value> {
    let id = client.find(sandbox).await?;
    let request = client
        .request(Method::POST, &["sandboxes", &id, what])?
        .json(body);
    client.json(request).await
}

/// One that is paused already is what was wanted, unless its memory was not to be kept.
async fn pause(client: &Client, sandbox: &str, files_only: bool) -> Result<Value> {
    let id = client.find(sandbox).await?;
    let body = json!({ "memory": !files_only });
    let refused = match post(client, &id, "pause", &body).await {
        Err(error) if error.code == Code::Conflict => error,
        answered => return answered,
    };
    let view = client.get(&["sandboxes", &id]).await?;
    if view["state"] != "paused" {
        return Err(refused);
    }
    if files_only && view["pause"]["mode"] != "filesystem" {
        return Err(refused.hint(format!(
            "wake it, then pause it with its files alone: sandkeep resume {id} && sandkeep pause --files-only {id}"
        )));
    }
    Ok(view)
}

async fn patch(client: &Client, point: &str, body: &Value) -> Result<Value> {
    let request = client
        .request(Method::PATCH, &["points", point])?
        .json(body);
    client.json(request).await
}

async fn auto_points(
    client: &Client,
    output: Output,
    sandbox: &str,
    rules: &[AutoRule],
) -> anyhow::Result<u8> {
    let id = client.find(sandbox).await?;
    let place = ["sandboxes", id.as_str(), "auto-points"];
    let view = match AutoRule::all(rules) {
        Some(policy) => {
            let request = client.request(Method::PUT, &place)?.json(&policy);
            client.json(request).await?
        }
        None => client.get(&place).await?,
    };
    output.json(&view)?;
    Ok(0)
}

fn show(output: Output, view: &Value, line: &str) -> anyhow::Result<u8> {
    if output.json {
        output.json(view)?;
    } else {
        output.line(&clean(line))?;
    }
    Ok(0)
}

fn text<'a>(item: &'a Value, name: &str) -> &'a str {
    item[name].as_str().unwrap_or_default()
}

fn paused(view: &Value) -> String {
    let words = match text(&view["pause"], "mode") {
        "disk" => "paused, with its memory on the disk",
        "ram" => "frozen in memory",
        "filesystem" => "paused, its files are kept",
        _ => "paused",
    };
    let id = text(view, "id");
    match view["pause"]["why"].as_str() {
        Some(why) => format!("{id} {words}: {why}"),
        None => format!("{id} {words}"),
    }
}

/// Said once: all of them come from one point.
pub fn warn_of_cold_forks(output: Output, view: &Value) -> std::io::Result<()> {
    let forks = view["forks"].as_array();
    match forks
        .into_iter()
        .flatten()
        .find_map(|fork| fork["why"].as_str())
    {
        Some(why) => output.warn(&format!(
            "the forks begin from the files, without memory: {why}"
        )),
        None => Ok(()),
    }
}

/// Exit code 1 when not all were made.
fn forks(output: Output, view: &Value) -> anyhow::Result<u8> {
    if output.json {
        output.json(view)?;
    }
    let mut failed = None;
    for fork in view["forks"].as_array().into_iter().flatten() {
        match fork["sandbox"]["id"].as_str() {
            Some(id) if !output.json => output.line(&clean(id))?,
            Some(_) => {}
            None => failed = fork["error"]["message"].as_str().map(clean),
        }
    }
    match failed {
        None => Ok(0),
        Some(why) => Err(Error::internal(format!("not all forks were made: {why}")).into()),
    }
}

async fn points(client: &Client, output: Output) -> anyhow::Result<u8> {
    let answer = client.get(&["points"]).await?;
    let points = answer["points"].as_array().cloned().unwrap_or_default();
    if output.json {
        output.json(&points)?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = points
        .iter()
        .map(|point| {
            vec![
                text(point, "id").to_owned(),
                text(point, "sandbox_id").to_owned(),
                text(point, "name").to_owned(),
                text(point, "kind").to_owned(),
                if point["memory"] == true {
                    "memory"
                } else {
                    "files"
                }
                .to_owned(),
                human_bytes(point["bytes"].as_u64().unwrap_or_default()),
                text(point, "created_at").to_owned(),
            ]
        })
        .collect();
    output.table(
        &["ID", "BOX", "NAME", "KIND", "KEEPS", "SIZE", "CREATED"],
        &rows,
    )?;
    Ok(0)
}

async fn diff(
    client: &Client,
    output: Output,
    before: &str,
    after: &str,
    with_text: bool,
) -> anyhow::Result<u8> {
    let request = client
        .request(Method::GET, &["points", before, "diff", after])?
        .query(&[("text", with_text)]);
    let answer = client.json(request).await?;
    if output.json {
        output.json(&answer)?;
        return Ok(0);
    }
    for change in answer["changes"].as_array().into_iter().flatten() {
        if let Some(text) = change["text"].as_str() {
            for line in text.lines() {
                output.line(&clean(&line.replace('\t', "    ")))?;
            }
            continue;
        }
        output.line(&clean(&changed(change)))?;
    }
    if answer["cut"] == true {
        output.line("… and more")?;
    }
    Ok(0)
}

fn changed(change: &Value) -> String {
    let size = |name: &str| change[name].as_u64().map(human_bytes);
    let (mark, sizes) = match (size("bytes_before"), size("bytes_after")) {
        (None, after) => ("+", after.unwrap_or_default()),
        (before, None) => ("-", before.unwrap_or_default()),
        (Some(before), Some(after)) => ("~", format!("{before} -> {after}")),
    };
    format!("{mark} {}  {sizes}", text(change, "path"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_say_what_became_of_the_size() {
        let change = json!({"path": "/a", "bytes_before": 1, "bytes_after": 2048});
        assert_eq!(changed(&change), "~ /a  1 B -> 2.0 KiB");
        let added = json!({"path": "/b", "bytes_before": null, "bytes_after": 5});
        assert_eq!(changed(&added), "+ /b  5 B");
    }
}
