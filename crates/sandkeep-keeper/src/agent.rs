//! Talking to a fresh box's agent.

use std::{collections::BTreeMap, time::Duration};

use sandkeep_agent_api::host::InitRequest;
use sandkeep_agent_client::Agent;
use sandkeep_model::{Code, Error, Result, Sandbox, SandboxId, TemplateName, Timestamp};
use sandkeep_ward::{Channel, Ward};

use crate::{registry::Entry, time::Counts};

/// A unix socket connects at once or something is wrong.
const CONNECT: Duration = Duration::from_secs(5);
/// The agent of a box on a busy machine gets this long to answer.
const ANSWER: Duration = Duration::from_secs(15);

/// A fresh channel; whatever goes wrong reads as "the box does not answer".
pub async fn channel(ward: &dyn Ward, id: &SandboxId) -> Result<Channel> {
    let unreachable = |why: String| {
        Error::new(
            Code::BoxUnreachable,
            format!("sandbox \"{id}\" does not answer: {why}"),
        )
        .hint("try again; if it stays so, kill the sandbox and make a new one")
    };
    match tokio::time::timeout(CONNECT, ward.connect(id)).await {
        Ok(Ok(channel)) => Ok(channel),
        Ok(Err(error)) => Err(unreachable(error.message)),
        Err(_) => Err(unreachable("no connection in time".to_owned())),
    }
}

pub async fn agent(ward: &dyn Ward, id: &SandboxId) -> Result<Agent> {
    let channel = channel(ward, id).await?;
    Ok(Agent::over(channel).await?.deadline(ANSWER))
}

/// The agent of a box that will be frozen: whoever cuts its visitors knows when we have let go.
pub async fn visit(entry: &Entry) -> Result<Agent> {
    let visit = entry.activity.enter(Counts::Words);
    let channel = channel(entry.ward.as_ref(), &entry.id).await?;
    Ok(Agent::over(visit.over(channel)).await?.deadline(ANSWER))
}

/// What a box is told about itself.
pub fn identity(
    id: &SandboxId,
    template: &TemplateName,
    env: &BTreeMap<String, String>,
) -> InitRequest {
    InitRequest {
        sandbox_id: id.to_string(),
        template_id: template.to_string(),
        env_vars: env.clone(),
        default_user: None,
        default_workdir: None,
        hostname: Some(id.to_string()),
        keep_machine_id: false,
        generation: None,
        timestamp_ms: Some(Timestamp::now().millis()),
    }
}

pub fn identity_of(sandbox: &Sandbox) -> InitRequest {
    let defaults = &sandbox.time.defaults;
    InitRequest {
        default_user: defaults.user.clone(),
        default_workdir: defaults.workdir.clone(),
        ..identity(&sandbox.id, &sandbox.template, &sandbox.env)
    }
}

/// What no other sandbox is told, and this one no second time.
pub fn new_generation() -> String {
    let bytes = sandkeep_model::random_bytes::<16>();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Tells a box who it is, and whom to trust if anybody, over the connection that was kept open, or a fresh one when that
/// has been closed meanwhile. Telling it twice does no harm.
pub async fn introduce(
    kept: Option<Agent>,
    ward: &dyn Ward,
    id: &SandboxId,
    request: &InitRequest,
    authority: Result<Option<String>>,
) -> Result<()> {
    let authority = authority?;
    let authority = authority.as_deref();
    if let Some(mut agent) = kept.filter(|agent| !agent.is_closed()) {
        match tell(&mut agent, request, authority).await {
            Err(error) if error.code == Code::BoxUnreachable => {
                tracing::debug!(%id, %error, "a kept connection was dead");
            }
            done => return done,
        }
    }
    tell(&mut agent(ward, id).await?, request, authority).await
}

async fn tell(agent: &mut Agent, request: &InitRequest, authority: Option<&str>) -> Result<()> {
    agent.init(request).await?;
    match authority {
        Some(authority) => agent.trust(authority).await,
        None => Ok(()),
    }
}
