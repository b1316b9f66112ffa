//! Through the gateway to a real agent.

use crate::harness::{TOKEN, World, whole};
use http::Request;
use http_body_util::BodyExt;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use sandkeep_agent_api::{
    encode_message,
    process::{ProcessConfig, StartRequest},
};
use sandkeep_agent_client::{Body, empty, full};
use sandkeep_gateway::{Operation, sign};
use sandkeep_model::Secret;
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

fn start(world: &World, script: &str) -> Request<Body> {
    let request = StartRequest {
        process: Some(ProcessConfig {
            cmd: "/bin/sh".into(),
            args: vec!["-c".into(), script.into()],
            ..Default::default()
        }),
        stdin: Some(false),
        ..Default::default()
    };
    world
        .envd("POST", "/process.Process/Start")
        .header("content-type", "application/connect+json")
        .header("connect-protocol-version", "1")
        .header("authorization", "Basic cm9vdDo=")
        .body(full(encode_message(&request).unwrap()))
        .unwrap()
}

#[tokio::test]
async fn commands_run_and_connections_are_used_again() {
    let world = World::new().await;
    let mut client = world.client().await;
    for round in 0..5 {
        let response = client.request(start(&world, "echo hi")).await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(
            response.headers()["content-type"],
            "application/connect+json"
        );
        let (_, body) = whole(response).await;
        let text = String::from_utf8_lossy(&body);
        assert!(text.contains(r#"{"stdout":"aGkK"}"#), "{round}: {text}");
        assert!(text.ends_with("{}"), "{round}: {text}");
    }
    assert_eq!(world.boxed.connects(), 1);
}

#[tokio::test]
async fn without_the_token_only_health_answers() {
    let world = World::new().await;
    let bare = |method: &str, path: &str| {
        let mut request = world.envd(method, path).body(empty()).unwrap();
        request.headers_mut().remove("x-access-token");
        request
    };
    let (head, body) = world.ask(bare("GET", "/health")).await;
    assert_eq!((head.status.as_u16(), body.len()), (204, 0));

    let (head, body) = world.ask(bare("POST", "/process.Process/List")).await;
    assert_eq!(head.status, 401);
    assert_eq!(
        body,
        r#"{"code":401,"message":"unauthorized access, please provide a valid access token or method signing if supported"}"#
    );
    let (head, body) = world.ask(bare("GET", "/files?path=/etc/passwd")).await;
    assert_eq!(head.status, 401);
    assert_eq!(
        body,
        r#"{"code":401,"message":"missing signature query parameter"}"#
    );
    let (head, _) = world.ask(bare("OPTIONS", "/files")).await;
    assert_eq!(head.status, 204);
    assert_eq!(head.headers["access-control-allow-origin"], "*");
    assert_eq!(world.boxed.connects(), 1);
}

#[tokio::test]
async fn the_hosts_own_calls_are_out_of_reach() {
    let world = World::new().await;
    for path in [
        "/init",
        "/sandkeep.host/logs",
        "/sandkeep.host/ports",
        "//sandkeep.host/ports",
        "/process.Process/../sandkeep.host/ports",
        "/process.Process/%2e%2e/sandkeep.host/ports",
        "/./sandkeep.host/ports",
    ] {
        let (head, _) = world
            .ask(world.envd("GET", path).body(empty()).unwrap())
            .await;
        assert_eq!(head.status, 404, "{path}");
    }
    assert_eq!(world.boxed.connects(), 0);

    // Absolute form and CONNECT, which a client library would not send like this.
    let id = world.boxed.id();
    for line in [
        "GET http://localhost/sandkeep.host/ports HTTP/1.1",
        "GET http://localhost//health/../sandkeep.host/ports HTTP/1.1",
        "CONNECT localhost:22 HTTP/1.1",
    ] {
        let mut tcp = world.tcp().await;
        let head = format!(
            "{line}\r\nhost: localhost\r\nconnection: close\r\ne2b-sandbox-id: {id}\r\n\
             e2b-sandbox-port: 49983\r\nx-access-token: {TOKEN}\r\n\r\n"
        );
        tcp.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        tcp.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 404 "), "{line}: {answer}");
    }
    assert_eq!(world.boxed.connects(), 0);
}

fn signed(path: &str, operation: Operation, end: Option<i64>) -> String {
    let signature = sign(path, operation, Some("root"), &Secret::new(TOKEN), end);
    let coded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let mut url = format!(
        "/files?path={}&username=root&signature={}",
        coded(path),
        coded(&signature)
    );
    if let Some(end) = end {
        url += &format!("&signature_expiration={end}");
    }
    url
}

/// As a browser would open it: no box in the host, none in a header.
fn plain(method: &str, url: &str, body: Body) -> Request<Body> {
    Request::builder()
        .method(method)
        .uri(url)
        .header("host", "localhost")
        .header("content-type", "application/octet-stream")
        .body(body)
        .unwrap()
}

#[tokio::test]
async fn a_signed_url_needs_no_box_and_no_token() {
    let world = World::new().await;
    let path = world.files.path().join("a file+ü.txt");
    let path = path.to_str().unwrap();
    let url = signed(path, Operation::Write, None);
    let (head, _) = world.ask(plain("POST", &url, full("content"))).await;
    assert_eq!(head.status, 200);
    assert_eq!(std::fs::read_to_string(path).unwrap(), "content");

    let url = signed(path, Operation::Read, Some(i64::from(u32::MAX)));
    let (head, body) = world.ask(plain("GET", &url, empty())).await;
    assert_eq!(head.status, 200);
    assert_eq!(body, "content");
    let (head, _) = world.ask(plain("POST", &url, full("other"))).await;
    assert_eq!(head.status, 401);

    let url = signed(path, Operation::Read, Some(1));
    let (head, body) = world.ask(plain("GET", &url, empty())).await;
    assert_eq!(head.status, 401);
    assert_eq!(
        body,
        r#"{"code":401,"message":"signature is already expired"}"#
    );
    let (head, body) = world
        .ask(plain(
            "GET",
            "/files?path=/etc/passwd&signature=v1_no",
            empty(),
        ))
        .await;
    assert_eq!(head.status, 401);
    assert_eq!(body, r#"{"code":401,"message":"invalid signature"}"#);
    assert_eq!(std::fs::read_to_string(path).unwrap(), "content");
}

#[tokio::test]
async fn a_signed_path_binds_however_its_key_is_spelled() {
    let world = World::new().await;
    let inside = |name: &str| world.files.path().join(name);
    let (granted, other) = (inside("granted"), inside("other"));
    let url = signed(granted.to_str().unwrap(), Operation::Write, None);
    // An upload without a path goes where the part's file name says.
    let form = format!(
        "--b\r\ncontent-disposition: form-data; name=file; filename=\"{}\"\r\n\r\nx\r\n--b--",
        other.to_str().unwrap()
    );
    let mut request = plain("POST", &url.replace("?path=", "?%70ath="), full(form));
    let form_type = "multipart/form-data; boundary=b".parse().unwrap();
    request.headers_mut().insert("content-type", form_type);
    let (head, _) = world.ask(request).await;
    assert_eq!(head.status, 200);
    assert!(granted.exists());
    assert!(!other.exists());
}

#[tokio::test]
async fn a_signed_url_does_not_choose_its_user() {
    let world = World::new().await;
    let path = world.files.path().join("mine");
    let path = path.to_str().unwrap();
    let coded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let signature = sign(path, Operation::Write, None, &Secret::new(TOKEN), None);
    let url = format!(
        "/files?path={}&signature={}",
        coded(path),
        coded(&signature)
    );
    // Nobody of this name is in the box: were it passed on, the agent would refuse.
    let mut request = plain("POST", &url, full("x"));
    let credentials = "Basic bm8tc3VjaC11c2VyOg==".parse().unwrap();
    request.headers_mut().insert("authorization", credentials);
    let (head, body) = world.ask(request).await;
    // The default user of the machine that runs the tests may not write here, which is fine.
    assert!(matches!(head.status.as_u16(), 200 | 403), "{body:?}");
}

/// Goes on as long as the agent (these tests) lives, so that nothing is left behind.
const LINGER: &str = "echo hi; while kill -0 $PPID 2>/dev/null; do sleep 0.2; done";

#[tokio::test]
async fn a_box_that_ends_breaks_its_streams_off() {
    let world = World::new().await;
    let mut client = world.client().await;
    let response = client.request(start(&world, LINGER)).await;
    let mut body = response.unwrap().into_body();
    // The stream is under way before the box ends.
    body.frame().await.unwrap().unwrap();
    world.boxed.end();
    let last = loop {
        match body.frame().await {
            Some(Ok(_)) => {}
            last => break last,
        }
    };
    assert!(matches!(last, Some(Err(_))), "a clean end: {last:?}");

    let (head, body) = world
        .ask(world.envd("GET", "/health").body(empty()).unwrap())
        .await;
    assert_eq!(head.status, 502);
    let id = world.boxed.id();
    assert_eq!(
        body,
        format!(r#"{{"sandboxId":"{id}","message":"The sandbox was not found","code":502}}"#)
    );
}

#[tokio::test]
async fn names_that_belong_to_no_box_are_told_apart_from_bad_ones() {
    let world = World::new().await;
    for (id, status) in [
        ("iaaaaaaaaaaaaaaaaaaaa", 502),
        ("nosuchbox", 502),
        ("No.Such", 400),
    ] {
        let mut request = world.envd("GET", "/health").body(empty()).unwrap();
        request
            .headers_mut()
            .insert("e2b-sandbox-id", id.parse().unwrap());
        let (head, body) = world.ask(request).await;
        assert_eq!(head.status, status, "{id}");
        if status == 400 {
            assert_eq!(body, "Invalid sandbox ID");
        }
    }
}

#[tokio::test]
async fn a_connection_that_went_stale_is_replaced() {
    let world = World::new().await;
    let (ours, mut theirs) = duplex(1 << 16);
    world.boxed.prepare(ours).await;
    // An agent that answers once, takes a second question and dies over it.
    let dying = tokio::spawn(async move {
        for answer in [&b"HTTP/1.1 204 No Content\r\n\r\n"[..], b""] {
            let mut seen = Vec::new();
            while !seen.ends_with(b"\r\n\r\n") {
                theirs.read_buf(&mut seen).await.unwrap();
            }
            theirs.write_all(answer).await.unwrap();
        }
    });
    for _ in 0..2 {
        let (head, _) = world
            .ask(world.envd("GET", "/health").body(empty()).unwrap())
            .await;
        assert_eq!(head.status, 204);
    }
    dying.await.unwrap();
    assert_eq!(world.boxed.connects(), 1);
}
