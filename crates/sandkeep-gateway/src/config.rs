use std::time::Duration;

use sandkeep_model::Secret;

#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// `<port>-<id>.<domain>` names a box; other names under it are refused. Without one,
    /// the left-most label alone decides.
    pub domain: Option<String>,
    /// What clients are told they came by (`X-Forwarded-Proto`).
    pub scheme: &'static str,
    /// The server's own key: a request that carries it never reaches a sandbox.
    pub api_key: Option<Secret>,
    /// Larger request bodies are refused. The box's disk limits uploads anyway.
    pub max_request_bytes: Option<u64>,
    /// Connections to one agent that are kept for the next request.
    pub idle_per_box: usize,
    /// How long they are kept.
    pub idle_for: Duration,
    /// How long a box may take to accept a connection.
    pub connect_deadline: Duration,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            domain: None,
            scheme: "http",
            api_key: None,
            max_request_bytes: None,
            idle_per_box: 8,
            idle_for: Duration::from_secs(15),
            connect_deadline: Duration::from_secs(10),
        }
    }
}
