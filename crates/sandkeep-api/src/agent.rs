//! Reaching the agent of a box.

use sandkeep_agent_client::Agent;
use sandkeep_model::{Result, SandboxId};

use crate::state::ApiState;

/// A fresh connection to the agent of a running box.
pub(crate) async fn open(state: &ApiState, id: &SandboxId) -> Result<Agent> {
    Agent::over(state.keeper.connect(id).await?).await
}
