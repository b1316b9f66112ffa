//! `storage`: what an operator does to the storage itself.

use crate::{
    args::{RepairArgs, StorageCommand},
    cli::output::Output,
    config::{Config, LogFormat},
    logging,
    state::{StateDir, require_root},
};
use sandkeep_model::Error;
use serde_json::json;

pub async fn storage(output: Output, command: StorageCommand) -> anyhow::Result<u8> {
    let StorageCommand::Repair(args) = command;
    repair(output, &args).await
}

async fn repair(output: Output, args: &RepairArgs) -> anyhow::Result<u8> {
    let config = Config::load(args.place.settings(), None)?;
    logging::start(Some("warn"), LogFormat::Text)?;
    require_root("storage repair")?;
    sandkeep_vault::release_if_full(&config.state)?;
    let state = StateDir::take(&config.state)?;
    let (vault, end) = (config.vault(), args.end_sandboxes);
    let done = tokio::task::spawn_blocking(move || sandkeep_vault::repair(&vault, end))
        .await
        .map_err(|_| Error::internal("the repair was broken off"))??;
    drop(state);
    if output.json {
        output.json(&json!({ "was_well": done.was_well, "ended": done.ended }))?;
    } else if done.was_well {
        output.line("the storage was writable already")?;
    } else {
        output.line(&format!(
            "the storage is writable again; {} processes that used it were ended",
            done.ended
        ))?;
    }
    Ok(0)
}
