//! The host's client and an agent that answers whatever it likes, in whatever pieces.
//!
//! The clock is paused: when nobody can go on, it jumps to the next deadline. So a client that
//! would wait for ever shows as a timeout of the fuzzer.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandkeep_agent_api::{
    CONNECT_JSON,
    filesystem::WatchDirResponse,
    host::InitRequest,
    process::{Empty, Selector, Signal, StartRequest},
};
use sandkeep_agent_client::{Agent, FileRange, Limits, TunnelError, full, tunnel};
use sandkeep_fuzz::Cuts;
use sandkeep_model::{Error, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

const LIMITS: usize = 2048;

fuzz_target!(|data: &[u8]| {
    let [call, shape, data @ ..] = data else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O");
    runtime.block_on(converse(*call, *shape, data));
});

async fn converse(call: u8, shape: u8, data: &[u8]) {
    let (ours, theirs) = duplex(512);
    let (cuts, answer) = Cuts::take(data);
    let agent = hostile(
        theirs,
        head(shape, answer.len()),
        cuts,
        answer,
        shape & 8 != 0,
    );
    let ((), result) = tokio::join!(agent, ask(call, ours));
    if let Err(error) = result {
        let shown = [Some(&error.message), error.hint.as_ref()];
        let clean = |text: &&String| !text.contains(char::is_control) && text.len() < 8192;
        assert!(shown.iter().flatten().all(clean), "{error:?}");
    }
}

/// A proper head lets the fuzzer come to the body at once; without one it must write its own.
fn head(shape: u8, length: usize) -> String {
    let status = [
        "200 OK",
        "204 No Content",
        "404 Not Found",
        "502 Bad Gateway",
    ][usize::from(shape >> 4) % 4];
    match shape % 4 {
        0 => String::new(),
        1 => format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n"),
        2 => format!(
            "HTTP/1.1 {status}\r\ncontent-type: {CONNECT_JSON}\r\nconnection: close\r\n\r\n"
        ),
        _ => format!("HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n"),
    }
}

async fn hostile(mut io: DuplexStream, head: String, cuts: Cuts, answer: &[u8], hangs_up: bool) {
    let mut asked = [0; 512];
    if io.read(&mut asked).await.unwrap_or(0) == 0 {
        return;
    }
    if io.write_all(head.as_bytes()).await.is_err() {
        return;
    }
    for piece in cuts.of(answer) {
        if io.write_all(piece).await.is_err() {
            return;
        }
    }
    // Or it keeps the connection and says nothing more.
    while !hangs_up && io.read(&mut asked).await.unwrap_or(0) > 0 {}
}

async fn ask(call: u8, channel: DuplexStream) -> Result<()> {
    if call % 16 == 0 {
        let mut io = match tunnel(channel, 8080).await {
            Ok(io) => io,
            Err(TunnelError::PortClosed) => return Ok(()),
            Err(TunnelError::Agent(error)) => return Err(error),
        };
        io.write_all(b"hello").await.ok();
        io.shutdown().await.ok();
        let mut heard = Vec::new();
        io.take(LIMITS as u64).read_to_end(&mut heard).await.ok();
        return Ok(());
    }
    let limits = Limits {
        unary_bytes: LIMITS,
        frame_bytes: LIMITS,
        ..Limits::default()
    };
    let mut agent = Agent::with_limits(channel, limits).await?;
    let process = Selector::Pid(1);
    match call % 16 {
        1 => agent.health().await,
        2 => agent.init(&InitRequest::default()).await,
        3 => agent.ports().await.map(drop),
        4 => agent.logs(0).await.map(drop),
        5 => agent.metrics().await.map(drop),
        6 => agent.list_processes().await.map(drop),
        7 => agent.send_stdin(process, b"x").await,
        8 => agent.signal(process, Signal::Kill).await,
        9 => agent.resize(process, 80, 24).await,
        10 => agent
            .write_file("/a", Some("root"), full("x"))
            .await
            .map(drop),
        11 => read(agent, None).await,
        12 => {
            read(
                agent,
                Some(FileRange {
                    start: 3,
                    end: None,
                }),
            )
            .await
        }
        13 => watch(agent).await,
        // Twice over one connection: what is left of the first answer must not confuse.
        14 => {
            agent.ports().await.map(drop)?;
            agent.metrics().await.map(drop)
        }
        _ => run(agent).await,
    }
}

async fn read(agent: Agent, range: Option<FileRange>) -> Result<()> {
    let mut file = agent.read_file("/a", None, range).await?;
    let said = file.length();
    let mut got = 0;
    while let Some(chunk) = file.chunk().await? {
        got += chunk.len() as u64;
    }
    // A file that ended without an error is as long as it was said to be.
    assert!(said.is_none_or(|said| said == got), "{said:?} {got}");
    Ok(())
}

async fn run(agent: Agent) -> Result<()> {
    let mut stream = agent.start(&StartRequest::default(), None, None).await?;
    while stream.next().await?.is_some() {}
    Ok(())
}

async fn watch(agent: Agent) -> Result<(), Error> {
    let method = "filesystem.Filesystem/WatchDir";
    let mut frames = agent.server_stream(method, None, &Empty {}, None).await?;
    while frames.next::<WatchDirResponse>().await?.is_some() {}
    Ok(())
}
