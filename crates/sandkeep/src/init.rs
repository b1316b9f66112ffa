//! `init`: the storage and what boxes are made from.

use std::{
    io::{self, IsTerminal},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};
use sandkeep_model::{TemplateName, human_bytes};
use sandkeep_vault::{Progress, TemplateInfo, Vault};
use serde_json::{Value, json};

use crate::{
    args::InitArgs,
    cli::output::Output,
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
    let _attended = vault.attended();
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
            "growable_bytes": pool.growable_bytes,
            "template": view(&template),
            "made": made,
        }))?;
    } else {
        let word = if made { "made" } else { "was there already" };
        output.line(&format!(
            "template {} {word} ({}); storage {} with {} free, and room to grow by {}",
            template.name,
            human_bytes(template.size_bytes),
            pool.path.display(),
            human_bytes(pool.free_bytes),
            human_bytes(pool.growable_bytes),
        ))?;
    }
    Ok(0)
}

/// A template as the API shows it.
pub fn view(template: &TemplateInfo) -> Value {
    json!({
        "name": template.name,
        "created_at": template.created_at,
        "size_bytes": template.size_bytes,
        "origin": template.origin,
    })
}

/// A progress bar on a terminal; elsewhere a line per stage.
pub struct Bar {
    bar: ProgressBar,
    name: String,
}

impl Bar {
    pub fn new(name: &str) -> Self {
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

    pub fn follow(&self) -> impl FnMut(Progress) + Send + 'static {
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

    pub fn finish(&self) {
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
