//! Every child of the agent ends here.
//!
//! As PID 1 the agent inherits all orphans of the box and must wait for them, but must not take
//! the exit status of a process it started itself from whoever waits for it. So there is one
//! place that calls `waitpid`, and a process is known there before it can be waited for.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, wait};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::family;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Code(i32),
    Signal(i32),
}

/// Becomes `Some` when the process has been waited for.
pub(crate) type ExitReceiver = watch::Receiver<Option<Exit>>;

/// A process the agent started and has not yet waited for.
#[derive(Debug)]
struct Known {
    /// Its session, which it was started in.
    session: Pid,
    exit: watch::Sender<Option<Exit>>,
}

/// The processes the agent started and has not yet waited for.
#[derive(Debug, Default)]
pub(crate) struct Reaper {
    known: Mutex<HashMap<Pid, Known>>,
    paused: AtomicBool,
}

impl Reaper {
    /// Starts a process: the child itself, or the one whose number it leaves in `announced` before
    /// it ends. The lock is held from before the fork until the process is known, so its end
    /// cannot be missed.
    pub(crate) fn spawn(
        &self,
        mut command: Command,
        announced: Option<File>,
    ) -> io::Result<(Pid, ExitReceiver)> {
        let mut known = self.known();
        if self.paused.load(Ordering::Acquire) {
            return Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                "the sandbox is being written down; try again",
            ));
        }
        let mut child = command.spawn()?;
        // Our copy of the end that is written to is in it.
        drop(command);
        let session = Pid::from_child(&child);
        let pid = match announced {
            None => session,
            Some(mut announced) => {
                let mut number = [0; size_of::<i32>()];
                announced.read_exact(&mut number)?;
                child.wait()?;
                Pid::from_raw(i32::from_ne_bytes(number)).ok_or(io::ErrorKind::InvalidData)?
            }
        };
        let (exit, receiver) = watch::channel(None);
        known.insert(pid, Known { session, exit });
        Ok((pid, receiver))
    }

    /// While no process may be started: it would stand still before it began, and the agent with it.
    /// Returns when none is being started.
    pub(crate) fn pause(&self, paused: bool) {
        let _none_starts = self.known();
        self.paused.store(paused, Ordering::Release);
    }

    /// Sends a signal to a process that has not been waited for; false if there is none. Until
    /// then its number cannot belong to somebody else.
    pub(crate) fn signal(&self, pid: Pid, signal: Signal) -> io::Result<bool> {
        let known = self.known();
        if !known.contains_key(&pid) {
            return Ok(false);
        }
        match kill_process(pid, signal) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::SRCH) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Ends a process that has not been waited for, with all that it started; false if there is
    /// none.
    pub(crate) fn kill(&self, pid: Pid) -> io::Result<bool> {
        let known = self.known();
        match known.get(&pid) {
            None => Ok(false),
            Some(one) => family::kill(pid, one.session),
        }
    }

    /// Ends every process the agent started, with all that it started.
    pub(crate) fn kill_all(&self) {
        for (&pid, one) in &*self.known() {
            // One that is gone already is what we want.
            let _ = family::kill(pid, one.session);
        }
    }

    /// Waits for children for ever.
    pub(crate) async fn run(&self) -> io::Result<std::convert::Infallible> {
        let mut children = signal(SignalKind::child())?;
        loop {
            // Before the first signal, too: orphans may have ended before the handler stood.
            self.reap();
            children.recv().await;
        }
    }

    fn reap(&self) {
        let mut known = self.known();
        // Ends with "nobody ended" or "no children".
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            if let (Some(one), Some(exit)) = (known.remove(&pid), exit_of(status)) {
                one.exit.send_replace(Some(exit));
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Pid, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn exit_of(status: WaitStatus) -> Option<Exit> {
    status
        .exit_status()
        .map(Exit::Code)
        .or_else(|| status.terminating_signal().map(Exit::Signal))
}
