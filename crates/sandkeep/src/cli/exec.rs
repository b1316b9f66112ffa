//! `exec` and `shell`: a command in a box, its streams joined to ours.

use std::{
    io::{self, IsTerminal, Read, Write},
    time::Duration,
};

use bytes::Bytes;
use sandkeep_model::{Code, Error, Result};
use serde_json::Value;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    client::Client,
    output::{Output, clean},
    refusals,
    session::{Exited, Input, Request, Session, Told},
    terminal::{RawTerminal, WindowSize},
};
use crate::args::{ExecArgs, ShellArgs, StreamArgs};

/// How long a server may take to begin anew, and how often it is looked for.
const COMES_BACK_WITHIN: Duration = Duration::from_secs(60);
const LOOKS_AGAIN_AFTER: Duration = Duration::from_millis(300);
/// How long a command may take to end after a Ctrl-C passed on to it.
const AFTER_INTERRUPT: Duration = Duration::from_secs(5);
const AFTER_KILL: Duration = Duration::from_secs(2);
const CHUNK: usize = 32 * 1024;

/// `bash` where there is one; every box has `sh`.
const LOGIN_SHELL: &str =
    "if command -v bash >/dev/null 2>&1; then exec bash -l; else exec sh -l; fi";

pub async fn exec(client: &Client, output: Output, args: ExecArgs) -> anyhow::Result<u8> {
    let sandbox = client.find(&args.sandbox).await?;
    say_if_it_is_woken(client, &sandbox).await?;
    let request = Request {
        cmd: args.command,
        attach: args.attach,
        // Whoever started it decides when it ends.
        detach: args.attach.map(|_| true),
        env: args.env.into_iter().collect(),
        cwd: args.workdir,
        user: args.user,
        tty: None,
        timeout_ms: args
            .timeout
            .and_then(|span| span.seconds())
            .map(|seconds| seconds.saturating_mul(1000)),
    };
    let attached = attach(
        client,
        output,
        &sandbox,
        request,
        args.streams,
        After::Stays,
    )
    .await?;
    Ok(attached.code)
}

pub async fn shell(client: &Client, output: Output, args: ShellArgs) -> anyhow::Result<u8> {
    let sandbox = client.find(&args.sandbox).await?;
    say_if_it_is_woken(client, &sandbox).await?;
    let request = Request {
        cmd: ["/bin/sh", "-c", LOGIN_SHELL].map(str::to_owned).to_vec(),
        cwd: args.workdir,
        user: args.user,
        ..Request::default()
    };
    let streams = StreamArgs {
        interactive: true,
        tty: true,
        no_stdin: false,
    };
    let attached = attach(client, output, &sandbox, request, streams, After::Stays).await?;
    Ok(attached.code)
}

/// Waking takes a moment, and the sandbox runs afterwards: whoever asked should know why.
async fn say_if_it_is_woken(client: &Client, id: &str) -> Result<()> {
    let view = client.get(&["sandboxes", id]).await?;
    if view["state"] == "paused" && view["auto_resume"] == true {
        // Whoever closed standard error does not want to know.
        drop(writeln!(
            io::stderr(),
            "sandbox {id} was paused: this command wakes it"
        ));
    }
    Ok(())
}

/// What becomes of the sandbox after the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    Stays,
    /// Nothing can be asked about it then.
    Ends,
}

/// How our part in a command ended.
#[derive(Debug, Clone, Copy)]
pub struct Attached {
    pub code: u8,
    /// We were told to end while the server was away.
    pub server_away: bool,
}

/// Runs the command with our streams until it ends. For programs that want JSON what it writes
/// is collected and told at the end.
pub async fn attach(
    client: &Client,
    output: Output,
    sandbox: &str,
    mut request: Request,
    streams: StreamArgs,
    after: After,
) -> anyhow::Result<Attached> {
    if streams.tty {
        request.tty = Some(WindowSize::current());
        if let Ok(term) = std::env::var("TERM") {
            request.env.entry("TERM".to_owned()).or_insert(term);
        }
    }
    let mut signals = Signals::new()?;
    let before = match after {
        After::Stays => refusals::of(client, sandbox).await,
        After::Ends => refusals::none(),
    };
    let session = Session::start(client, sandbox, &request).await?;
    let terminal = io::stdin().is_terminal();
    // Reading a terminal unasked would stop us when we run in the background. A listener leaves
    // the input alone: somebody else may write it.
    let listens = request.attach.is_some();
    let asked = streams.interactive || streams.tty;
    let forward = !streams.no_stdin && (asked || !(terminal || listens));
    // Raw only now: a refusal above should leave the terminal as it was. Dropped on every way out.
    let _raw = (streams.tty && terminal)
        .then(RawTerminal::enter)
        .transpose()?;
    if forward || !listens {
        feed(session.input(), forward);
    }
    let mut sink = if output.json && !streams.tty {
        Sink::Collected(Collected::default())
    } else {
        Sink::Streams
    };
    let mut way_back = WayBack {
        client,
        sandbox,
        request: &request,
        pid: request.attach,
        server_away: false,
    };
    let ended = follow(session, &mut signals, streams.tty, &mut sink, &mut way_back).await;
    let server_away = way_back.server_away;
    let exited = match ended {
        Ok(exited) => exited,
        Err(error) => {
            let code = never_ran(error, output)?;
            return Ok(Attached { code, server_away });
        }
    };
    match sink {
        Sink::Collected(collected) => output.json(&collected.view(exited.code))?,
        Sink::Streams => {
            if let Some(why) = &exited.why {
                output.note(&format!("killed: {why}"))?;
            }
            if exited.refused > 0 {
                let now = refusals::of(client, sandbox).await;
                for line in refusals::lines(&before, &now, sandbox, after) {
                    output.note(&line)?;
                }
            }
        }
    }
    Ok(Attached {
        code: exited.code,
        server_away,
    })
}

/// As shells say it: 127 for a program that is not there, 126 for one that cannot be run.
fn never_ran(error: anyhow::Error, output: Output) -> anyhow::Result<u8> {
    let typed = error.downcast_ref::<Error>();
    let Some(typed) = typed.filter(|error| error.field.as_deref() == Some("cmd")) else {
        return Err(error);
    };
    let code = match typed.message.contains("No such file") {
        true => 127,
        false => 126,
    };
    super::complain(&error, output.json);
    Ok(code)
}

pub async fn ps(client: &Client, output: Output, sandbox: &str) -> anyhow::Result<u8> {
    let id = client.find(sandbox).await?;
    let view = client.get(&["sandboxes", &id, "processes"]).await?;
    if output.json {
        output.json(&view)?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = view["processes"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|process| {
            let args = process["args"].as_array().into_iter().flatten();
            let words = [&process["cmd"]].into_iter().chain(args);
            let words: Vec<&str> = words.filter_map(Value::as_str).collect();
            vec![process["pid"].to_string(), words.join(" ")]
        })
        .collect();
    output.table(&["PID", "COMMAND"], &rows)?;
    Ok(0)
}

/// How a command is found again when the connection to the server breaks.
struct WayBack<'a> {
    client: &'a Client,
    sandbox: &'a str,
    request: &'a Request,
    pid: Option<u32>,
    /// Whether the server was being looked for at the end.
    server_away: bool,
}

/// What a search for the command came to.
enum Again {
    Found(Box<Session>, Duration),
    /// We were told to end meanwhile.
    Left(u8),
}

impl WayBack<'_> {
    /// The same command, over a new connection. It continues in its sandbox while the server is
    /// restarted.
    async fn again(&mut self, lost: Error, signals: &mut Signals) -> Result<Again> {
        let Some(pid) = self.pid.filter(|_| lost.code == Code::HostNotReady) else {
            return Err(lost);
        };
        say("the connection to the server is lost; the command continues, looking for it again");
        let began = Instant::now();
        let found = {
            let search = self.search(pid, &lost);
            tokio::pin!(search);
            loop {
                tokio::select! {
                    found = &mut search => break Ok(found),
                    caught = signals.next() => if let Caught::Ending(number) = caught {
                        break Err(number);
                    },
                }
            }
        };
        match found {
            Ok(found) => Ok(Again::Found(Box::new(found?), began.elapsed())),
            Err(number) => {
                self.server_away = true;
                say(&format!(
                    "the command continues; when the server is back: sandkeep exec --attach {pid} {}",
                    self.sandbox
                ));
                Ok(Again::Left(number))
            }
        }
    }

    async fn search(&self, pid: u32, lost: &Error) -> Result<Session> {
        let request = Request {
            attach: Some(pid),
            detach: Some(self.leaves_it_running()),
            tty: self.request.tty,
            ..Request::default()
        };
        let until = Instant::now() + COMES_BACK_WITHIN;
        loop {
            match self.attach(&request).await {
                Ok(session) => return Ok(session),
                Err(error) if error.code == Code::NotFound => {
                    return Err(Error::not_found(format!(
                        "the command ended while the server was away, and its exit code is not known: {}",
                        error.message
                    )));
                }
                Err(_) if Instant::now() < until => sleep(LOOKS_AGAIN_AFTER).await,
                Err(_) => {
                    return Err(Error::new(
                        lost.code,
                        format!(
                            "the server did not come back within {} s; the command (pid {pid}) continues in its sandbox",
                            COMES_BACK_WITHIN.as_secs()
                        ),
                    )
                    .hint(format!(
                        "when it is back: sandkeep exec --attach {pid} {}",
                        self.sandbox
                    )));
                }
            }
        }
    }

    fn detached(&self) {
        if let Some(pid) = self.pid {
            say(&format!(
                "detached; the command continues: sandkeep exec --attach {pid} {}",
                self.sandbox
            ));
        }
    }

    /// Whoever only listens to a command leaves it as it is.
    fn leaves_it_running(&self) -> bool {
        self.request.detach == Some(true)
    }

    async fn attach(&self, request: &Request) -> Result<Session> {
        let mut session = Session::start(self.client, self.sandbox, request).await?;
        match session.next().await? {
            Told::Started(_) => Ok(session),
            told => Err(Error::internal(format!(
                "the server began with something else: {told:?}"
            ))),
        }
    }
}

/// If even this cannot be written there is nobody to tell.
fn say(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", clean(text));
}

/// Where the command's output goes.
enum Sink {
    Streams,
    Collected(Collected),
}

/// At most this much of each stream is kept for JSON.
const MOST_COLLECTED: usize = 16 << 20;

#[derive(Default)]
struct Collected {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// What is not in it, and why.
    missing: Vec<String>,
}

impl Collected {
    /// The same reason is told once.
    fn lacks(&mut self, why: &str) {
        if !self.missing.iter().any(|known| known == why) {
            self.missing.push(why.to_owned());
        }
    }

    fn view(&self, code: u8) -> Value {
        let mut view = serde_json::json!({
            "exit_code": code,
            "stdout": String::from_utf8_lossy(&self.stdout),
            "stderr": String::from_utf8_lossy(&self.stderr),
            "truncated": !self.missing.is_empty(),
        });
        if !self.missing.is_empty() {
            view["truncated_because"] = self.missing.join("; ").into();
        }
        view
    }
}

impl Sink {
    /// The agent keeps no output for whoever is not there, so that it can be no surprise.
    fn was_away(&mut self, span: Duration) {
        let why = format!(
            "the connection was lost for {} s; output written meanwhile is missing",
            span.as_secs().max(1)
        );
        say(&why);
        if let Self::Collected(kept) = self {
            kept.lacks(&why);
        }
    }

    fn stdout(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Streams => write_all(&mut io::stdout().lock(), bytes),
            Self::Collected(kept) => {
                if keep(&mut kept.stdout, bytes) {
                    kept.lacks(&format!(
                        "only the first {} MiB of stdout are kept",
                        MOST_COLLECTED >> 20
                    ));
                }
                Ok(())
            }
        }
    }

    fn stderr(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Streams => write_all(&mut io::stderr().lock(), bytes),
            Self::Collected(kept) => {
                if keep(&mut kept.stderr, bytes) {
                    kept.lacks(&format!(
                        "only the first {} MiB of stderr are kept",
                        MOST_COLLECTED >> 20
                    ));
                }
                Ok(())
            }
        }
    }
}

/// Whether something had to be left out.
fn keep(kept: &mut Vec<u8>, bytes: &[u8]) -> bool {
    let room = MOST_COLLECTED.saturating_sub(kept.len()).min(bytes.len());
    kept.extend_from_slice(&bytes[..room]);
    room < bytes.len()
}

/// Passes our standard input on, or tells the command that there is none.
fn feed(input: Input, forward: bool) {
    tokio::spawn(async move {
        if forward {
            let mut chunks = read_stdin();
            while let Some(chunk) = chunks.recv().await {
                // The server may be on its way back; when it is not, we end and this with us.
                while input.bytes(chunk.clone()).await.is_err() {
                    sleep(LOOKS_AGAIN_AFTER).await;
                }
            }
        }
        while input.close().await.is_err() {
            sleep(LOOKS_AGAIN_AFTER).await;
        }
    });
}

/// Reads in a thread of its own, which nobody waits for: a read of a terminal can not be broken off.
fn read_stdin() -> mpsc::Receiver<Bytes> {
    let (sender, receiver) = mpsc::channel(4);
    std::thread::spawn(move || {
        let mut stdin = io::stdin().lock();
        let mut buffer = vec![0; CHUNK];
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => {
                    if sender
                        .blocking_send(Bytes::copy_from_slice(&buffer[..count]))
                        .is_err()
                    {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    });
    receiver
}

async fn follow(
    mut session: Session,
    signals: &mut Signals,
    tty: bool,
    sink: &mut Sink,
    way_back: &mut WayBack<'_>,
) -> anyhow::Result<Exited> {
    let input = session.input();
    let mut give_up: Option<Instant> = None;
    loop {
        let told = tokio::select! {
            told = session.next() => match told {
                Ok(told) => told,
                Err(lost) => match way_back.again(lost, signals).await? {
                    Again::Found(found, away) => {
                        session = *found;
                        input.goes_by(&session.input());
                        sink.was_away(away);
                        continue;
                    }
                    Again::Left(number) => return Ok(Exited::by_signal(number)),
                }
            },
            caught = signals.next() => {
                match caught {
                    Caught::Resized if tty => {
                        let _ = input.resize(WindowSize::current()).await;
                    }
                    Caught::Resized => {}
                    Caught::Ending(number) if way_back.leaves_it_running() => {
                        way_back.detached();
                        return Ok(Exited::by_signal(number));
                    }
                    // A first Ctrl-C is the command's to answer; anything else means now.
                    Caught::Ending(INTERRUPT) if give_up.is_none() => {
                        give_up = Some(Instant::now() + AFTER_INTERRUPT);
                        let _ = input.signal("INT").await;
                    }
                    Caught::Ending(number) => {
                        kill(&mut session).await;
                        return Ok(Exited::by_signal(number));
                    }
                }
                continue;
            }
            () = sleep_until(give_up.unwrap_or_else(Instant::now)), if give_up.is_some() => {
                kill(&mut session).await;
                return Ok(Exited::by_signal(INTERRUPT));
            }
        };
        match told {
            Told::Started(pid) => way_back.pid = Some(pid),
            Told::Stdout(bytes) => sink.stdout(&bytes)?,
            Told::Stderr(bytes) => sink.stderr(&bytes)?,
            Told::Exited(exited) => return Ok(exited),
        }
    }
}

/// Ends the command and stays until it is known to have ended, but not for long.
async fn kill(session: &mut Session) {
    let _ = session.input().signal("KILL").await;
    let ended = async { while !matches!(session.next().await, Ok(Told::Exited(_)) | Err(_)) {} };
    let _ = timeout(AFTER_KILL, ended).await;
}

fn write_all(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes)?;
    to.flush()
}

const INTERRUPT: u8 = 2;

/// Signals sent to us that concern the command.
struct Signals {
    resized: Signal,
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

enum Caught {
    Resized,
    Ending(u8),
}

impl Signals {
    fn new() -> Result<Self> {
        Ok(Self {
            resized: signal(SignalKind::window_change())?,
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Caught {
        tokio::select! {
            _ = self.resized.recv() => Caught::Resized,
            _ = self.interrupt.recv() => Caught::Ending(INTERRUPT),
            _ = self.terminate.recv() => Caught::Ending(15),
            _ = self.hangup.recv() => Caught::Ending(1),
        }
    }
}

/// Runs a command that needs no streams of ours; gives its exit code and what it wrote.
pub async fn quiet(client: &Client, sandbox: &str, request: &Request) -> Result<(u8, String)> {
    const MOST: usize = 64 * 1024;
    let mut session = Session::start(client, sandbox, request).await?;
    let _ = session.input().close().await;
    let mut said = Vec::new();
    loop {
        match session.next().await? {
            Told::Stdout(bytes) | Told::Stderr(bytes) => {
                let room = MOST.saturating_sub(said.len());
                said.extend_from_slice(&bytes[..bytes.len().min(room)]);
            }
            Told::Exited(exited) => {
                return Ok((exited.code, String::from_utf8_lossy(&said).into_owned()));
            }
            Told::Started(_) => {}
        }
    }
}
