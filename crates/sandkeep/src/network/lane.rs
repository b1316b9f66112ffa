//! Threads of their own for what boxes send, so that a flood of theirs takes no turn of the API.

use rustix::process::{Pid, setpriority_process};
use sandkeep_model::{Error, Result};
use tokio::runtime::{Builder, Handle, Runtime};

/// Behind the threads of the API when both have work and there is not enough processor for both.
const NICE: i32 = 5;

/// Ends without waiting for what runs on it.
#[derive(Debug)]
pub struct Lane(Option<Runtime>);

impl Lane {
    pub fn open() -> Result<Self> {
        let runtime = Builder::new_multi_thread()
            .thread_name("moat")
            .enable_all()
            .on_thread_start(step_back)
            .build()
            .map_err(|error| {
                Error::host_not_ready(format!(
                    "the threads of the moat cannot be started: {error}"
                ))
            })?;
        Ok(Self(Some(runtime)))
    }

    pub fn handle(&self) -> Option<Handle> {
        self.0.as_ref().map(|runtime| runtime.handle().clone())
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Of this thread alone: on Linux a priority is that of a thread.
fn step_back() {
    let this: Option<Pid> = None;
    if let Err(error) = setpriority_process(this, NICE) {
        tracing::debug!(%error, "the moat runs beside the API, not behind it");
    }
}
