//! Calls for the host alone.

use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use sandkeep_agent_api::ConnectError;
use sandkeep_agent_api::host::{
    ClockRequest, ClockResponse, InitRequest, LogLevel, LogsResponse, PortsResponse,
};
use sandkeep_agent_api::process::ProcessConfig;
use tokio::time::timeout;

use crate::connect::{error_response, json_response, read_json};
use crate::process::{Launch, StdioKind, host_signal, spawn};
use crate::reap::Exit;
use crate::server::no_content;
use crate::users::User;
use crate::users::read_bounded;
use crate::{Body, State, generation, host_keys, machine, ports};

const WARM_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_HOSTNAME: usize = 63;

/// `GET /envs`: the environment of every process.
pub(crate) fn envs(state: &State) -> Response<Body> {
    json_response(StatusCode::OK, &state.settings().environment())
}

pub(crate) fn ports() -> Response<Body> {
    json_response(
        StatusCode::OK,
        &PortsResponse {
            ports: ports::listening(),
        },
    )
}

pub(crate) fn logs(state: &State, query: Option<&str>) -> Response<Body> {
    let after = query
        .unwrap_or_default()
        .split('&')
        .find_map(|pair| pair.strip_prefix("after="))
        .and_then(|number| number.parse().ok())
        .unwrap_or(0);
    json_response(
        StatusCode::OK,
        &LogsResponse {
            entries: state.log().after(after),
        },
    )
}

/// Sets the limits that only the agent can set.
pub(crate) async fn limits(state: State, request: Request<Incoming>) -> Response<Body> {
    match read_json(request.into_body()).await.and_then(|message| {
        state
            .set_limits(&message)
            .map_err(|error| ConnectError::failed_precondition(error.to_string()))
    }) {
        Ok(()) => no_content(),
        Err(error) => error_response(&error),
    }
}

/// What the ward can not count from outside.
pub(crate) fn usage(state: &State) -> Response<Body> {
    match state.fence().usage() {
        Ok(usage) => json_response(StatusCode::OK, &usage),
        Err(error) => error_response(&ConnectError::failed_precondition(error.to_string())),
    }
}

/// Reads the clock of a machine, or moves it.
pub(crate) async fn clock(state: State, request: Request<Incoming>) -> Response<Body> {
    let moved =
        read_json(request.into_body())
            .await
            .and_then(|message: ClockRequest| match message.forward_us {
                None => Ok(()),
                Some(_) if !state.fence().has_own_clock() => {
                    Err(ConnectError::failed_precondition(
                        "the clock is the one of the host".to_owned(),
                    ))
                }
                Some(forward) => machine::move_clock(forward)
                    .map_err(|error| ConnectError::failed_precondition(error.to_string())),
            });
    match moved {
        Ok(()) => json_response(
            StatusCode::OK,
            &ClockResponse {
                now_us: machine::clock_us(),
            },
        ),
        Err(error) => error_response(&error),
    }
}

/// Brings what the kernel of the box keeps back to its disk. Takes as long as the disk does.
pub(crate) async fn settle() -> Response<Body> {
    let written = tokio::task::spawn_blocking(|| {
        let root = std::fs::File::open("/")?;
        rustix::fs::syncfs(&root).map_err(io::Error::from)
    });
    match written.await {
        Ok(Ok(())) => no_content(),
        Ok(Err(error)) => error_response(&ConnectError::failed_precondition(error.to_string())),
        Err(error) => error_response(&ConnectError::failed_precondition(error.to_string())),
    }
}

/// Has every program stand still.
pub(crate) async fn hold(state: State) -> Response<Body> {
    let held = tokio::task::spawn_blocking(move || state.hold().take(&state)).await;
    match held.map_err(io::Error::other).flatten() {
        Ok(()) => no_content(),
        Err(error) => error_response(&ConnectError::failed_precondition(error.to_string())),
    }
}

/// Lets the programs go on.
pub(crate) async fn release(state: State) -> Response<Body> {
    let released = tokio::task::spawn_blocking(move || state.hold().release(&state)).await;
    match released {
        Ok(()) => no_content(),
        Err(error) => error_response(&ConnectError::failed_precondition(error.to_string())),
    }
}

/// Tells the box who it is.
pub(crate) async fn init(state: State, request: Request<Incoming>) -> Response<Body> {
    match read_json(request.into_body())
        .await
        .and_then(|message| apply(&state, message))
    {
        Ok(()) => no_content(),
        Err(error) => error_response(&error),
    }
}

/// Also reached by the orders of a machine.
pub(crate) fn apply(state: &State, message: InitRequest) -> Result<(), ConnectError> {
    if let Some(hostname) = &message.hostname {
        check_hostname(hostname)?;
    }
    {
        let mut settings = state.settings();
        settings.envs = message.env_vars;
        for (name, value) in [
            ("E2B_SANDBOX", "true".to_owned()),
            ("E2B_SANDBOX_ID", message.sandbox_id),
            ("E2B_TEMPLATE_ID", message.template_id),
        ] {
            settings.envs.insert(name.to_owned(), value);
        }
        settings.default_user = message.default_user;
        settings.default_workdir = message.default_workdir.map(Into::into);
    }
    // Only PID 1 has a box of its own; elsewhere this would rename the machine.
    if rustix::process::getpid() == rustix::process::Pid::INIT {
        if let Some(hostname) = &message.hostname {
            note(state, "hostname", set_hostname(hostname));
            note(
                state,
                "/etc/hostname",
                write_file("/etc/hostname", &format!("{hostname}\n")),
            );
            note(state, "/etc/hosts", write_hosts(hostname));
        }
        if let Some(generation) = &message.generation {
            note(state, "its generation", generation::write(generation));
        }
        if let Some(now) = message.timestamp_ms
            && state.fence().has_own_clock()
        {
            note(state, "the clock", machine::set_clock(now));
        }
        if !message.keep_machine_id {
            note(state, "/etc/machine-id", write_machine_id());
            note(state, "the keys of its ssh server", host_keys::renew(state));
        }
    }
    Ok(())
}

/// What could not be set does not keep the box from working (its root may be read-only).
fn note(state: &State, what: &str, result: io::Result<()>) {
    if let Err(error) = result {
        state
            .log()
            .add(LogLevel::Warn, format!("cannot set {what}: {error}"));
    }
}

/// Most sandboxes are born with their name, and may not change it.
fn set_hostname(name: &str) -> io::Result<()> {
    if rustix::system::uname().nodename().to_bytes() == name.as_bytes() {
        return Ok(());
    }
    Ok(rustix::system::sethostname(name.as_bytes())?)
}

fn check_hostname(name: &str) -> Result<(), ConnectError> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    if name.is_empty() || name.len() > MAX_HOSTNAME || !name.bytes().all(is_plain) {
        return Err(ConnectError::invalid_argument(format!(
            "'{name}' is not a hostname"
        )));
    }
    Ok(())
}

/// Replaces a file's content in place (it may be a mount point), never blocking on a pipe.
fn write_file(path: &str, content: &str) -> io::Result<()> {
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    file.write_all(content.as_bytes())
}

fn write_hosts(hostname: &str) -> io::Result<()> {
    let old = match read_bounded(Path::new("/etc/hosts")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        result => result?,
    };
    write_file("/etc/hosts", &hosts_for(&old, hostname))
}

/// The line of 127.0.1.1 is ours, as distributions use it for the own name; the rest stays.
fn hosts_for(old: &str, hostname: &str) -> String {
    let address = |line: &str| line.split_ascii_whitespace().next().map(str::to_owned);
    let mut lines: Vec<String> = old
        .lines()
        .filter(|line| address(line).as_deref() != Some("127.0.1.1"))
        .map(str::to_owned)
        .collect();
    if !lines
        .iter()
        .any(|line| address(line).as_deref() == Some("127.0.0.1"))
    {
        lines.insert(0, "127.0.0.1\tlocalhost".to_owned());
        lines.insert(1, "::1\tlocalhost ip6-localhost ip6-loopback".to_owned());
    }
    lines.push(format!("127.0.1.1\t{hostname}\n"));
    lines.join("\n")
}

fn write_machine_id() -> io::Result<()> {
    let mut bytes = [0u8; 16];
    let length = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    if length != bytes.len() {
        return Err(io::Error::other("too few random bytes"));
    }
    let id: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    write_file("/etc/machine-id", &format!("{id}\n"))
}

/// A signal for one process, from the host.
pub(crate) async fn signal(state: State, request: Request<Incoming>) -> Response<Body> {
    let sent = read_json(request.into_body())
        .await
        .and_then(|message| host_signal(&state, message));
    match sent {
        Ok(()) => no_content(),
        Err(error) => error_response(&error),
    }
}

/// Runs what every first command runs, so that its files are in memory when one comes.
pub(crate) async fn warm(state: State) -> Response<Body> {
    match warm_up(&state).await {
        Ok(()) => no_content(),
        Err(error) => error_response(&error),
    }
}

async fn warm_up(state: &State) -> Result<(), ConnectError> {
    let user = state.default_user()?;
    let words = ["/bin/bash", "-l", "-c", "true"];
    run_to_end(state, &user, &words, WARM_TIMEOUT).await?;
    Ok(())
}

/// Runs a program of the box for the agent itself and says how it ended.
pub(crate) async fn run_to_end(
    state: &State,
    user: &User,
    words: &[&str],
    limit: Duration,
) -> Result<Exit, ConnectError> {
    let config = ProcessConfig {
        cmd: words[0].to_owned(),
        args: words[1..].iter().map(|&word| word.to_owned()).collect(),
        ..Default::default()
    };
    let box_envs = state.settings().environment();
    let cwd = if user.home.is_dir() {
        user.home.as_path()
    } else {
        Path::new("/")
    };
    let launch = Launch {
        config: &config,
        user,
        box_envs: &box_envs,
        cwd,
        stdio: StdioKind::Nothing,
        score: state.child_score(),
        fence: state.fence(),
    };
    let mut spawned = spawn(state.reaper(), &launch).map_err(|error| {
        ConnectError::failed_precondition(format!("cannot run {}: {error}", words[0]))
    })?;
    let waited = timeout(limit, spawned.exit.wait_for(Option::is_some)).await;
    match waited
        .ok()
        .and_then(|ended| ended.ok().and_then(|how| *how))
    {
        Some(how) => Ok(how),
        None => {
            // Failing means that it has just ended.
            let _ = state.reaper().kill(spawned.pid);
            Err(ConnectError::deadline_exceeded(format!(
                "{} did not end in time",
                words[0]
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_file_keeps_what_others_wrote() {
        let once = hosts_for("127.0.0.1 localhost\n10.0.0.1 db\n", "box-1");
        assert_eq!(once, "127.0.0.1 localhost\n10.0.0.1 db\n127.0.1.1\tbox-1\n");
        let twice = hosts_for(&once, "box-2");
        assert_eq!(
            twice,
            "127.0.0.1 localhost\n10.0.0.1 db\n127.0.1.1\tbox-2\n"
        );
        assert!(hosts_for("", "b").starts_with("127.0.0.1\tlocalhost\n::1\t"));
    }

    #[test]
    fn hostnames_are_checked() {
        assert!(check_hostname("box-1.local").is_ok());
        for name in ["", "a b", "a\nb", &"a".repeat(64)] {
            assert!(check_hostname(name).is_err());
        }
    }
}
