//! The processes the agent knows.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rustix::process::Pid;
use sandkeep_agent_api::ConnectError;
use sandkeep_agent_api::process::{ProcessConfig, ProcessInfo, Selector};
use tokio::time::Instant;

use super::input::InputEnd;
use super::pty::Terminal;
use super::stream::Fan;
use crate::reap::ExitReceiver;

/// How long the end of a process can still be asked for.
const KEEP_ENDED: Duration = Duration::from_secs(30);
const MAX_ENDED: usize = 4096;

/// A process that was started by a call.
#[derive(Debug)]
pub(super) struct Process {
    pub pid: Pid,
    pub tag: Option<String>,
    pub config: ProcessConfig,
    pub input: tokio::sync::Mutex<InputEnd>,
    pub terminal: Option<Arc<Terminal>>,
    pub fan: Fan,
    pub exit: ExitReceiver,
}

impl Process {
    pub(super) fn number(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    pub(super) fn has_exited(&self) -> bool {
        self.exit.borrow().is_some()
    }

    /// Returns when the process has ended and was waited for.
    pub(super) async fn exited(&self) {
        let mut exit = self.exit.clone();
        let _ = exit.wait_for(Option::is_some).await;
    }
}

/// What is left of a process that has ended.
#[derive(Debug, Clone)]
pub(super) struct Ended {
    pub pid: u32,
    pub tag: Option<String>,
    pub end: Bytes,
}

/// What a selector found.
#[derive(Debug, Clone)]
pub(super) enum Found {
    Live(Arc<Process>),
    Ended(Ended),
}

#[derive(Debug, Default)]
pub(crate) struct Table(Mutex<Processes>);

#[derive(Debug, Default)]
struct Processes {
    started: u64,
    live: HashMap<u32, (u64, Arc<Process>)>,
    ended: VecDeque<(Instant, Ended)>,
}

impl Table {
    pub(super) fn add(&self, process: &Arc<Process>) {
        let mut processes = self.processes();
        processes.started += 1;
        let order = processes.started;
        processes
            .live
            .insert(process.number(), (order, Arc::clone(process)));
    }

    /// Moves a process to the ended ones.
    pub(super) fn end(&self, process: &Arc<Process>, end: Bytes) {
        let mut processes = self.processes();
        let pid = process.number();
        // The number may already belong to a younger process.
        if processes
            .live
            .get(&pid)
            .is_some_and(|(_, live)| Arc::ptr_eq(live, process))
        {
            processes.live.remove(&pid);
        }
        let ended = Ended {
            pid,
            tag: process.tag.clone(),
            end,
        };
        processes.ended.push_back((Instant::now(), ended));
        processes.forget_old();
    }

    /// Running processes, in the order they were started.
    pub(super) fn list(&self) -> Vec<ProcessInfo> {
        let processes = self.processes();
        let mut live: Vec<_> = processes
            .live
            .values()
            .filter(|(_, process)| !process.has_exited())
            .collect();
        live.sort_by_key(|(order, _)| *order);
        live.into_iter()
            .map(|(_, process)| ProcessInfo {
                config: process.config.clone(),
                pid: process.number(),
                tag: process.tag.clone(),
            })
            .collect()
    }

    /// The process meant, even if it has ended a short while ago. Of several with one tag it is
    /// the youngest.
    pub(super) fn find(&self, selector: Option<&Selector>) -> Result<Found, ConnectError> {
        let selector =
            selector.ok_or_else(|| ConnectError::invalid_argument("no process is named"))?;
        let mut processes = self.processes();
        processes.forget_old();
        let live = match selector {
            Selector::Pid(pid) => processes.live.get(pid),
            Selector::Tag(tag) => processes
                .live
                .values()
                .filter(|(_, process)| process.tag.as_ref() == Some(tag))
                .max_by_key(|(order, _)| *order),
        };
        if let Some((_, process)) = live {
            return Ok(Found::Live(Arc::clone(process)));
        }
        let is_meant = |ended: &Ended| match selector {
            Selector::Pid(pid) => ended.pid == *pid,
            Selector::Tag(tag) => ended.tag.as_ref() == Some(tag),
        };
        let ended = processes
            .ended
            .iter()
            .rev()
            .find(|(_, ended)| is_meant(ended));
        ended
            .map(|(_, ended)| Found::Ended(ended.clone()))
            .ok_or_else(|| not_found(selector))
    }

    /// The running process meant.
    pub(super) fn find_live(
        &self,
        selector: Option<&Selector>,
    ) -> Result<Arc<Process>, ConnectError> {
        match (self.find(selector)?, selector) {
            (Found::Live(process), _) if !process.has_exited() => Ok(process),
            (_, Some(selector)) => Err(not_found(selector)),
            (_, None) => Err(ConnectError::invalid_argument("no process is named")),
        }
    }

    fn processes(&self) -> MutexGuard<'_, Processes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Processes {
    fn forget_old(&mut self) {
        let is_old = |at: Instant| at.elapsed() > KEEP_ENDED;
        while self.ended.len() > MAX_ENDED || self.ended.front().is_some_and(|(at, _)| is_old(*at))
        {
            self.ended.pop_front();
        }
    }
}

fn not_found(selector: &Selector) -> ConnectError {
    ConnectError::not_found(match selector {
        Selector::Pid(pid) => format!("process with pid {pid} not found"),
        Selector::Tag(tag) => format!("process with tag {tag} not found"),
    })
}
