//! Through the gateway and a real agent to a program behind a port.

use crate::harness::{TOKEN, World};
use http_body_util::BodyExt;
use sandkeep_agent_client::empty;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// A program that listens on a free port; the agent of these tests shares our network.
async fn program() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// Reads up to and with `end`.
async fn read_until(io: &mut TcpStream, end: &[u8]) -> String {
    let mut seen = Vec::new();
    while !seen.windows(end.len()).any(|w| w == end) {
        let count = io.read_buf(&mut seen).await.unwrap();
        assert_ne!(count, 0, "ended after {:?}", String::from_utf8_lossy(&seen));
    }
    String::from_utf8(seen).unwrap()
}

const HEAD_END: &[u8] = b"\r\n\r\n";

#[tokio::test]
async fn a_program_sees_the_client_and_not_the_token() {
    let world = World::new().await;
    let (listener, port) = program().await;
    let program = tokio::spawn(async move {
        let (mut io, _) = listener.accept().await.unwrap();
        let head = read_until(&mut io, HEAD_END).await;
        io.write_all(
            b"HTTP/1.1 418 Teapot\r\nx-app: yes\r\nconnection: x-gone\r\nx-gone: 1\r\ncontent-length: 2\r\n\r\nok",
        )
        .await
        .unwrap();
        head
    });
    let host = format!("{port}-{}.localhost:3000", world.boxed.id());
    let request = http::Request::builder()
        .uri("/a/../b?c=%20d")
        .header("host", &host)
        .header("x-access-token", TOKEN)
        .header("x-forwarded-for", "6.6.6.6")
        .header("cookie", "a=b")
        .body(empty())
        .unwrap();
    let (head, body) = world.ask(request).await;
    assert_eq!((head.status.as_u16(), &body[..]), (418, &b"ok"[..]));
    assert_eq!(head.headers["x-app"], "yes");
    assert!(!head.headers.contains_key("x-gone"));

    let seen = program.await.unwrap();
    assert!(
        seen.starts_with("GET /a/../b?c=%20d HTTP/1.1\r\n"),
        "{seen}"
    );
    for line in [
        format!("host: {host}"),
        format!("x-forwarded-host: {host}"),
        "x-forwarded-for: 127.0.0.1".to_owned(),
        "x-forwarded-proto: http".to_owned(),
        "cookie: a=b".to_owned(),
    ] {
        assert!(seen.contains(&format!("\r\n{line}\r\n")), "{line}: {seen}");
    }
    assert!(!seen.contains(TOKEN) && !seen.contains("6.6.6.6"), "{seen}");
}

#[tokio::test]
async fn a_closed_port_is_told() {
    let world = World::new().await;
    let (listener, port) = program().await;
    drop(listener);
    let (head, body) = world
        .ask(world.request(port, "GET", "/").body(empty()).unwrap())
        .await;
    assert_eq!(head.status, 502);
    assert_eq!(
        head.headers["content-type"],
        "application/json; charset=utf-8"
    );
    let id = world.boxed.id();
    assert_eq!(
        body,
        format!(
            r#"{{"sandboxId":"{id}","message":"The sandbox is running but port is not open","port":{port},"code":502}}"#
        )
    );
}

#[tokio::test]
async fn bodies_stream_both_ways_at_once() {
    let world = World::new().await;
    let (listener, port) = program().await;
    let program = tokio::spawn(async move {
        let (mut io, _) = listener.accept().await.unwrap();
        read_until(&mut io, b"one\r\n").await;
        io.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
            .await
            .unwrap();
        read_until(&mut io, b"two\r\n").await;
        io.write_all(b"6\r\nsecond\r\n0\r\n\r\n").await.unwrap();
    });
    let mut client = world.tcp().await;
    let head = format!(
        "POST / HTTP/1.1\r\nhost: {port}-{}.localhost\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n",
        world.boxed.id()
    );
    client.write_all(head.as_bytes()).await.unwrap();
    // The answer begins before the question is over.
    read_until(&mut client, b"first\r\n").await;
    client.write_all(b"3\r\ntwo\r\n0\r\n\r\n").await.unwrap();
    read_until(&mut client, b"0\r\n\r\n").await;
    program.await.unwrap();
}

#[tokio::test]
async fn a_client_that_vanishes_takes_the_connection_with_it() {
    let world = World::new().await;
    let (listener, port) = program().await;
    let mut client = world.client().await;
    let request = world.request(port, "GET", "/").body(empty()).unwrap();
    let (response, mut io) = tokio::join!(client.request(request), async {
        let (mut io, _) = listener.accept().await.unwrap();
        read_until(&mut io, HEAD_END).await;
        io.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
            .await
            .unwrap();
        io
    });
    let mut body = response.unwrap().into_body();
    body.frame().await.unwrap().unwrap();
    drop(body);
    drop(client);
    // Comes back only when the gateway hangs up; whether by FIN or RST does not matter.
    let mut rest = Vec::new();
    io.read_to_end(&mut rest).await.ok();
}

async fn upgraded(world: &World) -> (TcpStream, TcpStream) {
    let (listener, port) = program().await;
    let mut client = world.tcp().await;
    let head = format!(
        "GET /ws HTTP/1.1\r\nhost: {port}-{}.localhost\r\nconnection: keep-alive, Upgrade\r\n\
         upgrade: websocket\r\nsec-websocket-key: abc\r\n\r\n",
        world.boxed.id()
    );
    client.write_all(head.as_bytes()).await.unwrap();
    let (mut io, _) = listener.accept().await.unwrap();
    let seen = read_until(&mut io, HEAD_END).await;
    assert!(seen.contains("\r\nupgrade: websocket\r\n"), "{seen}");
    assert!(seen.contains("\r\nsec-websocket-key: abc\r\n"), "{seen}");
    io.write_all(
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
          sec-websocket-accept: def\r\n\r\nhello",
    )
    .await
    .unwrap();
    let answer = read_until(&mut client, b"hello").await;
    assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    assert!(answer.contains("sec-websocket-accept: def"), "{answer}");
    (client, io)
}

#[tokio::test]
async fn a_change_of_protocol_passes_through() {
    let world = World::new().await;
    let (mut client, mut io) = upgraded(&world).await;
    client.write_all(b"\x81\x04ping").await.unwrap();
    read_until_bytes(&mut io, b"\x81\x04ping").await;
    io.write_all(b"\x8a\x04pong").await.unwrap();
    read_until_bytes(&mut client, b"\x8a\x04pong").await;
    drop(io);
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).await.ok();
    assert!(rest.is_empty());
}

async fn read_until_bytes(io: &mut TcpStream, wanted: &[u8]) {
    let mut seen = vec![0; wanted.len()];
    io.read_exact(&mut seen).await.unwrap();
    assert_eq!(seen, wanted);
}

#[tokio::test]
async fn a_box_that_ends_takes_changed_connections_with_it() {
    let world = World::new().await;
    let (mut client, mut io) = upgraded(&world).await;
    world.boxed.end();
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).await.ok();
    io.read_to_end(&mut rest).await.ok();
}

#[tokio::test]
async fn a_program_that_talks_nonsense_is_a_bad_gateway() {
    let world = World::new().await;
    let (listener, port) = program().await;
    tokio::spawn(async move {
        let (mut io, _) = listener.accept().await.unwrap();
        io.write_all(b"SSH-2.0-nonsense\r\n\r\n").await.unwrap();
        let mut rest = Vec::new();
        io.read_to_end(&mut rest).await.ok();
    });
    let (head, body) = world
        .ask(world.request(port, "GET", "/").body(empty()).unwrap())
        .await;
    assert_eq!(head.status, 502);
    assert!(body.starts_with(br#"{"sandboxId":"#));
}

#[tokio::test]
async fn a_program_of_the_old_days_is_understood() {
    let world = World::new().await;
    let (listener, port) = program().await;
    tokio::spawn(async move {
        let (mut io, _) = listener.accept().await.unwrap();
        read_until(&mut io, HEAD_END).await;
        // The end of the connection is the end of the body.
        io.write_all(b"HTTP/1.0 200 OK\r\nserver: SimpleHTTP\r\n\r\nhello")
            .await
            .unwrap();
    });
    let (head, body) = world
        .ask(world.request(port, "GET", "/").body(empty()).unwrap())
        .await;
    assert_eq!(head.version, http::Version::HTTP_11);
    assert_eq!((head.status.as_u16(), &body[..]), (200, &b"hello"[..]));
}
