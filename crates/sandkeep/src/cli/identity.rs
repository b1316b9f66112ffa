//! `identity`: the keys that sign the tokens of boxes.

use clap::Subcommand;
use http::Method;

use super::{
    client::Client,
    output::{Output, clean},
};

#[derive(Debug, Subcommand)]
pub enum IdentityCommand {
    /// Sign tokens of boxes with a new key; the old one verifies until its last token has ended
    Rotate,
}

pub async fn identity(
    client: &Client,
    output: Output,
    command: IdentityCommand,
) -> anyhow::Result<u8> {
    let IdentityCommand::Rotate = command;
    let request = client.request(Method::POST, &["identity", "rotate"])?;
    let made = client.json(request).await?;
    if output.json {
        output.json(&made)?;
    } else {
        let kid = made["kid"].as_str().map(clean).unwrap_or_default();
        output.line(&format!("tokens are signed with the key {kid} from now on"))?;
    }
    Ok(0)
}
