//! `race`: the same command in copies of a box, and the box becomes the copy that wins.

use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream::FuturesUnordered};
use http::Method;
use sandkeep_model::{Error, Result};
use serde_json::{Value, json};

use super::{
    client::Client,
    output::{Output, clean},
    time::post,
};
use crate::time_args::RaceArgs;

struct Runner {
    id: String,
    took: Duration,
    ended: Result<Value>,
}

impl Runner {
    fn won(&self) -> bool {
        self.ended
            .as_ref()
            .is_ok_and(|ended| ended["exit_code"] == 0)
    }
}

/// Exit code 1 when nobody won.
pub async fn race(client: &Client, output: Output, args: RaceArgs) -> anyhow::Result<u8> {
    let source = client.find(&args.sandbox).await?;
    let made = post(client, &source, "fork", &json!({ "count": args.count })).await?;
    super::time::warn_of_cold_forks(output, &made)?;
    let forks = made["forks"].as_array().cloned().unwrap_or_default();
    let ids: Vec<String> = forks
        .iter()
        .filter_map(|fork| fork["sandbox"]["id"].as_str().map(str::to_owned))
        .collect();
    if ids.is_empty() {
        return Err(Error::internal("no copy of the box could be made").into());
    }
    let mut running: FuturesUnordered<_> = ids
        .iter()
        .zip(1_u32..)
        .map(|(id, way)| run(client, id.clone(), way, &args.command))
        .collect();
    // In the order they cross the line.
    let mut runners = Vec::new();
    let stopped = loop {
        let next = tokio::select! {
            next = running.next() => next,
            _ = tokio::signal::ctrl_c() => break true,
        };
        match next {
            Some(runner) => runners.push(runner),
            None => break false,
        }
    };
    if stopped {
        // Nobody is to find copies lying about.
        destroy(client, output, &ids).await?;
        return Ok(130);
    }
    let winner = runners.iter().find(|runner| runner.won());
    report(output, &runners, winner)?;
    if args.keep {
        return Ok(u8::from(winner.is_none()));
    }
    let promoted = match winner {
        Some(winner) => promote(client, &source, &winner.id).await,
        None => Ok(()),
    };
    destroy(client, output, &ids).await?;
    promoted?;
    Ok(u8::from(winner.is_none()))
}

async fn destroy(client: &Client, output: Output, ids: &[String]) -> Result<()> {
    for id in ids {
        let request = client.request(Method::DELETE, &["sandboxes", id])?;
        if let Err(error) = client.json(request).await {
            super::complain(&error.into(), output.json);
        }
    }
    Ok(())
}

async fn run(client: &Client, id: String, way: u32, command: &[String]) -> Runner {
    let begun = Instant::now();
    let ended = async {
        let request = client
            .request(Method::POST, &["sandboxes", &id, "exec"])?
            .json(&json!({ "cmd": command, "env": { "SANDKEEP_WAY": way.to_string() } }));
        client.json_whenever(request).await
    }
    .await;
    Runner {
        id,
        took: begun.elapsed(),
        ended,
    }
}

/// The box becomes what the winner is; the point in between goes when it has served.
async fn promote(client: &Client, source: &str, winner: &str) -> Result<()> {
    let point = post(client, winner, "points", &json!({})).await?;
    let point = point["id"].as_str().unwrap_or_default().to_owned();
    let back = post(
        client,
        source,
        "rollback",
        &json!({ "to": point, "foreign": true }),
    )
    .await;
    let request = client.request(Method::DELETE, &["points", &point])?;
    let deleted = client.json(request).await;
    back?;
    deleted.map(drop)
}

fn report(output: Output, runners: &[Runner], winner: Option<&Runner>) -> anyhow::Result<()> {
    let won = |runner: &Runner| winner.is_some_and(|winner| winner.id == runner.id);
    if output.json {
        let list: Vec<Value> = runners
            .iter()
            .map(|runner| {
                json!({
                    "id": runner.id,
                    "seconds": runner.took.as_secs_f64(),
                    "won": won(runner),
                    "result": runner.ended.as_ref().ok(),
                    "error": runner.ended.as_ref().err(),
                })
            })
            .collect();
        return output.json(&list);
    }
    let rows: Vec<Vec<String>> = runners
        .iter()
        .map(|runner| {
            let (exit, last) = match &runner.ended {
                Ok(ended) => (ended["exit_code"].to_string(), last_line(ended)),
                Err(error) => ("-".to_owned(), error.message.clone()),
            };
            vec![
                runner.id.clone(),
                if won(runner) { "won" } else { "" }.to_owned(),
                exit,
                format!("{:.1}s", runner.took.as_secs_f64()),
                clean(&last),
            ]
        })
        .collect();
    output.table(&["BOX", "", "EXIT", "TOOK", "SAID LAST"], &rows)?;
    Ok(())
}

fn last_line(ended: &Value) -> String {
    let said = |name: &str| {
        let text = ended[name].as_str().unwrap_or_default();
        text.lines()
            .rfind(|line| !line.trim().is_empty())
            .map(str::to_owned)
    };
    said("stdout")
        .or_else(|| said("stderr"))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_words_are_shown() {
        let ended = json!({"stdout": "a\nb\n\n", "stderr": "c"});
        assert_eq!(last_line(&ended), "b");
        assert_eq!(last_line(&json!({"stdout": "", "stderr": "c\n"})), "c");
        assert_eq!(last_line(&json!({})), "");
    }
}
