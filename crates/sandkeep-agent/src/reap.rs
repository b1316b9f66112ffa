//! Every child of the agent ends here.
//!
//! As PID 1 the agent inherits all orphans of the box and must wait for them, but must not take
//! the exit status of a process it started itself from whoever waits for it. So there is one
//! place that calls `waitpid`, and a process is known there before it can be waited for.

use std::collections::HashMap;
use std::io;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, kill_process, kill_process_group, wait,
};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Code(i32),
    Signal(i32),
}

/// Becomes `Some` when the process has been waited for.
pub(crate) type ExitReceiver = watch::Receiver<Option<Exit>>;

/// Whom a signal is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    Process,
    /// The process and everything in its process group.
    Group,
}

/// The processes the agent started and has not yet waited for.
#[derive(Debug, Default)]
pub(crate) struct Reaper {
    known: Mutex<HashMap<Pid, watch::Sender<Option<Exit>>>>,
    paused: AtomicBool,
}

impl Reaper {
    /// Starts a process. The lock is held from before the fork until the process is known, so
    /// its end cannot be missed.
    pub(crate) fn spawn(&self, command: &mut Command) -> io::Result<(Child, Pid, ExitReceiver)> {
        let mut known = self.known();
        if self.paused.load(Ordering::Acquire) {
            return Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                "the sandbox is being written down; try again",
            ));
        }
        let child = command.spawn()?;
        let pid = Pid::from_child(&child);
        let (sender, receiver) = watch::channel(None);
        known.insert(pid, sender);
        Ok((child, pid, receiver))
    }

    /// While no process may be started: it would stand still before it began, and the agent with it.
    /// Returns when none is being started.
    pub(crate) fn pause(&self, paused: bool) {
        let _none_starts = self.known();
        self.paused.store(paused, Ordering::Release);
    }

    /// Sends a signal to a process that has not been waited for; false if there is none. Until
    /// then its number cannot belong to somebody else.
    pub(crate) fn signal(&self, pid: Pid, target: Target, signal: Signal) -> io::Result<bool> {
        let known = self.known();
        if !known.contains_key(&pid) {
            return Ok(false);
        }
        let sent = match target {
            Target::Process => kill_process(pid, signal),
            Target::Group => kill_process_group(pid, signal),
        };
        match sent {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::SRCH) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Ends every process the agent started, with its group.
    pub(crate) fn kill_all(&self) {
        for &pid in self.known().keys() {
            // One that is gone already is what we want.
            let _ = kill_process_group(pid, Signal::KILL);
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
            if let (Some(waiting), Some(exit)) = (known.remove(&pid), exit_of(status)) {
                waiting.send_replace(Some(exit));
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Pid, watch::Sender<Option<Exit>>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn exit_of(status: WaitStatus) -> Option<Exit> {
    status
        .exit_status()
        .map(Exit::Code)
        .or_else(|| status.terminating_signal().map(Exit::Signal))
}
