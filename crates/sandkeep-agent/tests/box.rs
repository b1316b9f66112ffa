//! The agent as the host sees it: health, settings, ports, tunnels, limits, PID 1.
#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

mod common;

use std::process::Command;

use bytes::Bytes;
use common::{AGENT, Agent, shell};
use http::Request;
use http_body_util::Full;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

fn request(method: &str, path: &str) -> Request<Full<Bytes>> {
    Request::builder()
        .method(method)
        .uri(path)
        .header("host", "box")
        .body(Full::default())
        .unwrap()
}

#[tokio::test]
async fn it_is_healthy_and_open_to_browsers() {
    let agent = Agent::start();
    for (method, path, status) in [
        ("GET", "/health", 204),
        ("OPTIONS", "/process.Process/Start", 204),
        ("OPTIONS", "/files", 204),
        ("GET", "/nowhere", 404),
        ("POST", "/process.Process/Nonsense", 501),
    ] {
        let response = agent.send(request(method, path)).await;
        assert_eq!(response.status(), status, "{path}");
        assert_eq!(
            response.headers()["access-control-allow-origin"],
            "*",
            "{path}"
        );
    }
}

#[tokio::test]
async fn a_connection_serves_many_requests() {
    let agent = Agent::start();
    let mut connection = agent.connect().await;
    for _ in 0..100 {
        let response = connection
            .send_request(request("GET", "/health"))
            .await
            .unwrap();
        assert_eq!(response.status(), 204);
    }
}

#[tokio::test]
async fn settings_are_shown_and_replaced() {
    let agent = Agent::start();
    assert_eq!(agent.get_json("/envs").await, json!({}));
    for value in ["1", "2"] {
        let init = json!({"sandboxId": "i1", "templateId": "t", "envVars": {"K": value}});
        assert_eq!(
            agent
                .http("POST", "/sandkeep.host/init", init.to_string())
                .await
                .0,
            204
        );
        let expected = json!({"K": value, "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": "i1",
            "E2B_TEMPLATE_ID": "t"});
        assert_eq!(agent.get_json("/envs").await, expected);
    }
    let bad = json!({"sandboxId": "i1", "templateId": "t", "hostname": "a b"});
    assert_eq!(
        agent
            .http("POST", "/sandkeep.host/init", bad.to_string())
            .await
            .0,
        400
    );
    assert_eq!(agent.http("POST", "/sandkeep.host/init", "{").await.0, 400);
}

#[tokio::test]
async fn warming_up_leaves_no_trace() {
    let agent = Agent::start();
    assert_eq!(agent.http("POST", "/sandkeep.host/warm", "").await.0, 204);
    assert_eq!(
        agent.get_json("/sandkeep.host/logs").await,
        json!({"entries": []})
    );
}

#[tokio::test]
async fn the_log_tells_starts_and_ends() {
    let agent = Agent::start();
    agent.run("exit 4").await;
    let entries = agent.get_json("/sandkeep.host/logs?after=0").await["entries"].clone();
    let message = |index: usize| entries[index]["message"].as_str().unwrap().to_owned();
    assert!(
        message(0).ends_with("started by root: /bin/bash -c exit 4"),
        "{}",
        message(0)
    );
    assert!(
        message(1).ends_with("ended: exit status 4"),
        "{}",
        message(1)
    );
    let rest = agent.get_json("/sandkeep.host/logs?after=1").await;
    assert_eq!(rest["entries"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn metrics_are_plausible() {
    let agent = Agent::start();
    let metrics = agent.get_json("/metrics").await;
    let number = |name: &str| {
        metrics[name]
            .as_f64()
            .unwrap_or_else(|| panic!("no {name}"))
    };
    assert!(number("cpu_count") >= 1.0);
    assert!((0.0..=100.0).contains(&number("cpu_used_pct")));
    assert!(number("mem_total") >= number("mem_used"));
    assert!(number("mem_total_mib") > 0.0 && number("mem_used_mib") >= 0.0);
    assert!(number("disk_total") >= number("disk_used") && number("disk_total") > 0.0);
    assert!(number("ts") > 1.7e9 && number("mem_cache") >= 0.0);
}

#[tokio::test]
async fn listening_ports_are_named() {
    let agent = Agent::start();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let expected = json!({"port": listener.local_addr().unwrap().port(), "address": "127.0.0.1"});
    let ports = agent.get_json("/sandkeep.host/ports").await["ports"].clone();
    assert!(ports.as_array().unwrap().contains(&expected), "{ports}");
}

#[tokio::test]
async fn a_tunnel_carries_bytes_and_each_sides_end() {
    let agent = Agent::start();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let served = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut question = Vec::new();
        // Answers only after the caller's end has arrived.
        stream.read_to_end(&mut question).await.unwrap();
        question.reverse();
        stream.write_all(&question).await.unwrap();
    });
    let mut connection = agent.connect().await;
    let connect = Request::connect(format!("localhost:{port}"))
        .body(Full::default())
        .unwrap();
    let response = connection.send_request(connect).await.unwrap();
    assert_eq!(response.status(), 200);
    let mut tunnel = TokioIo::new(hyper::upgrade::on(response).await.unwrap());
    tunnel.write_all(b"hello").await.unwrap();
    tunnel.shutdown().await.unwrap();
    let mut answer = String::new();
    tunnel.read_to_string(&mut answer).await.unwrap();
    assert_eq!(answer, "olleh");
    served.await.unwrap();
}

#[tokio::test]
async fn a_tunnel_to_nowhere_is_refused_in_words() {
    let agent = Agent::start();
    let port = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    for (target, status, code) in [
        (format!("127.0.0.1:{port}"), 502, "port_closed"),
        ("10.0.0.1:80".to_owned(), 400, "bad_target"),
    ] {
        let connect = Request::connect(target).body(Full::default()).unwrap();
        let response = agent.send(connect).await;
        assert_eq!(response.status(), status);
        let body = http_body_util::BodyExt::collect(response.into_body())
            .await
            .unwrap();
        let body: Value = serde_json::from_slice(&body.to_bytes()).unwrap();
        assert_eq!(body["code"], code);
    }
}

#[tokio::test]
async fn oversized_requests_are_refused() {
    let agent = Agent::start();
    let (status, body) = agent
        .http("POST", "/process.Process/List", vec![b' '; (8 << 20) + 1])
        .await;
    assert_eq!(status, 429);
    assert!(String::from_utf8_lossy(&body).contains("resource_exhausted"));
    let long = "x".repeat(200 << 10);
    let mut head = request("GET", "/health");
    head.headers_mut().insert("x-long", long.parse().unwrap());
    assert_eq!(agent.send(head).await.status(), 431);
    // A frame that only announces to be huge.
    let huge = Request::post("/process.Process/Start")
        .header("host", "box")
        .header("content-type", "application/connect+json")
        .body(Full::new(Bytes::from_static(&[0, 0xff, 0xff, 0xff, 0xff])))
        .unwrap();
    let body = http_body_util::BodyExt::collect(agent.send(huge).await.into_body())
        .await
        .unwrap();
    assert!(String::from_utf8_lossy(&body.to_bytes()).contains("resource_exhausted"));
    assert_eq!(agent.http("GET", "/health", "").await.0, 204);
}

#[tokio::test]
async fn it_listens_where_told_and_takes_its_processes_along() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let child = Command::new(AGENT)
        .arg("--listen")
        .arg(&path)
        .spawn()
        .unwrap();
    while tokio::net::UnixStream::connect(&path).await.is_err() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let mut agent = Agent::adopt(child, directory);
    let (pid, _stream) = agent.start_process(&[], shell("sleep 60")).await;
    let own = rustix::process::Pid::from_child(&agent.child);
    rustix::process::kill_process(own, rustix::process::Signal::TERM).unwrap();
    assert!(agent.child.wait().unwrap().success());
    while std::fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
    {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn without_a_socket_it_says_what_it_needs() {
    for arguments in [&[][..], &["--nonsense"], &["--listen"]] {
        let output = Command::new(AGENT)
            .args(arguments)
            .env_remove("SANDKEEP_LISTEN_FD")
            .output()
            .unwrap();
        assert!(!output.status.success());
        assert!(String::from_utf8_lossy(&output.stderr).contains("usage:"));
    }
}

/// An agent that is PID 1 of namespaces of its own, with an /etc of its own.
fn first_process() -> Agent {
    Agent::start_as(|directory| {
        let etc = directory.path().join("etc");
        std::fs::create_dir(&etc).unwrap();
        for name in ["passwd", "group", "hosts"] {
            std::fs::copy(format!("/etc/{name}"), etc.join(name)).unwrap();
        }
        let mut command = Command::new("unshare");
        command
            .args([
                "--mount",
                "--uts",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
            ])
            .args(["sh", "-c", "mount --bind \"$0\" /etc && exec \"$1\""])
            .arg(&etc)
            .arg(AGENT);
        command
    })
}

#[tokio::test]
async fn as_pid_1_it_reaps_orphans_and_keeps_the_status_of_its_own() {
    let agent = first_process();
    for round in 0..10 {
        let script =
            format!("for i in 1 2 3 4 5; do (true & exec true) & done; wait; exit {round}");
        assert_eq!(agent.run(&script).await.end.exit_code, round);
    }
    // Each orphan's end wakes the agent; once awake none is left.
    loop {
        let states = agent
            .run("cat /proc/[0-9]*/stat | sed 's/.*) //' | cut -c1")
            .await;
        if !states.stdout().contains('Z') {
            break;
        }
    }
    let tree = agent.run("readlink /proc/1/exe; echo $PPID").await;
    assert!(
        tree.stdout().ends_with("/sandkeep-agent\n1\n"),
        "{}",
        tree.stdout()
    );
}

#[tokio::test]
async fn as_pid_1_it_names_the_box() {
    let agent = first_process();
    let identity = async |hostname: &str| {
        let init = json!({"sandboxId": "i", "templateId": "t", "hostname": hostname});
        assert_eq!(
            agent
                .http("POST", "/sandkeep.host/init", init.to_string())
                .await
                .0,
            204
        );
        agent
            .run("hostname; cat /etc/hostname; grep 127.0.1.1 /etc/hosts; cat /etc/machine-id")
            .await
    };
    let first = identity("box-one").await;
    let lines: Vec<_> = first.stdout().lines().collect();
    assert_eq!(lines[..3], ["box-one", "box-one", "127.0.1.1\tbox-one"]);
    assert_eq!(lines[3].len(), 32);
    let second = identity("box-two").await;
    let again: Vec<_> = second.stdout().lines().collect();
    assert_eq!(again[..3], ["box-two", "box-two", "127.0.1.1\tbox-two"]);
    assert_ne!(again[3], lines[3]);
}
