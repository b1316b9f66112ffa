//! `audit`: what happened, who did it, and whether the record is what was written.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Args, Subcommand};
use http::Method;
use sandkeep_audit::{Verdict, verify, verify_file};
use sandkeep_model::{Error, Result};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{
    client::Client,
    output::{Output, clean},
};

const INTERVAL: Duration = Duration::from_millis(500);
const PAGE: usize = 1000;

pub const AUDIT_EXAMPLES: &str = "\
Examples:
  sandkeep audit --box i4f9                          everything about a box, oldest first
  sandkeep audit --kind connection_denied -f         refusals, as they happen
  sandkeep audit verify                              is the log what was written?
  sandkeep audit verify /var/lib/sandkeep/audit      the same without a server; a file does, too";

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct AuditArgs {
    #[command(subcommand)]
    pub command: Option<AuditCommand>,
    /// Only about this box: its id, or the beginning of it
    #[arg(long = "box", value_name = "BOX")]
    pub sandbox: Option<String>,
    /// Only this kind, for example connection_denied or token_issued
    #[arg(long, value_name = "KIND")]
    pub kind: Option<String>,
    /// Go on until Ctrl-C
    #[arg(short, long)]
    pub follow: bool,
}

#[derive(Debug, Subcommand)]
pub enum AuditCommand {
    /// Check the whole log; exit code 1 when it is not what was written
    Verify {
        /// The directory of a log, or one file of it; needs no server
        #[arg(value_name = "PATH")]
        path: Option<PathBuf>,
    },
}

pub async fn audit(client: &Client, output: Output, args: AuditArgs) -> anyhow::Result<u8> {
    if args.command.is_some() {
        let verdict = client.get(&["audit", "verify"]).await?;
        return tell(output, &verdict);
    }
    let mut query: Vec<(&str, String)> = vec![("limit", PAGE.to_string())];
    if let Some(name) = &args.sandbox {
        // Also boxes that are gone: only the server's own list needs them alive.
        let id = match name.parse::<sandkeep_model::SandboxId>() {
            Ok(id) => id.to_string(),
            Err(_) => client.find(name).await?,
        };
        query.push(("sandbox_id", id));
    }
    if let Some(kind) = args.kind {
        query.push(("kind", kind));
    }
    let mut after = 0;
    loop {
        let request = client
            .request(Method::GET, &["audit"])?
            .query(&query)
            .query(&[("after", after)]);
        let answer = client.json(request).await?;
        let entries = answer["entries"].as_array().cloned().unwrap_or_default();
        for entry in &entries {
            after = entry["seq"].as_u64().unwrap_or(after).max(after);
            if output.json {
                output.json_line(entry)?;
            } else {
                output.line(&line(entry))?;
            }
        }
        match (entries.len() < PAGE, args.follow) {
            (false, _) => {}
            (true, true) => sleep(INTERVAL).await,
            (true, false) => return Ok(0),
        }
    }
}

fn line(entry: &Value) -> String {
    let text = |name: &str| entry[name].as_str().map(clean).unwrap_or_default();
    let detail: Vec<String> = entry["detail"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, value)| match value.as_str() {
            Some(value) => format!("{}={}", clean(name), clean(value)),
            None => format!("{}={value}", clean(name)),
        })
        .collect();
    let about = match entry["sandbox"].as_str() {
        // A box that did something itself stands there already.
        Some(id) if entry["actor"] != json!(format!("box:{id}")) => format!(" {}", clean(id)),
        _ => String::new(),
    };
    format!(
        "{} {} {} {}{about} {}",
        entry["seq"],
        text("at"),
        text("actor"),
        text("action"),
        detail.join(" ")
    )
}

/// Checks a log on this machine.
pub fn verify_here(output: Output, path: &Path) -> anyhow::Result<u8> {
    let verdict = look(path)?;
    let mut told = serde_json::to_value(&verdict)?;
    told["sound"] = verdict.is_sound().into();
    tell(output, &told)
}

fn look(path: &Path) -> Result<Verdict> {
    let kind = std::fs::metadata(path)
        .map_err(|error| Error::from(error).context(format!("looking at {}", path.display())))?;
    if kind.is_dir() {
        verify(path, None)
    } else {
        verify_file(path)
    }
}

fn tell(output: Output, verdict: &Value) -> anyhow::Result<u8> {
    let sound = verdict["sound"] == true;
    if output.json {
        output.json(verdict)?;
    } else if sound {
        let head = &verdict["head"];
        output.line(&format!(
            "{}: {} entries; the last is {} with hash {}",
            output.good("sound"),
            verdict["entries"],
            head["seq"],
            head["hash"].as_str().map(clean).unwrap_or_default()
        ))?;
    } else {
        let broken = &verdict["broken"];
        let text = |name: &str| broken[name].as_str().map(clean).unwrap_or_default();
        output.line(&format!(
            "{}: {} line {}: {} ({} entries before it are sound)",
            output.bad("broken"),
            text("segment"),
            broken["line"],
            text("why"),
            verdict["entries"]
        ))?;
    }
    Ok(u8::from(!sound))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_who_did_what() {
        let entry = json!({
            "seq": 7, "at": "T", "actor": "key:ab", "sandbox": "i1", "action": "sandbox_killed",
            "detail": {"reason": "by \u{1b}[2Jrequest", "event": 3},
        });
        assert_eq!(
            line(&entry),
            "7 T key:ab sandbox_killed i1 event=3 reason=by [2Jrequest"
        );
        let entry = json!({
            "seq": 8, "at": "T", "actor": "box:i1", "sandbox": "i1", "action": "name_denied",
            "detail": {"host": "a.test"},
        });
        assert_eq!(line(&entry), "8 T box:i1 name_denied host=a.test");
    }
}
