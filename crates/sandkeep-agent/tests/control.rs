//! Reaching running processes: readers, input, signals, the list.
#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

mod common;

use std::time::Duration;

use bytes::Bytes;
use common::{Agent, Next, base64, shell};
use http::Request;
use http_body_util::{BodyExt, Full};
use sandkeep_agent_api::process::ProcessEvent;
use sandkeep_agent_api::{Code, Decoder, Frame, encode_message};
use serde_json::{Value, json};

fn by_pid(pid: u32) -> Value {
    json!({"process": {"pid": pid}})
}

fn stdin(pid: u32, text: &str) -> Value {
    json!({"process": {"pid": pid}, "input": {"stdin": base64(text)}})
}

fn signal(pid: u32, name: &str) -> Value {
    json!({"process": {"pid": pid}, "signal": name})
}

fn is_alive(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

#[tokio::test]
async fn input_is_written_and_closed() {
    let agent = Agent::start();
    // Without the field stdin is open.
    let (pid, mut stream) = agent
        .start_process(&[], json!({"process": {"cmd": "cat"}}))
        .await;
    assert_eq!(
        agent.call("SendInput", stdin(pid, "one\n")).await,
        (200, json!({}))
    );
    stream.output_until("one\n").await;
    let pty = json!({"process": {"pid": pid}, "input": {"pty": base64("x")}});
    assert_eq!(agent.call("SendInput", pty).await.1["code"], "internal");
    assert_eq!(
        agent.call("SendInput", by_pid(pid)).await.1["code"],
        "invalid_argument"
    );
    assert_eq!(agent.call("CloseStdin", by_pid(pid)).await.0, 200);
    assert_eq!(stream.outcome().await.end.exit_code, 0);
    assert_eq!(agent.call("SendInput", stdin(pid, "late")).await.0, 404);
}

#[tokio::test]
async fn closing_twice_is_fine_and_writing_after_it_is_not() {
    let agent = Agent::start();
    let request =
        json!({"process": {"cmd": "bash", "args": ["-c", "cat; sleep 60"]}, "stdin": true});
    let (pid, _stream) = agent.start_process(&[], request).await;
    for _ in 0..2 {
        assert_eq!(agent.call("CloseStdin", by_pid(pid)).await.0, 200);
    }
    let (status, error) = agent.call("SendInput", stdin(pid, "x")).await;
    assert_eq!((status, error["code"].as_str()), (500, Some("internal")));
}

#[tokio::test]
async fn disabled_stdin_is_empty_and_takes_nothing() {
    let agent = Agent::start();
    assert_eq!(agent.run("cat; echo end").await.stdout(), "end\n");
    let (pid, _stream) = agent.shell("sleep 60").await;
    assert_eq!(
        agent.call("SendInput", stdin(pid, "x")).await.1["code"],
        "internal"
    );
}

#[tokio::test]
async fn input_nobody_reads_is_given_up_when_the_process_ends() {
    let agent = Agent::start();
    let request = json!({"process": {"cmd": "sleep", "args": ["60"]}});
    let (pid, _stream) = agent.start_process(&[], request).await;
    let large = "x".repeat(1 << 20);
    let (written, killed) = tokio::join!(agent.call("SendInput", stdin(pid, &large)), async {
        // The pipe is full when the kernel says so; until then the write is still going on.
        agent
            .call("SendSignal", signal(pid, "SIGNAL_SIGKILL"))
            .await
    });
    assert_eq!(killed.0, 200);
    assert!(written.0 == 500 || written.0 == 404, "{written:?}");
}

#[tokio::test]
async fn input_can_be_streamed() {
    let agent = Agent::start();
    let (pid, mut stream) = agent
        .start_process(&[], json!({"process": {"cmd": "cat"}}))
        .await;
    let messages = [
        json!({"start": {"process": {"pid": pid}}}),
        json!({"data": {"input": {"stdin": base64("a")}}}),
        json!({"keepalive": {}}),
        json!({"data": {"input": {"stdin": base64("b\n")}}}),
    ];
    let body: Vec<u8> = messages
        .iter()
        .flat_map(|message| encode_message(message).unwrap())
        .collect();
    let send = async |body: Vec<u8>| {
        let request = Request::post("/process.Process/StreamInput")
            .header("host", "box")
            .header("content-type", "application/connect+json")
            .body(Full::new(Bytes::from(body)))
            .unwrap();
        let answer = agent
            .send(request)
            .await
            .into_body()
            .collect()
            .await
            .unwrap()
            .to_bytes();
        let mut decoder = Decoder::new(1024);
        decoder.push(&answer);
        let mut frames = Vec::new();
        while let Some(frame) = decoder.next_frame().unwrap() {
            frames.push(frame);
        }
        frames
    };
    let empty = Bytes::from_static(b"{}");
    assert_eq!(
        send(body).await,
        [Frame::Message(empty.clone()), Frame::End(empty)]
    );
    stream.output_until("ab\n").await;
    let nameless = send(encode_message(&messages[1]).unwrap().to_vec()).await;
    let Frame::End(error) = &nameless[0] else {
        panic!("expected an error")
    };
    assert!(String::from_utf8_lossy(error).contains("invalid_argument"));
}

#[tokio::test]
async fn a_killed_process_is_gone_with_its_group_when_told_so() {
    let agent = Agent::start();
    let (pid, mut stream) = agent.shell("sleep 60 & echo $!; wait").await;
    let child: u32 = stream.output_until("\n").await.trim().parse().unwrap();
    assert_eq!(
        agent
            .call("SendSignal", signal(pid, "SIGNAL_SIGKILL"))
            .await,
        (200, json!({}))
    );
    assert!(!is_alive(pid), "reaped before the answer");
    assert_eq!(
        stream.outcome().await.end.error.as_deref(),
        Some("signal: killed")
    );
    while is_alive(child) && !is_zombie(child) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (status, error) = agent
        .call("SendSignal", signal(pid, "SIGNAL_SIGKILL"))
        .await;
    assert_eq!(status, 404);
    assert_eq!(
        error["message"],
        format!("process with pid {pid} not found")
    );
}

/// What leads a session of its own, in place of the command or below it, and what lost its parent.
#[tokio::test]
async fn killing_a_command_ends_what_made_a_session_of_its_own() {
    let agent = Agent::start();
    for (how, script) in [
        (
            "in place",
            "(sleep 60 & echo $!); exec setsid sh -c 'sleep 60 & echo $!; wait'",
        ),
        (
            "below",
            "(sleep 60 & echo $!); setsid sh -c 'sleep 60 & echo $!; wait'; true",
        ),
    ] {
        let (pid, mut stream) = agent.shell(script).await;
        let mut children: Vec<u32> = Vec::new();
        for _ in 0..2 {
            children.push(stream.output_until("\n").await.trim().parse().unwrap());
        }
        assert!(children.iter().all(|&child| is_alive(child)), "{how}");
        let killed = agent.call("SendSignal", signal(pid, "SIGNAL_SIGKILL"));
        assert_eq!(killed.await, (200, json!({})), "{how}");
        let gone = async {
            while children.iter().any(|&child| is_alive(child)) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), gone)
            .await
            .unwrap_or_else(|_| panic!("{how}: {children:?} live on"));
    }
}

/// The test's agent is not PID 1, so orphans go to whoever is.
fn is_zombie(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        stat.rsplit(')')
            .next()
            .is_some_and(|rest| rest.starts_with(" Z"))
    })
}

#[tokio::test]
async fn terminate_reaches_the_process_and_no_signal_is_refused() {
    let agent = Agent::start();
    let (pid, mut stream) = agent
        .shell("trap 'echo bye; exit 7' TERM; echo on; while :; do sleep 0.01; done")
        .await;
    stream.output_until("on\n").await;
    assert_eq!(agent.call("SendSignal", by_pid(pid)).await.0, 501);
    assert_eq!(
        agent
            .call("SendSignal", signal(pid, "SIGNAL_SIGTERM"))
            .await
            .0,
        200
    );
    let outcome = stream.outcome().await;
    assert_eq!((outcome.stdout(), outcome.end.exit_code), ("bye\n", 7));
}

#[tokio::test]
async fn the_host_sends_the_signals_envd_has_no_word_for() {
    let agent = Agent::start();
    let send = |pid: u32, name: &str| {
        agent.http(
            "POST",
            "/sandkeep.host/signal",
            json!({"pid": pid, "signal": name}).to_string(),
        )
    };
    for (name, said) in [("INT", "130"), ("QUIT", "131"), ("HUP", "129")] {
        let (pid, mut stream) = agent
            .shell(&format!(
                "trap 'echo {said}; exit 7' {name}; echo on; while :; do sleep 0.01; done"
            ))
            .await;
        stream.output_until("on\n").await;
        assert_eq!(send(pid, "STOP").await.0, 400);
        assert_eq!(send(pid, name).await.0, 204);
        let outcome = stream.outcome().await;
        assert_eq!(outcome.stdout(), format!("{said}\n"));
        assert_eq!(outcome.end.exit_code, 7);
        assert_eq!(send(pid, name).await.0, 404);
    }
    // The agent itself is no process that it started.
    assert_eq!(send(1, "INT").await.0, 404);
}

#[tokio::test]
async fn readers_come_and_go() {
    let agent = Agent::start();
    let request = json!({"process": {"cmd": "cat"}, "tag": "the-cat"});
    let (pid, mut first) = agent.start_process(&[], request).await;
    agent.call("SendInput", stdin(pid, "early\n")).await;
    first.output_until("early\n").await;
    let by_tag = json!({"process": {"tag": "the-cat"}});
    let mut second = agent.stream("Connect", &[], by_tag).await;
    assert_eq!(second.started().await, pid);
    // The starter going away does not end the process.
    drop(first);
    agent.call("SendInput", stdin(pid, "late\n")).await;
    assert_eq!(
        second.output_until("late\n").await,
        "late\n",
        "only what is new"
    );
    agent.call("CloseStdin", by_pid(pid)).await;
    assert_eq!(second.outcome().await.end.exit_code, 0);
    // The end is remembered for a while, by pid and by tag.
    for selector in [json!({"pid": pid}), json!({"tag": "the-cat"})] {
        let mut replay = agent
            .stream("Connect", &[], json!({"process": selector}))
            .await;
        assert_eq!(replay.started().await, pid);
        assert_eq!(replay.outcome().await.end.status, "exit status 0");
    }
}

#[tokio::test]
async fn connecting_to_nobody_is_not_found() {
    let agent = Agent::start();
    let mut stream = agent.stream("Connect", &[], by_pid(999_999)).await;
    let Next::End(Some(error)) = stream.next().await else {
        panic!("expected an error")
    };
    assert_eq!(error.code, Code::NotFound);
    assert_eq!(error.message, "process with pid 999999 not found");
    let mut stream = agent.stream("Connect", &[], json!({})).await;
    let Next::End(Some(error)) = stream.next().await else {
        panic!("expected an error")
    };
    assert_eq!(error.code, Code::InvalidArgument);
}

#[tokio::test]
async fn a_readers_time_limit_leaves_the_process_alone() {
    let agent = Agent::start();
    let (pid, _stream) = agent.shell("sleep 60").await;
    let mut reader = agent
        .stream("Connect", &[("connect-timeout-ms", "50")], by_pid(pid))
        .await;
    reader.started().await;
    let Next::End(Some(error)) = reader.next().await else {
        panic!("expected an error")
    };
    assert_eq!(error.code, Code::DeadlineExceeded);
    assert!(is_alive(pid));
}

#[tokio::test]
async fn the_list_shows_what_runs_in_order() {
    let agent = Agent::start();
    assert_eq!(
        agent.call("List", json!({})).await,
        (200, json!({"processes": []}))
    );
    let config = json!({"cmd": "sleep", "args": ["60"], "envs": {"A": "1"}, "cwd": "/tmp"});
    let (one, _one) = agent
        .start_process(&[], json!({"process": config, "tag": "t"}))
        .await;
    let (two, _two) = agent.shell("sleep 60").await;
    agent.run("true").await;
    let (_, list) = agent.call("List", json!({})).await;
    assert_eq!(
        list["processes"][0],
        json!({"config": config, "pid": one, "tag": "t"})
    );
    assert_eq!(list["processes"][1]["pid"], two);
    assert_eq!(list["processes"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_reader_that_does_not_read_holds_the_process_not_memory() {
    let agent = Agent::start();
    let (pid, mut stream) = agent.shell("exec yes").await;
    let written = || {
        let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
        io.lines()
            .find_map(|line| line.strip_prefix("wchar: "))
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    // It is held back once it writes no more.
    let mut last = 0;
    while last == 0 || written() != last {
        last = written();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(rss_kib(agent.child.id()) < 24 << 10);
    // And goes on when the reader does.
    while written() == last {
        assert!(matches!(stream.event().await, ProcessEvent::Data(_)));
    }
}

fn rss_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[tokio::test]
async fn without_readers_output_is_thrown_away() {
    let agent = Agent::start();
    let done = agent.directory.path().join("done");
    let script = format!(
        "read; head -c 5000000 /dev/zero; touch {}; sleep 60",
        done.display()
    );
    let request = json!({"process": {"cmd": "bash", "args": ["-c", script]}});
    let (pid, stream) = agent.start_process(&[], request).await;
    drop(stream);
    agent.call("SendInput", stdin(pid, "\n")).await;
    while !done.exists() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_terminal_is_a_terminal() {
    let agent = Agent::start();
    let request = json!({"process": {"cmd": "/bin/bash", "args": ["--norc", "-i"], "envs": {"PS1": "ready> "}},
        "pty": {"size": {"cols": 101, "rows": 33}}});
    let (pid, mut stream) = agent.start_process(&[], request).await;
    let send = async |text: &str| {
        let input = json!({"process": {"pid": pid}, "input": {"pty": base64(text)}});
        assert_eq!(agent.call("SendInput", input).await.0, 200);
    };
    send("stty size; echo $TERM > /dev/tty\n").await;
    stream.output_until("33 101\r\n").await;
    stream.output_until("xterm-256color\r\n").await;
    let resize = json!({"process": {"pid": pid}, "pty": {"size": {"cols": 55, "rows": 11}}});
    assert_eq!(agent.call("Update", resize).await, (200, json!({})));
    send("stty size\n").await;
    stream.output_until("11 55\r\n").await;
    // The terminal controls its session: Ctrl-C ends what runs in front.
    send("bash -c 'echo in-$((1+1)); exec sleep 60'\n").await;
    stream.output_until("in-2\r\n").await;
    send("\u{3}").await;
    stream.output_until("ready> ").await;
    assert_eq!(
        agent.call("SendInput", stdin(pid, "x")).await.1["code"],
        "internal"
    );
    assert_eq!(
        agent.call("CloseStdin", by_pid(pid)).await.1["code"],
        "unknown"
    );
    send("exit 5\n").await;
    assert_eq!(stream.outcome().await.end.exit_code, 5);
}

#[tokio::test]
async fn only_terminals_are_resized() {
    let agent = Agent::start();
    let (pid, _stream) = agent.shell("sleep 60").await;
    let resize = json!({"process": {"pid": pid}, "pty": {"size": {"cols": 5, "rows": 1}}});
    assert_eq!(agent.call("Update", resize).await.1["code"], "internal");
}

#[tokio::test]
async fn many_processes_at_once_all_end_well() {
    let agent = Agent::start();
    let runs = (0..60).map(|number| {
        let agent = &agent;
        async move {
            let outcome = agent
                .run_with(&[], shell(&format!("echo {number}; exit {}", number % 7)))
                .await;
            assert_eq!(outcome.stdout(), format!("{number}\n"));
            assert_eq!(outcome.end.exit_code, number % 7);
        }
    });
    futures_util::future::join_all(runs).await;
}
