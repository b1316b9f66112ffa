//! Ctrl-C: the work ends soon, and everything is cleaned up.

use std::{
    io, mem,
    process::{Child, ExitStatus},
    ptr,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use crate::fault::{Doing as _, Fault, Result};

/// Set by the signal handler, which can do nothing else.
static ASKED: AtomicBool = AtomicBool::new(false);

extern "C" fn asked(_signal: libc::c_int) {
    ASKED.store(true, Ordering::SeqCst);
}

/// That signals which ask us to stop are noted, and not followed blindly.
#[derive(Debug, Clone)]
pub struct Stop(());

impl Stop {
    pub fn watch() -> Result<Self> {
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            // SAFETY: the action is plain data; the handler only stores to an atomic.
            let set = unsafe {
                let mut action: libc::sigaction = mem::zeroed();
                let handler: extern "C" fn(libc::c_int) = asked;
                action.sa_sigaction = handler as usize;
                action.sa_flags = libc::SA_RESTART;
                libc::sigaction(signal, &raw const action, ptr::null_mut())
            };
            if set < 0 {
                return Err(io::Error::last_os_error()).doing("watching for Ctrl-C");
            }
        }
        Ok(Self(()))
    }

    pub fn asked(&self) -> bool {
        ASKED.load(Ordering::SeqCst)
    }

    pub fn check(&self) -> Result<()> {
        if self.asked() {
            Err(Fault::Stopped)
        } else {
            Ok(())
        }
    }

    /// Ends when a stop is asked for.
    pub async fn rung(&self) {
        while !self.asked() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits for a program to end; after a stop it is killed.
    pub fn wait(&self, child: &mut Child) -> Result<ExitStatus> {
        loop {
            if let Some(status) = child.try_wait().doing("waiting for a program")? {
                return Ok(status);
            }
            if let Err(fault) = self.sleep(Duration::from_millis(50)) {
                child.kill().doing("ending a program")?;
                child.wait().doing("ending a program")?;
                return Err(fault);
            }
        }
    }

    /// Sleeps, but not on after a stop.
    pub fn sleep(&self, span: Duration) -> Result<()> {
        let end = Instant::now() + span;
        loop {
            self.check()?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(Duration::from_millis(50)));
        }
    }

    /// Asks again and again until there is an answer.
    pub fn wait_for<T>(
        &self,
        span: Duration,
        what: &str,
        mut ask: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let end = Instant::now() + span;
        loop {
            if let Some(found) = ask()? {
                return Ok(found);
            }
            if Instant::now() >= end {
                return Err(Fault::Cannot(format!(
                    "{what} did not happen within {} s",
                    span.as_secs()
                )));
            }
            self.sleep(Duration::from_millis(100))?;
        }
    }
}
