//! `run` and `create`: making boxes.

use std::time::Duration;

use http::Method;
use sandkeep_model::{Error, Result};
use serde_json::{Value, json};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::timeout,
};

use super::{
    client::Client,
    exec::{After, Attached, attach},
    output::{Output, clean},
    policy,
    session::Request,
};
use crate::{
    args::{BoxArgs, CreateArgs, RunArgs},
    auto_rule::AutoRule,
    quantity::{Size, Span},
};

/// How long we stay to see a box destroyed before we say that it is still there.
const GOODBYE: Duration = Duration::from_secs(30);
/// The same where the server was away a moment ago.
const GLANCE: Duration = Duration::from_secs(1);

pub async fn create(client: &Client, output: Output, args: &CreateArgs) -> anyhow::Result<u8> {
    let made = make(client, &args.sandbox, args.timeout, time_wish(args)).await?;
    if output.json {
        output.json(&made)?;
    } else {
        output.line(&clean(id_of(&made)?))?;
    }
    Ok(0)
}

/// The box lives as long as the command, whatever ends it: the command, an error, or Ctrl-C.
pub async fn run(client: &Client, output: Output, args: RunArgs) -> anyhow::Result<u8> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let making = make(client, &args.sandbox, args.timeout, Value::Null);
    tokio::pin!(making);
    let (made, interrupted) = tokio::select! {
        // Polled once more only if it has not ended.
        made = &mut making => (made?, false),
        // The server may have made it already: wait to learn its name, then destroy it. A
        // box whose name nobody was told the server ends by itself.
        _ = interrupt.recv() => match timeout(GOODBYE, making).await {
            Ok(made) => (made?, true),
            Err(_) => return Ok(130),
        },
    };
    let id = id_of(&made)?.to_owned();
    let ended = if interrupted {
        Ok(Attached {
            code: 130,
            server_away: false,
        })
    } else {
        let request = Request {
            cmd: args.command,
            ..Request::default()
        };
        attach(client, output, &id, request, args.streams, After::Ends).await
    };
    if let Ok(Attached {
        code,
        server_away: true,
    }) = ended
    {
        // Whoever asked us to end does not wait for a server that is not there.
        if !matches!(timeout(GLANCE, destroy(client, &id)).await, Ok(Ok(()))) {
            output.warn(&format!(
                "sandbox {id} is still there; when the server is back: sandkeep kill {id}"
            ))?;
        }
        return Ok(code);
    }
    let destroyed = timeout(GOODBYE, destroy(client, &id)).await;
    let code = ended?.code;
    match destroyed {
        Ok(done) => done?,
        Err(_) => {
            return Err(
                Error::internal(format!("sandbox {id} was not destroyed in time"))
                    .hint(format!("try `sandkeep kill {id}`"))
                    .into(),
            );
        }
    }
    Ok(code)
}

async fn destroy(client: &Client, id: &str) -> Result<()> {
    let request = client.request(Method::DELETE, &["sandboxes", id])?;
    match client.json(request).await {
        Ok(_) => Ok(()),
        // It ended by itself: that is what was wanted.
        Err(error) if error.code == sandkeep_model::Code::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// What `create` says about time; nothing it was not told.
fn time_wish(args: &CreateArgs) -> Value {
    let mut wish = serde_json::Map::new();
    if let Some(point) = &args.from_point {
        wish.insert("from_point".to_owned(), point.as_str().into());
    }
    if args.pause_at_timeout {
        wish.insert("on_timeout".to_owned(), "pause".into());
    }
    if args.auto_resume || args.no_auto_resume {
        wish.insert("auto_resume".to_owned(), args.auto_resume.into());
    }
    if let Some(seconds) = args.paused_limit.and_then(Span::seconds) {
        wish.insert("paused_limit_seconds".to_owned(), seconds.into());
    }
    if let Some(seconds) = args.idle.and_then(Span::seconds) {
        wish.insert("idle_seconds".to_owned(), seconds.into());
    }
    if let Some(policy) = AutoRule::all(&args.auto_points) {
        wish.insert("auto_points".to_owned(), json!(policy));
    }
    wish.into()
}

async fn make(client: &Client, wish: &BoxArgs, timeout: Span, time: Value) -> Result<Value> {
    let mut body = body(wish, timeout);
    if let (Some(body), Value::Object(time)) = (body.as_object_mut(), time) {
        body.extend(time);
    }
    if let Some(network) = policy::wish(client, wish).await? {
        body["network"] = network;
    }
    let request = client.request(Method::POST, &["sandboxes"])?.json(&body);
    let made = client.json(request).await?;
    if body.get("network").is_some() {
        policy::warn_of_dead_rules(client, id_of(&made)?).await;
    }
    Ok(made)
}

fn body(wish: &BoxArgs, timeout: Span) -> Value {
    let map = |pairs: &[(String, String)]| -> Value {
        pairs
            .iter()
            .map(|(name, value)| (name.clone(), Value::from(value.as_str())))
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    let mut limits = serde_json::Map::new();
    let wishes = [
        ("cpu_millis", wish.cpu.map(u64::from)),
        ("memory_mib", wish.memory.map(Size::mib)),
        ("pids", wish.pids.map(u64::from)),
        ("disk_mib", wish.disk.map(Size::mib)),
    ];
    for (name, wished) in wishes {
        if let Some(value) = wished {
            limits.insert(name.to_owned(), value.into());
        }
    }
    let mut body = json!({
        "template": wish.template.as_str(),
        "isolation": wish.isolation,
        "limits": limits,
        "timeout_seconds": timeout.seconds(),
        "env": map(&wish.env),
        "metadata": map(&wish.metadata),
    });
    if wish.public_ports {
        body["ports"] = "public".into();
    }
    if wish.org.is_some() || wish.task.is_some() || !wish.scope.is_empty() {
        body["identity"] = json!({"org": wish.org, "task": wish.task, "scopes": wish.scope});
    }
    body
}

fn id_of(made: &Value) -> Result<&str> {
    made["id"]
        .as_str()
        .ok_or_else(|| Error::internal("the server's answer names no box"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    #[test]
    fn the_request_holds_what_was_asked_and_no_more() {
        let words = [
            "sandkeep",
            "create",
            "--cpu",
            "1.5",
            "--memory",
            "512M",
            "-e",
            "A=1",
            "-m",
            "job=7",
            "--timeout",
            "never",
        ];
        let Command::Create(args) = Cli::try_parse_from(words).unwrap().command else {
            panic!("not create")
        };
        let mut named = args.sandbox.clone();
        named.org = Some("acme".to_owned());
        assert_eq!(
            body(&named, args.timeout)["identity"],
            json!({"org": "acme", "task": null, "scopes": []})
        );
        assert_eq!(
            body(&args.sandbox, args.timeout),
            json!({
                "template": "base",
                "isolation": "auto",
                "limits": {"cpu_millis": 1500, "memory_mib": 512},
                "timeout_seconds": null,
                "env": {"A": "1"},
                "metadata": {"job": "7"},
            })
        );
    }
}
