//! What a template has its copies run.
//!
//! Programs that were copied with their memory hold what they held: generators of random numbers
//! that nothing outside can reseed, ids, leases. The template may name a command that tells them.

use std::time::Duration;

use sandkeep_agent_api::process::{EndEvent, Output, ProcessConfig, ProcessEvent, StartRequest};
use sandkeep_agent_client::Agent;
use sandkeep_model::{Code, Error, Result, Sandbox, SandboxId};
use sandkeep_ward::Ward;

use crate::agent;

/// Whoever asked for the sandbox waits for it.
const LONGEST: Duration = Duration::from_secs(60);
const MOST_SAID: usize = 400;

/// Runs what the template of this sandbox wants to be run in a copy.
pub async fn run(ward: &dyn Ward, sandbox: &Sandbox) -> Result<()> {
    tell(
        ward,
        &sandbox.id,
        sandbox.time.defaults.after_restore.as_deref(),
    )
    .await
}

/// Runs the command, if there is one, to its end.
pub async fn tell(ward: &dyn Ward, id: &SandboxId, command: Option<&str>) -> Result<()> {
    let Some(command) = command else {
        return Ok(());
    };
    let mut said = Vec::new();
    let ran = async {
        let agent = agent::agent(ward, id).await?;
        to_its_end(agent, command, &mut said).await
    };
    let ended = match tokio::time::timeout(LONGEST, ran).await {
        Ok(ended) => ended.map_err(|error| error.context("the after_restore command"))?,
        Err(_) => {
            return Err(Error::new(
                Code::DeadlineExceeded,
                format!(
                    "the after_restore command did not end within {} s{}",
                    LONGEST.as_secs(),
                    last_line(&said)
                ),
            )
            .hint("have it end when the programs of the copy were told; what goes on belongs into the background")
            .retryable(false));
        }
    };
    if ended.exited && ended.exit_code == 0 {
        return Ok(());
    }
    Err(Error::conflict(format!(
        "the after_restore command ended with {}{}",
        ended.status,
        last_line(&said)
    ))
    .hint("a copy whose programs were not told that they are one is not given out; mend the command and build the template again"))
}

async fn to_its_end(agent: Agent, command: &str, said: &mut Vec<u8>) -> Result<EndEvent> {
    let words = ["-l", "-c", command];
    let request = StartRequest {
        process: Some(ProcessConfig {
            cmd: "/bin/bash".to_owned(),
            args: words.map(str::to_owned).to_vec(),
            ..ProcessConfig::default()
        }),
        stdin: Some(false),
        ..StartRequest::default()
    };
    let mut stream = agent.start(&request, None, Some(LONGEST)).await?;
    loop {
        match stream.next().await? {
            Some(ProcessEvent::Data(
                Output::Stdout(blob) | Output::Stderr(blob) | Output::Pty(blob),
            )) => {
                said.extend_from_slice(&blob.0);
                let more = said.len().saturating_sub(MOST_SAID);
                said.drain(..more);
            }
            Some(ProcessEvent::End(end)) => return Ok(end),
            Some(ProcessEvent::Start(_) | ProcessEvent::Keepalive(_)) => {}
            None => {
                return Err(Error::new(
                    Code::BoxUnreachable,
                    "the sandbox ended while it ran",
                ));
            }
        }
    }
}

/// For the end of a message.
fn last_line(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    match text.lines().rev().find(|line| !line.trim().is_empty()) {
        Some(line) => format!(": {}", line.trim()),
        None => String::new(),
    }
}
