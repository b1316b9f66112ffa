//! An agent that does everything it must not.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::Duration;

use sandkeep_agent_api::{
    encode_end, encode_message,
    process::{EventResponse, ProcessEvent, Selector, StartEvent, StartRequest},
};
use sandkeep_agent_client::{Agent, Limits, TunnelError, full, tunnel};
use sandkeep_model::Code;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

/// Reads until the end of the request's head (and whatever body came with it).
async fn read_head(io: &mut DuplexStream) -> Vec<u8> {
    let mut seen = Vec::new();
    while !seen.windows(4).any(|w| w == b"\r\n\r\n") {
        if io.read_buf(&mut seen).await.unwrap() == 0 {
            break;
        }
    }
    seen
}

/// An agent that answers the first request with `answer`, and keeps the connection open.
async fn answering(answer: impl Into<Vec<u8>>) -> Agent {
    let (ours, mut theirs) = duplex(1 << 16);
    let answer = answer.into();
    tokio::spawn(async move {
        read_head(&mut theirs).await;
        // The client may hang up in the middle of it; that is the point.
        theirs.write_all(&answer).await.ok();
        let mut rest = Vec::new();
        theirs.read_to_end(&mut rest).await.ok();
    });
    Agent::over(ours).await.unwrap()
}

fn ok(kind: &str, body: &[u8]) -> Vec<u8> {
    let mut answer = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    answer.extend_from_slice(body);
    answer
}

fn started(pid: u32) -> Vec<u8> {
    let event = ProcessEvent::Start(StartEvent { pid });
    encode_message(&EventResponse { event }).unwrap().to_vec()
}

#[tokio::test]
async fn endless_headers_end_the_connection() {
    let (ours, mut theirs) = duplex(1 << 16);
    let writer = tokio::spawn(async move {
        read_head(&mut theirs).await;
        theirs.write_all(b"HTTP/1.1 200 OK\r\n").await.ok();
        let mut written = 0_u64;
        // Ends only because the client hangs up.
        while theirs
            .write_all(b"x-again: aaaaaaaaaaaaaaaa\r\n")
            .await
            .is_ok()
        {
            written += 26;
        }
        written
    });
    let mut agent = Agent::over(ours).await.unwrap();
    let error = agent.ports().await.unwrap_err();
    assert_eq!(error.code, Code::BoxUnreachable);
    drop(agent);
    assert!(writer.await.unwrap() < 1 << 20);
}

#[tokio::test(start_paused = true)]
async fn no_answer_meets_the_deadline() {
    let mut agent = answering("").await;
    let error = agent.list_processes().await.unwrap_err();
    assert_eq!(error.code, Code::DeadlineExceeded);
    assert!(error.retryable);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_never_ends_meets_the_deadline() {
    let mut agent = answering("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{").await;
    let error = agent.ports().await.unwrap_err();
    assert_eq!(error.code, Code::DeadlineExceeded);
}

#[tokio::test]
async fn a_file_announced_without_a_body_is_refused() {
    let agent = answering("HTTP/1.1 204 No Content\r\ncontent-length: 10\r\n\r\n").await;
    assert!(agent.read_file("/a", None, None).await.is_err());
}

#[tokio::test]
async fn a_giant_unary_body_is_cut_off() {
    let mut agent = answering(ok("application/json", &vec![b' '; 9 << 20])).await;
    let error = agent.ports().await.unwrap_err();
    assert_eq!(error.code, Code::BoxUnreachable);
    assert!(error.message.contains("larger"), "{error}");
}

#[tokio::test]
async fn garbage_is_not_http_and_not_json() {
    let mut agent = answering("SSH-2.0-OpenSSH_9.2\r\n\r\n").await;
    assert_eq!(agent.health().await.unwrap_err().code, Code::BoxUnreachable);
    for body in ["{\"ports\": 7}", "[[[[", "\u{0}\u{1}", ""] {
        let mut agent = answering(ok("application/json", body.as_bytes())).await;
        let error = agent.ports().await.unwrap_err();
        assert_eq!(error.code, Code::BoxUnreachable, "{body:?}");
        assert!(!error.retryable);
    }
}

#[tokio::test]
async fn deeply_nested_json_does_not_overflow_the_stack() {
    let deep = format!("{{\"ports\":{}", "[".repeat(200_000));
    let mut agent = answering(ok("application/json", deep.as_bytes())).await;
    assert!(agent.ports().await.is_err());
}

#[tokio::test]
async fn a_refusal_is_mapped_and_cleaned() {
    let body = r#"{"code":"not_found","message":"process with pid 9 \u001b[31mnot found"}"#;
    let answer = format!(
        "HTTP/1.1 404 Not Found\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut agent = answering(answer).await;
    let error = agent.close_stdin(Selector::Pid(9)).await.unwrap_err();
    assert_eq!(error.code, Code::NotFound);
    assert_eq!(error.message, "process with pid 9 [31mnot found");
}

#[tokio::test]
async fn a_stream_is_read_to_its_proper_end() {
    let mut body = started(42);
    body.extend_from_slice(&encode_end(None));
    let agent = answering(ok("application/connect+json", &body)).await;
    let mut stream = agent
        .start(&StartRequest::default(), Some("root"), None)
        .await
        .unwrap();
    assert_eq!(
        stream.next().await.unwrap(),
        Some(ProcessEvent::Start(StartEvent { pid: 42 }))
    );
    assert_eq!(stream.next().await.unwrap(), None);
    assert_eq!(stream.next().await.unwrap(), None);
}

#[tokio::test]
async fn a_stream_without_an_end_frame_or_with_half_a_frame_is_an_error() {
    for cut in [started(42), [started(42), vec![0, 0, 0]].concat()] {
        let agent = answering(ok("application/connect+json", &cut)).await;
        let mut stream = agent
            .start(&StartRequest::default(), None, None)
            .await
            .unwrap();
        assert!(stream.next().await.unwrap().is_some());
        let error = stream.next().await.unwrap_err();
        assert_eq!(error.code, Code::BoxUnreachable);
        assert_eq!(stream.next().await.unwrap(), None);
    }
}

#[tokio::test]
async fn a_frame_of_four_gib_is_refused_at_its_head() {
    let mut answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n".to_vec();
    answer.extend_from_slice(&[0, 0xff, 0xff, 0xff, 0xff, b'\r', b'\n']);
    let agent = answering(answer).await;
    let mut stream = agent
        .start(&StartRequest::default(), None, None)
        .await
        .unwrap();
    let error = stream.next().await.unwrap_err();
    assert_eq!(error.code, Code::BoxUnreachable);
    assert!(error.message.contains("larger"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn silence_on_a_stream_ends_it() {
    let answer = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    let agent = answering(answer).await;
    let mut stream = agent
        .start(&StartRequest::default(), None, None)
        .await
        .unwrap();
    let error = stream.next().await.unwrap_err();
    assert_eq!(error.code, Code::BoxUnreachable);
    assert!(error.message.contains("silent"), "{error}");
}

#[tokio::test]
async fn dropping_a_stream_hangs_up() {
    let (ours, mut theirs) = duplex(1 << 16);
    let other = tokio::spawn(async move {
        read_head(&mut theirs).await;
        theirs
            .write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            .await
            .unwrap();
        let mut rest = Vec::new();
        // Comes to an end only when the client hangs up.
        theirs.read_to_end(&mut rest).await.unwrap();
    });
    let agent = Agent::over(ours).await.unwrap();
    let stream = agent
        .start(&StartRequest::default(), None, None)
        .await
        .unwrap();
    drop(stream);
    other.await.unwrap();
}

#[tokio::test]
async fn a_tunnel_keeps_the_bytes_that_came_with_the_answer() {
    let (ours, mut theirs) = duplex(1 << 16);
    let other = tokio::spawn(async move {
        let head = read_head(&mut theirs).await;
        theirs
            .write_all(b"HTTP/1.1 200 OK\r\n\r\nhello ")
            .await
            .unwrap();
        theirs.write_all(b"box").await.unwrap();
        let mut said = [0; 3];
        theirs.read_exact(&mut said).await.unwrap();
        (head, said)
    });
    let mut io = tunnel(ours, 8080).await.unwrap();
    let mut heard = [0; 9];
    io.read_exact(&mut heard).await.unwrap();
    assert_eq!(&heard, b"hello box");
    io.write_all(b"hey").await.unwrap();
    let (head, said) = other.await.unwrap();
    assert!(head.starts_with(b"CONNECT localhost:8080 HTTP/1.1\r\n"));
    assert_eq!(&said, b"hey");
}

#[tokio::test]
async fn a_closed_port_is_told_from_a_broken_agent() {
    for (body, closed) in [
        (r#"{"code":"port_closed","message":"nobody listens"}"#, true),
        (r#"{"code":502,"message":"?"}"#, false),
        ("<html>", false),
    ] {
        let (ours, mut theirs) = duplex(1 << 16);
        let answer = format!(
            "HTTP/1.1 502 Bad Gateway\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let other = tokio::spawn(async move {
            read_head(&mut theirs).await;
            theirs.write_all(answer.as_bytes()).await.unwrap();
            theirs
        });
        let error = tunnel(ours, 1).await.unwrap_err();
        assert_eq!(matches!(error, TunnelError::PortClosed), closed, "{body}");
        other.await.unwrap();
    }
}

#[tokio::test]
async fn names_that_can_not_be_users_never_reach_the_agent() {
    for user in ["", "a:b", "a\r\nx: y"] {
        let (ours, mut theirs) = duplex(1 << 16);
        let mut agent = Agent::over(ours).await.unwrap();
        let error = agent
            .write_file("/tmp/x", Some(user), full("x"))
            .await
            .unwrap_err();
        assert_eq!(error.field.as_deref(), Some("user"));
        drop(agent);
        let mut seen = Vec::new();
        theirs.read_to_end(&mut seen).await.unwrap();
        assert!(seen.is_empty());
    }
}

#[tokio::test]
async fn shorter_deadlines_hold_too() {
    let (ours, _theirs) = duplex(1 << 16);
    let limits = Limits {
        deadline: Duration::from_millis(1),
        ..Limits::default()
    };
    let mut agent = Agent::with_limits(ours, limits).await.unwrap();
    assert_eq!(
        agent.health().await.unwrap_err().code,
        Code::DeadlineExceeded
    );
}
