//! Log lines on standard error: text for people, JSON for collectors.

use std::io::{self, IsTerminal};

use sandkeep_model::{Error, Result};
use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt};

use crate::config::LogFormat;

/// `RUST_LOG` wins, because whoever sets it wants to see something now.
pub fn start(level: Option<&str>, format: LogFormat) -> Result<()> {
    let asked = std::env::var("RUST_LOG")
        .ok()
        .filter(|text| !text.is_empty());
    let filter = asked.as_deref().or(level).unwrap_or("info");
    let filter = EnvFilter::try_new(filter).map_err(|error| {
        Error::invalid(
            "log_level",
            format!("\"{filter}\" is no log filter: {error}"),
        )
        .hint("use error, warn, info, debug, trace, or for example info,sandkeep_keeper=debug")
    })?;
    let registry = tracing_subscriber::registry().with(filter);
    let started = match format {
        LogFormat::Json => registry
            .with(
                fmt::layer()
                    .json()
                    .flatten_event(true)
                    .with_writer(io::stderr),
            )
            .try_init(),
        LogFormat::Text => {
            let colour = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            registry
                .with(fmt::layer().with_ansi(colour).with_writer(io::stderr))
                .try_init()
        }
    };
    started.map_err(|error| Error::internal(format!("starting the log: {error}")))
}
