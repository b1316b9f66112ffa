//! Commands that talk to a server.

pub mod audit;
mod build;
mod carry;
mod client;
mod cp;
pub mod credential;
mod denials;
mod exec;
pub mod identity;
mod list;
pub mod output;
mod policy;
mod race;
mod refusals;
mod run;
pub mod secret;
mod session;
mod sse;
pub mod template;
mod terminal;
mod time;
mod timeline;
mod url;
mod watch;

use std::{
    env,
    io::{self, Write},
    path::PathBuf,
};

use client::Client;
use output::{Output, clean};
use sandkeep_model::{Error, Secret};

use crate::{
    args::{Command, Global},
    config::DEFAULT_STATE,
    state::readable_key,
};

/// Runs one command; gives the exit code.
pub async fn run(global: &Global, command: Command) -> anyhow::Result<u8> {
    let output = Output::new(global);
    let client = Client::new(&global.url, find_key)?;
    let client = &client;
    match command {
        Command::Run(args) => run::run(client, output, args).await,
        Command::Create(args) => run::create(client, output, &args).await,
        Command::Ls(args) => list::ls(client, output, &args).await,
        Command::Url { sandbox, port } => url::url(client, output, &sandbox, port).await,
        Command::Inspect { sandbox } => list::inspect(client, output, &sandbox).await,
        Command::Exec(args) => exec::exec(client, output, args).await,
        Command::Ps { sandbox } => exec::ps(client, output, &sandbox).await,
        Command::Shell(args) => exec::shell(client, output, args).await,
        Command::Cp(args) => cp::cp(client, output, args).await,
        Command::Logs { sandbox, follow } => watch::logs(client, output, &sandbox, follow).await,
        Command::Events { sandbox, follow } => {
            watch::events(client, output, sandbox.as_deref(), follow).await
        }
        Command::Denials { sandbox, follow } => {
            denials::denials(client, output, &sandbox, follow).await
        }
        Command::Kill { sandboxes } => list::kill(client, output, &sandboxes).await,
        Command::Timeout { sandbox, span } => {
            list::set_timeout(client, output, &sandbox, span).await
        }
        Command::Time(command) => time::time(client, output, command).await,
        Command::Policy(command) => policy::policy(client, output, command).await,
        Command::Audit(args) => audit::audit(client, output, args).await,
        Command::Identity(command) => identity::identity(client, output, command).await,
        Command::Secret(command) => secret::secret(client, output, command).await,
        Command::Templates => list::templates(client, output).await,
        Command::Serve(_)
        | Command::Init(_)
        | Command::Doctor(_)
        | Command::Uninstall(_)
        | Command::Backup(_)
        | Command::Restore(_)
        | Command::Key(_)
        | Command::Storage(_)
        | Command::Verify(_)
        | Command::Template(_)
        | Command::Completions { .. } => {
            Err(Error::internal("this command needs no server").into())
        }
    }
}

/// The key in the environment; else, for a server on this machine, the one in its state
/// directory if we may read it.
fn find_key(local: bool) -> Option<Secret> {
    key_in_environment().or_else(|| {
        let state =
            env::var_os("SANDKEEP_STATE").map_or_else(|| DEFAULT_STATE.into(), PathBuf::from);
        local.then(|| readable_key(&state)).flatten()
    })
}

fn key_in_environment() -> Option<Secret> {
    let key = env::var("SANDKEEP_API_KEY").ok()?;
    (!key.is_empty()).then(|| Secret::new(key.trim()))
}

/// Tells what went wrong, on standard error: for people, or as the API says it.
pub fn complain(error: &anyhow::Error, json: bool) {
    let typed = error.downcast_ref::<Error>();
    let mut stderr = io::stderr().lock();
    // If even this can not be written there is nobody to tell.
    let _ = if json {
        let told = typed
            .cloned()
            .unwrap_or_else(|| Error::internal(format!("{error:#}")));
        writeln!(stderr, "{}", serde_json::json!({ "error": told }))
    } else {
        let (message, hint) = match typed {
            Some(typed) => (typed.message.clone(), typed.hint.as_deref()),
            None => (format!("{error:#}"), None),
        };
        let multiline: Vec<String> = message.lines().map(clean).collect();
        let written = writeln!(stderr, "error: {}", multiline.join("\n"));
        match hint {
            Some(hint) => written.and_then(|()| writeln!(stderr, "hint: {}", clean(hint))),
            None => written,
        }
    };
}
