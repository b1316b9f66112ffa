//! Doing things in a box, through its agent.

use crate::Ward;
use sandkeep_agent_api::process as wire;
use sandkeep_agent_client::{Agent, ProcessStream};
use sandkeep_model::SandboxId;
use std::time::Duration;
use tokio::time::timeout;

const DEADLINE: Duration = Duration::from_secs(60);

/// What a command did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// -1 when a signal ended it.
    pub exit_code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    pub fn success(&self) -> bool {
        self.exit_code == 0
    }
}

/// A fresh connection to the agent, which has answered that it is well.
pub async fn agent(ward: &dyn Ward, id: &SandboxId) -> Agent {
    let connect = async {
        let channel = ward.connect(id).await.expect("the channel opens");
        let mut agent = Agent::over(channel).await.expect("the agent speaks HTTP");
        agent.health().await.expect("the agent is well");
        agent
    };
    timeout(DEADLINE, connect)
        .await
        .expect("the agent answers in time")
}

/// Runs a shell command as root.
pub async fn run(ward: &dyn Ward, id: &SandboxId, command: &str) -> Output {
    run_as(ward, id, "root", command).await
}

/// Runs a shell command as any user of the box.
pub async fn run_as(ward: &dyn Ward, id: &SandboxId, user: &str, command: &str) -> Output {
    timeout(DEADLINE, talk(ward, id, user, command))
        .await
        .expect("the command ends in time")
}

/// Starts a shell command as root and does not wait for it.
pub(super) async fn begin(ward: &dyn Ward, id: &SandboxId, command: &str) -> ProcessStream {
    start(ward, id, "root", command).await
}

async fn start(ward: &dyn Ward, id: &SandboxId, user: &str, command: &str) -> ProcessStream {
    let request = wire::StartRequest {
        process: Some(wire::ProcessConfig {
            cmd: "/bin/bash".to_owned(),
            args: vec!["-c".to_owned(), command.to_owned()],
            cwd: Some("/".to_owned()),
            ..wire::ProcessConfig::default()
        }),
        stdin: Some(false),
        ..wire::StartRequest::default()
    };
    agent(ward, id)
        .await
        .start(&request, Some(user), None)
        .await
        .expect("the command starts")
}

async fn talk(ward: &dyn Ward, id: &SandboxId, user: &str, command: &str) -> Output {
    let mut stream = start(ward, id, user, command).await;
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let mut exit_code = None;
    while let Some(event) = stream.next().await.expect("the command can be followed") {
        match event {
            wire::ProcessEvent::Data(wire::Output::Stdout(bytes) | wire::Output::Pty(bytes)) => {
                stdout.extend_from_slice(&bytes.0);
            }
            wire::ProcessEvent::Data(wire::Output::Stderr(bytes)) => {
                stderr.extend_from_slice(&bytes.0);
            }
            wire::ProcessEvent::End(end) => exit_code = Some(end.exit_code),
            wire::ProcessEvent::Start(_) | wire::ProcessEvent::Keepalive(_) => {}
        }
    }
    Output {
        exit_code: exit_code.expect("the agent tells how the command ended"),
        stdout: String::from_utf8_lossy(&stdout).into_owned(),
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
    }
}
