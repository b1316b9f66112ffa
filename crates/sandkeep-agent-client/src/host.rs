//! The host's own calls.

use http::StatusCode;
use sandkeep_agent_api::host::{
    CLOCK_PATH, ClockRequest, ClockResponse, HOLD_PATH, HostSignal, INIT_PATH, InitRequest,
    LIMITS_PATH, LOGS_PATH, LimitsRequest, ListeningPort, LogEntry, LogsResponse, Metrics,
    PORTS_PATH, PortsResponse, RELEASE_PATH, SETTLE_PATH, SIGNAL_PATH, SignalRequest, TRUST_PATH,
    TrustRequest, USAGE_PATH, UsageResponse, WARM_PATH,
};
use sandkeep_model::Result;

use crate::{
    Agent, error,
    unary::{get, json, parse, post},
};

impl Agent {
    /// Tells the box who it is.
    pub async fn init(&mut self, request: &InitRequest) -> Result<()> {
        let until = self.until();
        let request = post(INIT_PATH, "application/json", json(request)?)?;
        self.whole(request, until).await?;
        Ok(())
    }

    /// Sets the limits that are held inside the box.
    pub async fn set_limits(&mut self, request: &LimitsRequest) -> Result<()> {
        let until = self.until();
        let request = post(LIMITS_PATH, "application/json", json(request)?)?;
        self.whole(request, until).await?;
        Ok(())
    }

    /// What only the kernel of the box can count.
    pub async fn usage(&mut self) -> Result<UsageResponse> {
        let until = self.until();
        let bytes = self.whole(get(USAGE_PATH)?, until).await?;
        parse(&bytes)
    }

    /// Reads what a first command needs into memory.
    pub async fn warm(&mut self) -> Result<()> {
        let until = self.until();
        let request = post(WARM_PATH, "application/json", json(&serde_json::json!({}))?)?;
        self.whole(request, until).await?;
        Ok(())
    }

    /// Brings everything written so far to the disk of the box.
    pub async fn settle(&mut self) -> Result<()> {
        let until = self.until();
        let request = post(
            SETTLE_PATH,
            "application/json",
            json(&serde_json::json!({}))?,
        )?;
        self.whole(request, until).await?;
        Ok(())
    }

    /// Has every program of a machine stand still.
    pub async fn hold(&mut self) -> Result<()> {
        let until = self.until();
        let request = post(HOLD_PATH, "application/json", json(&serde_json::json!({}))?)?;
        self.whole(request, until).await?;
        Ok(())
    }

    /// Lets them go on.
    pub async fn release(&mut self) -> Result<()> {
        let until = self.until();
        let request = post(
            RELEASE_PATH,
            "application/json",
            json(&serde_json::json!({}))?,
        )?;
        self.whole(request, until).await?;
        Ok(())
    }

    /// Reads the clock of a machine, in microseconds since 1970, after moving it forwards if asked to.
    pub async fn clock(&mut self, forward_us: Option<i64>) -> Result<i64> {
        let until = self.until();
        let body = json(&ClockRequest { forward_us })?;
        let request = post(CLOCK_PATH, "application/json", body)?;
        let bytes = self.whole(request, until).await?;
        Ok(parse::<ClockResponse>(&bytes)?.now_us)
    }

    /// Has programs in the box trust this certificate, from the next process on.
    pub async fn trust(&mut self, certificate: &str) -> Result<()> {
        let until = self.until();
        let body = json(&TrustRequest {
            certificate: certificate.to_owned(),
        })?;
        let request = post(TRUST_PATH, "application/json", body)?;
        self.whole(request, until).await?;
        Ok(())
    }

    /// Sends a process a signal that [`Agent::signal`] does not know.
    pub async fn host_signal(&mut self, pid: u32, signal: HostSignal) -> Result<()> {
        let until = self.until();
        let body = json(&SignalRequest { pid, signal })?;
        let request = post(SIGNAL_PATH, "application/json", body)?;
        self.whole(request, until).await?;
        Ok(())
    }

    /// Whether the agent answers at all.
    pub async fn health(&mut self) -> Result<()> {
        let until = self.until();
        let response = self.head(get("/health")?, until).await?;
        if response.status() == StatusCode::NO_CONTENT {
            return Ok(());
        }
        Err(error::nonsense("no 204 when asked for its health"))
    }

    /// Who listens in the box.
    pub async fn ports(&mut self) -> Result<Vec<ListeningPort>> {
        let until = self.until();
        let bytes = self.whole(get(PORTS_PATH)?, until).await?;
        Ok(parse::<PortsResponse>(&bytes)?.ports)
    }

    /// The agent's log after entry `after` (0: all it still has).
    pub async fn logs(&mut self, after: u64) -> Result<Vec<LogEntry>> {
        let until = self.until();
        let request = get(&format!("{LOGS_PATH}?after={after}"))?;
        let bytes = self.whole(request, until).await?;
        Ok(parse::<LogsResponse>(&bytes)?.entries)
    }

    /// What the box uses, as it sees itself.
    pub async fn metrics(&mut self) -> Result<Metrics> {
        let until = self.until();
        let bytes = self.whole(get("/metrics")?, until).await?;
        parse(&bytes)
    }
}
