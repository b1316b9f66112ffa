//! Reaching the agent of a box.

use sandkeep_agent_client::Agent;
use sandkeep_keeper::Counts;
use sandkeep_model::{Result, SandboxId};

use crate::state::ApiState;

/// A fresh connection to the agent of a running box. What is carried over it counts as
/// somebody wanting something.
pub(crate) async fn open(state: &ApiState, id: &SandboxId) -> Result<Agent> {
    Agent::over(state.keeper.connect_counting(id, Counts::Traffic).await?).await
}

/// The same for listening to a process: only what is said to it counts.
pub(crate) async fn listen(state: &ApiState, id: &SandboxId) -> Result<Agent> {
    Agent::over(state.keeper.connect(id).await?).await
}
