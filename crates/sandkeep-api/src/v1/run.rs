//! A command that runs, on behalf of a client that may vanish.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::FutureExt;
use sandkeep_agent_api::process::{EndEvent, Output, ProcessEvent, Selector, Signal, StartEvent};
use sandkeep_agent_client::ProcessStream;
use sandkeep_keeper as keeper;
use sandkeep_model::{Code, Error, Latched, Result, SandboxId, State};
use serde::Serialize;
use tokio::sync::{oneshot, watch};
use utoipa::ToSchema;

use super::command::Command;
use crate::{agent, state::Shared};

/// How long the agent may take to say that a command has started.
const START_DEADLINE: Duration = Duration::from_secs(30);
/// How often, and how long each time, refusals are waited for of a command that failed.
const LOOKS: u32 = 3;
const LOOK: Duration = Duration::from_millis(10);
/// A command may leave its input unread as long as it likes.
pub(crate) const INPUT_DEADLINE: Duration = Duration::from_secs(7 * 24 * 3600);

/// Where a command wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channel {
    Stdout,
    Stderr,
    Tty,
}

#[derive(Debug)]
pub(crate) enum Happening {
    Output(Channel, Bytes),
    /// Nothing, but it is still there.
    Keepalive,
    Exited(Exit),
}

/// How a command ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct Exit {
    /// Its exit code, or 128 plus the number of the signal that ended it.
    pub exit_code: i32,
    /// The signal that ended it, e.g. `KILL`.
    #[schema(required)]
    pub signal: Option<String>,
    /// Why it was killed, where that is known: `out of memory (limit 64 MiB)`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// So often the policy refused something to the sandbox while the command ran.
    #[serde(skip_serializing_if = "is_zero")]
    pub refused_by_policy: u64,
}

const fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// What a sandbox had gone through when a command began in it.
#[derive(Debug, Clone, Copy, Default)]
struct Before {
    oom_kills: u64,
    refused: u64,
}

impl Before {
    async fn now(state: &Shared, id: &SandboxId) -> Self {
        let sandbox = state.keeper.get(id).await;
        Self {
            oom_kills: sandbox.map_or(0, |sandbox| sandbox.oom_kills),
            refused: refused(state, id).await,
        }
    }
}

async fn refused(state: &Shared, id: &SandboxId) -> u64 {
    let traffic = state.keeper.traffic(id).await;
    traffic.map_or(0, |traffic| traffic.denied)
}

/// A running command. Dropping it kills the command, unless it was detached or has ended.
pub(crate) struct Run {
    stream: ProcessStream,
    closed: Latched<()>,
    leash: Leash,
    has_timeout: bool,
    /// Until its end was told.
    command: Option<keeper::Command>,
    /// Whether what the command writes gets here; not while its box is paused.
    attached: watch::Sender<bool>,
    before: Before,
    /// How it ended, until that was told.
    ended: Option<Exit>,
}

impl Run {
    /// Starts a command; refusals of the box (no such user, no such directory) come at once.
    pub(crate) async fn start(state: &Shared, id: &SandboxId, command: Command) -> Result<Self> {
        let (tell, told) = oneshot::channel();
        let (state, id) = (Arc::clone(state), id.clone());
        // Not in the client's task: if it vanished between the start and the answer, nobody
        // would know whom to kill.
        tokio::spawn(async move {
            let run = begin(state, id, command).await;
            // Unclaimed, it is dropped here and the command with it.
            drop(tell.send(run));
        });
        told.await
            .map_err(|_| Error::internal("starting the command was broken off"))?
    }

    /// Listens to a command that was started before, by this server or the one before it.
    pub(crate) async fn attach(
        state: &Shared,
        id: &SandboxId,
        pid: u32,
        detach: bool,
    ) -> Result<Self> {
        let agent = agent::listen(state, id).await?;
        let closed = state.keeper.closed(id);
        let not_there = |error: Error| match error.code {
            Code::NotFound => Error::not_found(format!(
                "no command with pid {pid} runs in sandbox \"{id}\""
            ))
            .field("attach")
            .hint(format!("list those that run: sandkeep ps {id}")),
            _ => error,
        };
        let stream = agent.connect_process(Selector::Pid(pid)).await;
        let mut stream = stream.map_err(not_there)?;
        begun(&mut stream).await.map_err(not_there)?;
        Ok(Self {
            stream,
            closed,
            leash: Leash {
                armed: !detach,
                pid,
                state: Arc::clone(state),
                id: id.clone(),
            },
            has_timeout: false,
            command: None,
            attached: watch::channel(true).0,
            before: Before::now(state, id).await,
            ended: None,
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.leash.pid
    }

    /// Tells whether what the command writes gets here.
    pub(crate) fn attached(&self) -> watch::Receiver<bool> {
        self.attached.subscribe()
    }

    /// What happens next; after [`Happening::Exited`] or an error nothing does. Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<Happening> {
        if self.ended.is_some() {
            return Ok(Happening::Exited(self.told().await));
        }
        if !*self.attached.borrow() {
            return self.attach_again().await;
        }
        let event = tokio::select! {
            biased;
            event = self.stream.next() => event,
            () = &mut self.closed => Err(cut()),
        };
        match event {
            Ok(Some(ProcessEvent::Data(output))) => Ok(match output {
                Output::Stdout(blob) => Happening::Output(Channel::Stdout, blob.0),
                Output::Stderr(blob) => Happening::Output(Channel::Stderr, blob.0),
                Output::Pty(blob) => Happening::Output(Channel::Tty, blob.0),
            }),
            Ok(Some(ProcessEvent::End(end))) => {
                self.leash.armed = false;
                if let Some(command) = self.command.take() {
                    command.ended();
                }
                self.ended = Some(exit(&end));
                Ok(Happening::Exited(self.told().await))
            }
            Ok(Some(ProcessEvent::Start(_) | ProcessEvent::Keepalive(_))) => {
                Ok(Happening::Keepalive)
            }
            Ok(None) => self.broken(cut()).await,
            Err(error) if error.code == Code::DeadlineExceeded && self.has_timeout => {
                self.leash.armed = false;
                Err(time_over())
            }
            Err(error) => self.broken(error).await,
        }
    }

    /// With what else is known of its end. Whoever is cancelled in it asks again.
    async fn told(&mut self) -> Exit {
        let failed = self.ended.as_ref().is_some_and(|exit| exit.exit_code != 0);
        let mut count = refused(&self.leash.state, &self.leash.id).await;
        // The kernel tells of what it refused a moment after the program heard of it.
        for _ in 0..LOOKS {
            if !failed || count > self.before.refused {
                break;
            }
            tokio::time::sleep(LOOK).await;
            count = refused(&self.leash.state, &self.leash.id).await;
        }
        let killed = self.ended.as_ref().map(|exit| exit.exit_code) == Some(KILLED);
        let why = if killed {
            self.out_of_memory().await
        } else {
            None
        };
        let exit = self.ended.take().unwrap_or_default();
        Exit {
            why,
            refused_by_policy: count.saturating_sub(self.before.refused),
            ..exit
        }
    }

    /// Said where the kernel killed something of the sandbox for it while the command ran.
    async fn out_of_memory(&mut self) -> Option<String> {
        let (state, id) = (&self.leash.state, &self.leash.id);
        let killed = state.keeper.oom_kills(id).await.ok()?;
        let limit = state.keeper.get(id).await.ok()?.limits.memory_mib;
        (killed > self.before.oom_kills).then(|| format!("out of memory (limit {limit} MiB)"))
    }

    /// A pause, or a point with memory, ends every connection and no command.
    async fn broken(&mut self, error: Error) -> Result<Happening> {
        if error.code != Code::BoxUnreachable {
            return Err(error);
        }
        let sandbox = self.leash.state.keeper.get(&self.leash.id).await;
        let rests = |state| {
            matches!(
                state,
                State::Pausing | State::Paused | State::Resuming | State::Running
            )
        };
        // The gate fires for those who are to come back, and for nobody else that lives.
        let was_cut = (&mut self.closed).now_or_never().is_some();
        if was_cut && sandbox.is_ok_and(|sandbox| rests(sandbox.state)) {
            self.attached.send_replace(false);
            return Ok(Happening::Keepalive);
        }
        Err(self.explain(error).await)
    }

    /// Waits until the box runs again, without waking it, and listens to the same process.
    async fn attach_again(&mut self) -> Result<Happening> {
        let (state, id) = (&self.leash.state, &self.leash.id);
        let again = async {
            state.keeper.running_again(id).await?;
            let agent = agent::listen(state, id).await?;
            let closed = state.keeper.closed(id);
            let stream = agent.connect_process(Selector::Pid(self.leash.pid)).await?;
            Ok::<_, Error>((closed, stream))
        };
        match again.await {
            Ok::<_, Error>((closed, stream)) => {
                self.closed = closed;
                self.stream = stream;
                self.attached.send_replace(true);
                Ok(Happening::Keepalive)
            }
            // It may have been paused again meanwhile.
            Err(error) if error.code == Code::BoxUnreachable => Ok(Happening::Keepalive),
            Err(error) if error.code == Code::NotFound => Err(self.explain(ended(&error)).await),
            Err(error) => Err(error),
        }
    }

    /// A broken connection has a better reason when the box is gone.
    async fn explain(&mut self, error: Error) -> Error {
        if error.code != Code::BoxUnreachable {
            return error;
        }
        match self.leash.state.keeper.get_any(&self.leash.id).await {
            Ok(sandbox) if matches!(sandbox.state, State::Gone | State::Stopping) => {
                self.leash.armed = false;
                let why = sandbox
                    .gone
                    .map_or_else(String::new, |why| format!(": {why}"));
                Error::not_found(format!(
                    "sandbox \"{}\" ended while the command ran{why}",
                    sandbox.id
                ))
                .hint("make a new sandbox, with more time or memory if that was the reason")
            }
            _ => error,
        }
    }
}

/// A process that is not there after a pause ended with it: the box started cold.
fn ended(error: &Error) -> Error {
    Error::new(
        Code::BoxUnreachable,
        format!(
            "the command ended while its sandbox was paused: {}",
            error.message
        ),
    )
}

/// Trying the same again would end the same way.
fn time_over() -> Error {
    Error::new(
        Code::DeadlineExceeded,
        "the command was killed: its timeout_ms was over",
    )
    .field("timeout_ms")
    .hint("give it more time, or leave timeout_ms out")
    .retryable(false)
}

fn cut() -> Error {
    Error::new(
        Code::BoxUnreachable,
        "the connection to the sandbox was cut while the command ran",
    )
}

/// 128 + SIGKILL, of the command itself or as its shell says it.
const KILLED: i32 = 137;

/// What the agent says of a program that is not there, or may not be run, is about `cmd`.
fn about_the_program(error: Error) -> Error {
    if error.code == Code::InvalidArgument && error.message.starts_with("cannot start '") {
        return error.field("cmd");
    }
    error
}

/// The first word of the agent about a command.
async fn begun(stream: &mut ProcessStream) -> Result<StartEvent> {
    let first = tokio::time::timeout(START_DEADLINE, stream.next())
        .await
        .map_err(|_| {
            Error::new(Code::DeadlineExceeded, "the command did not start in time")
                .hint("the sandbox may be overloaded; give it more CPU and memory")
        })??;
    match first {
        Some(ProcessEvent::Start(started)) => Ok(started),
        _ => Err(Error::new(
            Code::BoxUnreachable,
            "the agent did not say that the command started",
        )),
    }
}

async fn begin(state: Shared, id: SandboxId, command: Command) -> Result<Run> {
    // Before the connection: a point with memory cuts all there are.
    let tracked = state.keeper.command(&id, &command.start).await;
    // In this order: opening may wake the box, and what ends then is not this command.
    let agent = agent::listen(&state, &id).await?;
    let closed = state.keeper.closed(&id);
    let before = Before::now(&state, &id).await;
    let user = command.user.as_deref();
    let stream = agent.start(&command.start, user, command.timeout).await;
    let mut stream = stream.map_err(about_the_program)?;
    let started = begun(&mut stream).await.map_err(about_the_program)?;
    let leash = Leash {
        armed: !command.detach,
        pid: started.pid,
        state,
        id,
    };
    if let Some(bytes) = command.stdin {
        // It ends by itself: at the end of the bytes, or when the process is gone.
        tokio::spawn(feed(
            Arc::clone(&leash.state),
            leash.id.clone(),
            leash.pid,
            bytes,
        ));
    }
    Ok(Run {
        stream,
        closed,
        leash,
        has_timeout: command.timeout.is_some(),
        command: Some(tracked),
        attached: watch::channel(true).0,
        before,
        ended: None,
    })
}

/// Writes all of `bytes` to a process and closes its input.
async fn feed(state: Shared, id: SandboxId, pid: u32, bytes: Bytes) {
    const PIECE: usize = 64 * 1024;
    let all = async {
        let mut agent = agent::open(&state, &id).await?.deadline(INPUT_DEADLINE);
        for piece in bytes.chunks(PIECE) {
            agent.send_stdin(Selector::Pid(pid), piece).await?;
        }
        agent.close_stdin(Selector::Pid(pid)).await
    };
    if let Err(error) = all.await {
        // Usual for programs that do not read all of their input.
        tracing::debug!(sandbox = %id, pid, %error, "feeding a command");
    }
}

/// Kills the process when dropped armed.
struct Leash {
    state: Shared,
    id: SandboxId,
    pid: u32,
    armed: bool,
}

impl Drop for Leash {
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        // When the server stops, commands go on: whoever comes back can attach to them.
        if !self.armed || self.state.shutdown.is_cancelled() {
            return;
        }
        let (state, id, pid) = (Arc::clone(&self.state), self.id.clone(), self.pid);
        runtime.spawn(async move {
            let killed = async {
                // Nobody wakes a box to end something in it.
                state.keeper.running_again(&id).await?;
                let mut agent = agent::open(&state, &id).await?;
                agent.signal(Selector::Pid(pid), Signal::Kill).await
            };
            match killed.await {
                Ok(()) => tracing::debug!(sandbox = %id, pid, "killed with its client"),
                Err(error) => tracing::debug!(sandbox = %id, pid, %error, "killing a command"),
            }
        });
    }
}

fn exit(end: &EndEvent) -> Exit {
    let plain = |exit_code, signal| Exit {
        exit_code,
        signal,
        why: None,
        refused_by_policy: 0,
    };
    if end.exited {
        return plain(end.exit_code, None);
    }
    let words = end.status.strip_prefix("signal: ").unwrap_or(&end.status);
    let words = words.strip_suffix(" (core dumped)").unwrap_or(words);
    if let Some((number, name)) = signal(words) {
        return plain(128 + number, Some(name.to_owned()));
    }
    // Those without words of their own are told by number.
    if let Some(number) = words
        .strip_prefix("signal ")
        .and_then(|n| n.parse::<u8>().ok())
    {
        return plain(
            128_i32.saturating_add(number.into()),
            Some(number.to_string()),
        );
    }
    let shown = words.chars().filter(|c| !c.is_control()).take(64).collect();
    plain(255, Some(shown))
}

/// envd names signals in words.
fn signal(words: &str) -> Option<(i32, &'static str)> {
    Some(match words {
        "hangup" => (1, "HUP"),
        "interrupt" => (2, "INT"),
        "quit" => (3, "QUIT"),
        "illegal instruction" => (4, "ILL"),
        "trace/breakpoint trap" => (5, "TRAP"),
        "aborted" => (6, "ABRT"),
        "bus error" => (7, "BUS"),
        "floating point exception" => (8, "FPE"),
        "killed" => (9, "KILL"),
        "user defined signal 1" => (10, "USR1"),
        "segmentation fault" => (11, "SEGV"),
        "user defined signal 2" => (12, "USR2"),
        "broken pipe" => (13, "PIPE"),
        "alarm clock" => (14, "ALRM"),
        "terminated" => (15, "TERM"),
        "signal 24" => (24, "XCPU"),
        "signal 25" => (25, "XFSZ"),
        "signal 31" => (31, "SYS"),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_told_as_shells_tell_them() {
        let ended = |exited, exit_code, status: &str| {
            exit(&EndEvent {
                exit_code,
                exited,
                status: status.to_owned(),
                error: None,
            })
        };
        assert_eq!(ended(true, 3, "exit status 3").exit_code, 3);
        let killed = ended(false, -1, "signal: killed");
        assert_eq!(killed.exit_code, 137);
        assert_eq!(killed.signal.as_deref(), Some("KILL"));
        let crashed = ended(false, -1, "signal: segmentation fault (core dumped)");
        assert_eq!(crashed.exit_code, 139);
        let by_seccomp = ended(false, -1, "signal: signal 31");
        assert_eq!(by_seccomp.exit_code, 159);
        assert_eq!(by_seccomp.signal.as_deref(), Some("SYS"));
        assert_eq!(ended(false, -1, "signal: signal 40").exit_code, 168);
        let strange = ended(false, -1, "signal: \u{1b}odd");
        assert_eq!(strange.exit_code, 255);
        assert_eq!(strange.signal.as_deref(), Some("odd"));
    }
}
