use std::{fmt, sync::Arc, time::Duration};

use sandkeep_audit::Audit;
use sandkeep_identity::Issuer;
use sandkeep_keeper::Keeper;
use sandkeep_moat::Profiles;
use sandkeep_model::Secret;
use sandkeep_secrets::SecretStore;
use tokio_util::sync::CancellationToken;

use crate::e2b::Waiting;

/// Gives all metrics of the process as Prometheus text.
pub type MetricsText = Arc<dyn Fn() -> String + Send + Sync>;

/// What the front desk needs to know.
#[derive(Clone)]
pub struct ApiState {
    pub keeper: Keeper,
    /// The one key of this server; without it only `/v1/health` answers.
    pub api_key: Secret,
    pub metrics_text: MetricsText,
    /// Policies with a name.
    pub profiles: Arc<Profiles>,
    /// What credentials of boxes are made of.
    pub secrets: Option<Arc<SecretStore>>,
    /// Who signs tokens of boxes.
    pub issuer: Option<Arc<Issuer>>,
    pub audit: Option<Audit>,
    /// Builds that clients of E2B announced.
    pub waiting: Arc<Waiting>,
    /// Whether `/metrics` answers without the key.
    pub metrics_open: bool,
    /// The version of the server.
    pub version: String,
    /// The domain under which `<port>-<id>.<domain>` reaches boxes, if there is one.
    pub domain: Option<String>,
    /// Whether the server speaks TLS itself.
    pub tls: bool,
    /// The port the server listens on.
    pub port: Option<u16>,
    /// The largest JSON body that is read.
    pub max_body_bytes: usize,
    /// How long a request that is not a stream may take.
    pub request_timeout: Duration,
    /// Ends the streams (events, interactive commands) when the server stops.
    pub shutdown: CancellationToken,
}

impl ApiState {
    pub const DEFAULT_MAX_BODY_BYTES: usize = 1024 * 1024;
    pub const DEFAULT_REQUEST_TIMEOUT: Duration = Duration::from_secs(120);

    /// What E2B's clients put ports of sandboxes under. Told nothing they take a domain of E2B, and
    /// send there what is meant for a sandbox here.
    pub(crate) fn e2b_domain(&self) -> Option<String> {
        let local = || self.port.map(|port| format!("localhost:{port}"));
        self.domain.clone().or_else(local)
    }

    /// A front desk with the usual bounds, closed metrics and no domain.
    pub fn new(
        keeper: Keeper,
        api_key: Secret,
        metrics_text: MetricsText,
        version: impl Into<String>,
    ) -> Self {
        Self {
            keeper,
            api_key,
            metrics_text,
            profiles: Arc::default(),
            secrets: None,
            issuer: None,
            audit: None,
            waiting: Arc::default(),
            metrics_open: false,
            version: version.into(),
            domain: None,
            tls: false,
            port: None,
            max_body_bytes: Self::DEFAULT_MAX_BODY_BYTES,
            request_timeout: Self::DEFAULT_REQUEST_TIMEOUT,
            shutdown: CancellationToken::new(),
        }
    }
}

impl fmt::Debug for ApiState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiState")
            .field("version", &self.version)
            .field("domain", &self.domain)
            .field("max_body_bytes", &self.max_body_bytes)
            .field("request_timeout", &self.request_timeout)
            .finish_non_exhaustive()
    }
}

/// How handlers get at it.
pub(crate) type Shared = Arc<ApiState>;
