//! `template`: what boxes are made from. A running server holds the storage and does the work
//! itself; while it is stopped, this process takes its place.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use futures_util::TryStreamExt as _;
use http::Method;
use sandkeep_model::{Code, Error, Result, TemplateName, human_bytes};
use sandkeep_vault::{Attended, ImportLimits, Progress, Stage, Vault};
use serde_json::{Value, json};

use super::{
    build,
    client::{Client, is_sandkeep},
    cp::{at, chunks},
    find_key, key_in_environment,
    list::{show_templates, templates},
    output::Output,
};
use crate::{
    args::{DEFAULT_URL, Global, Place},
    config::{Config, LogFormat},
    init::{Bar, view},
    logging,
    state::{StateDir, readable_key, require_root, served_at},
    template_args::TemplateCommand,
};

pub async fn template(global: &Global, command: TemplateCommand) -> anyhow::Result<u8> {
    logging::start(Some("warn"), LogFormat::Text)?;
    let output = Output::new(global);
    match command {
        TemplateCommand::Import { name, file, place } => {
            let (made, by) = match Storage::find(global, &place, "template import").await? {
                Storage::Served(client) => {
                    let made = import_there(&client, &name, &file).await?;
                    (made, format!(" by the server at {}", client.address()))
                }
                Storage::Ours { vault, .. } => {
                    (import_here(&vault, &name, file).await?, String::new())
                }
            };
            if output.json {
                output.json(&made)?;
            } else {
                let size = human_bytes(made["size_bytes"].as_u64().unwrap_or_default());
                output.line(&format!("template {name} imported{by} ({size})"))?;
            }
            Ok(0)
        }
        TemplateCommand::Rm { names, place } => {
            let storage = Storage::find(global, &place, "template rm").await?;
            let mut removed = Vec::new();
            let mut failed = None;
            for name in &names {
                let done = match &storage {
                    Storage::Served(client) => {
                        let request =
                            client.request(Method::DELETE, &["templates", name.as_str()])?;
                        client.json(request).await.map(drop)
                    }
                    Storage::Ours { vault, .. } => vault.remove_template(name).await,
                };
                // The others are to go even if this one cannot.
                match done {
                    Ok(()) => removed.push(name),
                    Err(error) => {
                        if let Some(earlier) = failed.replace(error) {
                            super::complain(&earlier.into(), output.json);
                        }
                    }
                }
            }
            if output.json {
                output.json(&json!({ "removed": removed }))?;
            } else {
                for name in removed {
                    output.line(name.as_str())?;
                }
            }
            match failed {
                Some(error) => Err(error.into()),
                None => Ok(0),
            }
        }
        TemplateCommand::Build(args) => {
            let client = Storage::served(global, &args.place, "template build").await?;
            build::build(&client, output, &args).await
        }
        TemplateCommand::Logs { name, place } => {
            let client = Storage::served(global, &place, "template logs").await?;
            build::logs(&client, output, &name).await
        }
        TemplateCommand::Cancel { name, place } => {
            let client = Storage::served(global, &place, "template cancel").await?;
            build::cancel(&client, output, &name).await
        }
        TemplateCommand::Inspect { name, place } => {
            let client = Storage::served(global, &place, "template inspect").await?;
            output.json(&client.get(&["templates", name.as_str()]).await?)?;
            Ok(0)
        }
        TemplateCommand::Ls { place } => {
            match Storage::find(global, &place, "template ls").await? {
                Storage::Served(client) => templates(&client, output).await,
                Storage::Ours { vault, .. } => {
                    let list: Vec<Value> = vault.templates().await?.iter().map(view).collect();
                    show_templates(output, &list)
                }
            }
        }
    }
}

/// Who has the storage.
enum Storage {
    Served(Client),
    Ours {
        _state: StateDir,
        vault: Vault,
        /// A large import may need more room than there is.
        _attended: Attended,
    },
}

impl Storage {
    /// The server that runs: what needs boxes can not be done without one.
    async fn served(global: &Global, place: &Place, command: &str) -> Result<Client> {
        if let Some(client) = named(global, place).await? {
            return Ok(client);
        }
        let config = Config::load(place.settings(), None)?;
        // Without a directory there is no server, and looking for one must not make it.
        let taken = if config.state.exists() {
            require_root(command)?;
            StateDir::take(&config.state).map(drop)
        } else {
            Ok(())
        };
        match taken {
            Ok(()) => Err(
                Error::host_not_ready(format!("{command} needs a server that runs")).hint(format!(
                    "start it with `sandkeep serve`, or name it with --url or --state; \
                     nobody answers at {DEFAULT_URL} or serves {}",
                    config.state.display()
                )),
            ),
            Err(error) => holder(&config.state, error),
        }
    }

    async fn find(global: &Global, place: &Place, command: &str) -> Result<Self> {
        if let Some(client) = named(global, place).await? {
            return Ok(Self::Served(client));
        }
        let config = Config::load(place.settings(), None)?;
        require_root(command)?;
        match StateDir::take(&config.state) {
            Ok(state) => {
                let vault = Vault::open(config.vault()).await?;
                Ok(Self::Ours {
                    _attended: vault.attended(),
                    vault,
                    _state: state,
                })
            }
            Err(error) => holder(&config.state, error).map(Self::Served),
        }
    }
}

/// Whoever names a server and no directory means that server, wherever it is; whoever names
/// neither means the one that all other commands talk to, if it is there.
async fn named(global: &Global, place: &Place) -> Result<Option<Client>> {
    let meant =
        place.state.is_none() && (global.url != DEFAULT_URL || is_sandkeep(DEFAULT_URL).await);
    meant
        .then(|| Client::new(&global.url, find_key))
        .transpose()
}

/// The server because of which a directory could not be taken.
fn holder(state: &Path, error: Error) -> Result<Client> {
    if error.code != Code::Conflict {
        return Err(error);
    }
    // The address is in the directory, so it is the server that holds it and no other.
    let Some(address) = served_at(state) else {
        return Err(error.hint("it does not serve yet; try again in a moment"));
    };
    let key = || key_in_environment().or_else(|| readable_key(state));
    Client::new(&format!("http://{address}"), |_| key())
}

async fn import_here(vault: &Vault, name: &TemplateName, file: PathBuf) -> Result<Value> {
    let bar = Bar::new(name.as_str());
    let limits = ImportLimits::default();
    let imported = if is_stdin(&file) {
        vault
            .import_reader(name, io::stdin(), limits, bar.follow())
            .await
    } else {
        vault.import_tar(name, file, limits, bar.follow()).await
    };
    bar.finish();
    imported.map(|made| view(&made))
}

async fn import_there(client: &Client, name: &TemplateName, file: &Path) -> Result<Value> {
    let request = client.request(Method::POST, &["templates", name.as_str()])?;
    send_file(client, request, name.as_str(), file).await
}

/// Sends a file, or standard input, with a bar of this name; returns the answer.
pub(super) async fn send_file(
    client: &Client,
    request: reqwest::RequestBuilder,
    name: &str,
    file: &Path,
) -> Result<Value> {
    let (archive, size): (Box<dyn Read + Send>, u64) = if is_stdin(file) {
        (Box::new(io::stdin()), 0)
    } else {
        let opened = File::open(file).map_err(|error| at(file, error))?;
        let size = opened.metadata().map_err(|error| at(file, error))?.len();
        (Box::new(opened), size)
    };
    let bar = Bar::new(name);
    let mut follow = bar.follow();
    let mut sent = 0_u64;
    // The server unpacks as it receives, so what is sent is about what is done.
    let body = chunks(archive).inspect_ok(move |piece| {
        sent += piece.len() as u64;
        follow(Progress {
            stage: Stage::Unpacking,
            fraction: part_of(sent, size),
        });
    });
    let request = request.body(reqwest::Body::wrap_stream(body));
    let answer = client.send(request).await;
    bar.finish();
    client.read_json(answer?).await
}

pub(super) fn is_stdin(file: &Path) -> bool {
    file.as_os_str() == "-"
}

/// Never all of it: the server still has to bring it to the disk.
#[expect(
    clippy::cast_precision_loss,
    reason = "for a bar of a few dozen characters"
)]
fn part_of(sent: u64, size: u64) -> f32 {
    if size == 0 {
        return 0.0;
    }
    (sent as f32 / size as f32).min(1.0) * 0.97
}
