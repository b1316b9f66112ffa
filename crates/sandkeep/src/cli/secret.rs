//! `secret`: values that boxes use and never see.

use std::io::{self, BufRead, IsTerminal, Read, Write};

use clap::Subcommand;
use http::Method;
use sandkeep_model::{Error, Result, Secret};
use serde_json::{Value, json};
use tokio::signal::ctrl_c;

use super::{
    client::Client,
    output::{Output, clean},
    terminal::HiddenInput,
};

const LARGEST: u64 = 64 * 1024;

pub const SECRET_EXAMPLES: &str = "\
Examples:
  sandkeep secret set github                      asks for the value, without showing it
  pass show github | sandkeep secret set github   or takes it from a pipe
  sandkeep run --allow api.example.org --credential github@api.example.org -- ./agent

Values are never shown again, and never given to a box: the server adds them to its requests.";

#[derive(Debug, Subcommand)]
pub enum SecretCommand {
    /// Store a value, or a new one; read from standard input or asked for, never an argument
    Set {
        /// 1 to 64 of A-Z, a-z, 0-9, - and _
        name: String,
    },
    /// List secrets, and where they are bound; never the values
    #[command(visible_alias = "list")]
    Ls,
    /// Delete secrets
    Rm {
        #[arg(required = true)]
        names: Vec<String>,
        /// Although boxes have them bound; their requests that need them then fail
        #[arg(long)]
        force: bool,
    },
}

pub async fn secret(client: &Client, output: Output, command: SecretCommand) -> anyhow::Result<u8> {
    match command {
        SecretCommand::Set { name } => set(client, output, &name).await,
        SecretCommand::Ls => list(client, output).await,
        SecretCommand::Rm { names, force } => {
            for name in names {
                let request = client
                    .request(Method::DELETE, &["secrets", &name])?
                    .query(&[("force", force)]);
                client.json(request).await?;
            }
            Ok(0)
        }
    }
}

async fn set(client: &Client, output: Output, name: &str) -> anyhow::Result<u8> {
    let value = if io::stdin().is_terminal() {
        ask(name).await?
    } else {
        piped(io::stdin().lock())?
    };
    let request = client
        .request(Method::POST, &["secrets"])?
        .json(&json!({"name": name, "value": value.expose()}));
    let made = client.json(request).await?;
    if output.json {
        output.json(&made)?;
    } else {
        let version = made["version"].as_u64().unwrap_or(1);
        output.line(&format!("{} is stored (version {version})", clean(name)))?;
    }
    Ok(0)
}

/// Whatever ends the prompt, the terminal shows again what is typed.
async fn ask(name: &str) -> Result<Secret> {
    let hidden = HiddenInput::enter()?;
    let mut stderr = io::stderr();
    write!(stderr, "Value of {} (not shown): ", clean(name))?;
    stderr.flush()?;
    let typed = tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        let mut bounded = io::stdin().lock().take(LARGEST + 1);
        bounded.read_line(&mut line).map(|_| line)
    });
    let typed = tokio::select! {
        typed = typed => typed,
        _ = ctrl_c() => {
            drop(hidden);
            // Somebody still reads the terminal; only the end of the process ends that.
            std::process::exit(130);
        }
    };
    drop(hidden);
    writeln!(stderr)?;
    let line = typed.map_err(|_| Error::internal("reading the terminal was broken off"))??;
    checked(line)
}

fn piped(from: impl Read) -> Result<Secret> {
    let mut text = String::new();
    from.take(LARGEST + 1)
        .read_to_string(&mut text)
        .map_err(|error| Error::from(error).context("reading the value"))?;
    checked(text)
}

/// The line break after it is nearly never meant.
fn checked(text: String) -> Result<Secret> {
    let whole = Secret::new(text);
    let value = whole.expose();
    if value.len() as u64 > LARGEST {
        return Err(Error::invalid("value", "the value is larger than 64 KiB"));
    }
    let value = value.strip_suffix('\n').unwrap_or(value);
    let value = value.strip_suffix('\r').unwrap_or(value);
    if value.is_empty() {
        return Err(Error::invalid("value", "the value is empty")
            .hint("type it, or pipe it in: printf %s \"$TOKEN\" | sandkeep secret set NAME"));
    }
    Ok(Secret::new(value))
}

async fn list(client: &Client, output: Output) -> anyhow::Result<u8> {
    let answer = client.get(&["secrets"]).await?;
    if output.json {
        output.json(&answer)?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = answer["secrets"]
        .as_array()
        .into_iter()
        .flatten()
        .map(row)
        .collect();
    output.table(&["NAME", "VERSION", "CHANGED", "BOUND TO"], &rows)?;
    Ok(0)
}

fn row(secret: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let bound: Vec<String> = secret["bound_to"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|bound| format!("{} ({})", text(&bound["host"]), text(&bound["sandbox_id"])))
        .collect();
    vec![
        text(&secret["name"]),
        secret["version"].to_string(),
        text(&secret["updated_at"]),
        bound.join(", "),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_break_at_the_end_is_not_part_of_it() {
        for (given, meant) in [("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("a", "a")] {
            assert_eq!(piped(given.as_bytes()).unwrap().expose(), meant);
        }
        for bad in ["", "\n"] {
            assert!(piped(bad.as_bytes()).is_err());
        }
        assert!(piped("x".repeat(70_000).as_bytes()).is_err());
    }
}
