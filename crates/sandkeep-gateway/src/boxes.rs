use sandkeep_agent_api::process::StartRequest;
use sandkeep_agent_client::BoxError;
use sandkeep_keeper::{Command, Counts, Hold, Keeper};
use sandkeep_model::{HostMask, Latched, PortAccess, Result, SandboxId, Secret};
use tokio::io::{AsyncRead, AsyncWrite};

/// What the gateway needs to know of boxes; the keeper knows it.
pub trait Boxes: Clone + Send + Sync + 'static {
    type Channel: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// A fresh connection to the agent, and what on it counts as somebody wanting something.
    fn connect(
        &self,
        id: &SandboxId,
        counts: Counts,
    ) -> impl Future<Output = Result<Self::Channel>> + Send;

    /// To be called before a command is started.
    fn command(&self, id: &SandboxId, start: &StartRequest)
    -> impl Future<Output = Command> + Send;

    /// Somebody waits for an answer of the box as long as this is kept.
    fn hold(&self, id: &SandboxId) -> Option<Hold>;

    /// Fires when connections that are not in use are wanted back.
    fn wanted_back(&self, id: &SandboxId) -> impl Future<Output = ()> + Send + 'static;

    /// Returns when the box runs; one that wakes by itself is woken.
    fn awake(&self, id: &SandboxId) -> impl Future<Output = Result<()>> + Send;

    /// Fires when the box is gone or paused.
    fn closed(&self, id: &SandboxId) -> Latched<()>;

    fn access_token(&self, id: &SandboxId) -> Option<Secret>;

    fn live_tokens(&self) -> Vec<(SandboxId, Secret)>;

    /// `None`: there is no such sandbox, or a request does not wake it.
    fn port_access(&self, id: &SandboxId) -> Option<PortAccess>;

    /// The host that its programs are asked by, where it is not the one of the request.
    fn host_mask(&self, id: &SandboxId) -> Option<HostMask>;

    /// To be called when a request for `port` carried the server's API key.
    fn note_api_key_refused(&self, id: &SandboxId, port: u16) -> impl Future<Output = ()> + Send;
}

impl Boxes for Keeper {
    type Channel = sandkeep_ward::Channel;

    async fn connect(&self, id: &SandboxId, counts: Counts) -> Result<Self::Channel> {
        self.connect_counting(id, counts).await
    }

    async fn command(&self, id: &SandboxId, start: &StartRequest) -> Command {
        Self::command(self, id, start).await
    }

    fn hold(&self, id: &SandboxId) -> Option<Hold> {
        Self::hold(self, id)
    }

    fn wanted_back(&self, id: &SandboxId) -> impl Future<Output = ()> + Send + 'static {
        Self::wanted_back(self, id)
    }

    async fn awake(&self, id: &SandboxId) -> Result<()> {
        Self::awake(self, id).await
    }

    fn closed(&self, id: &SandboxId) -> Latched<()> {
        Self::closed(self, id)
    }

    fn access_token(&self, id: &SandboxId) -> Option<Secret> {
        Self::access_token(self, id)
    }

    fn live_tokens(&self) -> Vec<(SandboxId, Secret)> {
        Self::live_tokens(self)
    }

    fn port_access(&self, id: &SandboxId) -> Option<PortAccess> {
        Self::port_access(self, id)
    }

    fn host_mask(&self, id: &SandboxId) -> Option<HostMask> {
        Self::host_mask(self, id)
    }

    async fn note_api_key_refused(&self, id: &SandboxId, port: u16) {
        Self::note_api_key_refused(self, id, port).await;
    }
}

/// The reason a stream was cut when its box ended.
pub(crate) fn box_ended() -> BoxError {
    "the sandbox was killed, paused or reached its end".into()
}
