//! `init` and `template`: the storage and what boxes are made from. They need no server.

use std::{
    io::{self, IsTerminal},
    path::PathBuf,
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};
use sandkeep_model::{Error, Result, TemplateName, human_bytes};
use sandkeep_vault::{ImportLimits, Progress, TemplateInfo, Vault};
use serde_json::{Value, json};

use crate::{
    args::{InitArgs, Place, TemplateCommand},
    cli::{output::Output, show_templates},
    config::{Config, LogFormat},
    logging,
    state::{StateDir, require_root},
};

const BASE: &str = "base";

pub async fn init(output: Output, args: &InitArgs) -> anyhow::Result<u8> {
    let config = Config::load(args.place.settings(), args.config.as_deref())?;
    logging::start(Some("warn"), LogFormat::Text)?;
    require_root("init")?;
    let state = StateDir::take(&config.state)?;
    state.api_key(std::env::var("SANDKEEP_API_KEY").ok())?;
    let vault = Vault::open(config.vault()).await?;
    let base: TemplateName = BASE.parse()?;
    let (template, made) = match vault.template(&base).await? {
        Some(found) => (found, false),
        None => {
            let bar = Bar::new("base template");
            let built = vault.build_base(bar.follow()).await;
            bar.finish();
            (built?, true)
        }
    };
    let pool = vault.pool().await?;
    if output.json {
        output.json(&json!({
            "state": config.state,
            "storage": pool.path,
            "free_bytes": pool.free_bytes,
            "template": view(&template),
            "made": made,
        }))?;
    } else {
        let word = if made { "made" } else { "was there already" };
        output.line(&format!(
            "template {} {word} ({}); storage {} with {} free",
            template.name,
            human_bytes(template.size_bytes),
            pool.path.display(),
            human_bytes(pool.free_bytes),
        ))?;
    }
    Ok(0)
}

pub async fn template(output: Output, command: TemplateCommand) -> anyhow::Result<u8> {
    logging::start(Some("warn"), LogFormat::Text)?;
    match command {
        TemplateCommand::Import { name, file, place } => import(output, name, file, &place).await,
        TemplateCommand::Ls { place } => {
            let (_state, vault) = open(&place, "template ls").await?;
            let list: Vec<Value> = vault.templates().await?.iter().map(view).collect();
            show_templates(output, &list)
        }
    }
}

async fn import(
    output: Output,
    name: TemplateName,
    file: PathBuf,
    place: &Place,
) -> anyhow::Result<u8> {
    let (_state, vault) = open(place, "template import").await?;
    let bar = Bar::new(name.as_str());
    let limits = ImportLimits::default();
    let imported = if file.as_os_str() == "-" {
        vault
            .import_reader(&name, io::stdin(), limits, bar.follow())
            .await
    } else {
        vault.import_tar(&name, file, limits, bar.follow()).await
    };
    bar.finish();
    let template = imported?;
    if output.json {
        output.json(&view(&template))?;
    } else {
        output.line(&format!(
            "template {} imported ({})",
            template.name,
            human_bytes(template.size_bytes)
        ))?;
    }
    Ok(0)
}

async fn open(place: &Place, command: &str) -> Result<(StateDir, Vault)> {
    let config = Config::load(place.settings(), None)?;
    require_root(command)?;
    let state = StateDir::take(&config.state).map_err(|error| {
        // A running server holds the storage; it can answer the question itself.
        if error.code == sandkeep_model::Code::Conflict {
            let hint = "stop the server first (boxes go on running); `sandkeep templates` lists them while it runs";
            Error { hint: Some(hint.to_owned()), ..error }
        } else {
            error
        }
    })?;
    let vault = Vault::open(config.vault()).await?;
    Ok((state, vault))
}

fn view(template: &TemplateInfo) -> Value {
    json!({
        "name": template.name,
        "created_at": template.created_at,
        "size_bytes": template.size_bytes,
        "origin": template.origin,
    })
}

/// A progress bar on a terminal; elsewhere a line per stage.
struct Bar {
    bar: ProgressBar,
    name: String,
}

impl Bar {
    fn new(name: &str) -> Self {
        let bar = if io::stderr().is_terminal() {
            let bar = ProgressBar::new(1000);
            if let Ok(style) = ProgressStyle::with_template(
                "{prefix} [{bar:30}] {percent:>3}% {elapsed_precise} {msg}",
            ) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_prefix(name.to_owned());
            bar.enable_steady_tick(Duration::from_millis(250));
            bar
        } else {
            ProgressBar::hidden()
        };
        Self {
            bar,
            name: name.to_owned(),
        }
    }

    fn follow(&self) -> impl FnMut(Progress) + Send + 'static {
        let bar = self.bar.clone();
        let name = self.name.clone();
        let mut said = None;
        move |progress| {
            let words = progress.stage.words();
            bar.set_position(thousandths(progress.fraction));
            bar.set_message(words);
            if bar.is_hidden() && said.replace(words) != Some(words) {
                // Progress is for people; the result goes to standard output.
                let _ = io::Write::write_all(
                    &mut io::stderr().lock(),
                    format!("{name}: {words}\n").as_bytes(),
                );
            }
        }
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped to 0..=1000 before"
)]
fn thousandths(fraction: f32) -> u64 {
    (fraction.clamp(0.0, 1.0) * 1000.0) as u64
}
