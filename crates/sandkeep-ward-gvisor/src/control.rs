//! The control socket of a sandbox: JSON calls, a hundred times faster than starting `runsc`.
//!
//! The sandbox runs the box's kernel, so what it answers is as hostile as the box.

use sandkeep_host::files::open_dir;
use sandkeep_model::{Code, Error, Result};
use serde::Deserialize;
use serde_json::{Value, json};
use std::{io, os::fd::AsRawFd as _, path::Path, time::Duration};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    time::timeout,
};

const DEADLINE: Duration = Duration::from_secs(10);
const MOST_ANSWERED: usize = 256 << 10;

#[derive(Deserialize)]
struct Answer {
    success: bool,
    #[serde(default)]
    err: String,
    #[serde(default)]
    result: Value,
}

/// Stops every task of the box's kernel.
pub async fn pause(socket: &Path) -> Result<()> {
    call(socket, "containerManager.Pause", Value::Null)
        .await
        .map(drop)
}

/// Lets them go on.
pub async fn resume(socket: &Path) -> Result<()> {
    call(socket, "containerManager.Resume", Value::Null)
        .await
        .map(drop)
}

/// Processes in the box, as its kernel counts them.
pub async fn processes(socket: &Path, name: &str) -> Result<u64> {
    let answer = call(socket, "containerManager.Event", json!(name)).await?;
    answer
        .pointer("/event/data/pids/current")
        .and_then(Value::as_u64)
        .ok_or_else(|| Error::internal("the sandbox does not tell how many processes it has"))
}

async fn call(socket: &Path, method: &str, argument: Value) -> Result<Value> {
    let answer = timeout(DEADLINE, talk(socket, method, argument))
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
        .map_err(|error| {
            Error::new(
                Code::BoxUnreachable,
                format!("the sandbox does not answer {method}: {error}"),
            )
            .hint("the box may be ending; try again")
        })?;
    if answer.success {
        return Ok(answer.result);
    }
    Err(Error::internal(format!(
        "the sandbox refused {method}: {}",
        answer.err.chars().take(500).collect::<String>()
    )))
}

async fn talk(socket: &Path, method: &str, argument: Value) -> io::Result<Answer> {
    let (Some(dir), Some(name)) = (socket.parent(), socket.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    // The path may be longer than an address holds, so it is named by its directory's descriptor.
    let dir = open_dir(dir).map_err(io::Error::other)?;
    let short = Path::new("/proc/self/fd")
        .join(dir.as_raw_fd().to_string())
        .join(name);
    let mut stream = UnixStream::connect(short).await?;
    let call = json!({ "method": method, "arg": argument });
    stream.write_all(call.to_string().as_bytes()).await?;
    let mut bytes = Vec::new();
    loop {
        let mut part = [0; 8192];
        let count = stream.read(&mut part).await?;
        bytes.extend_from_slice(&part[..count]);
        match serde_json::from_slice(&bytes) {
            Ok(answer) => return Ok(answer),
            // More is to come.
            Err(error) if error.is_eof() && count > 0 && bytes.len() < MOST_ANSWERED => {}
            Err(error) => return Err(error.into()),
        }
    }
}
