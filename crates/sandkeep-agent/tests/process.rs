//! Starting processes: what they are given and how their end is told.
#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

mod common;

use common::{Agent, Next, basic, shell};
use sandkeep_agent_api::Code;
use sandkeep_agent_api::process::ProcessEvent;
use serde_json::json;
use std::os::unix::fs::PermissionsExt as _;

#[tokio::test]
async fn output_and_a_clean_end_are_streamed() {
    let agent = Agent::start();
    let outcome = agent.run("echo out; echo err >&2").await;
    assert_eq!(outcome.stdout(), "out\n");
    assert_eq!(outcome.stderr, b"err\n");
    assert_eq!((outcome.end.exit_code, outcome.end.exited), (0, true));
    assert_eq!(outcome.end.status, "exit status 0");
    assert_eq!(outcome.end.error, None);
}

#[tokio::test]
async fn failures_and_signals_are_told_apart() {
    let agent = Agent::start();
    let end = agent.run("exit 3").await.end;
    assert_eq!((end.exit_code, end.exited), (3, true));
    assert_eq!(end.error.as_deref(), Some("exit status 3"));
    let end = agent.run("kill -9 $$").await.end;
    assert_eq!((end.exit_code, end.exited), (-1, false));
    assert_eq!(end.error.as_deref(), Some("signal: killed"));
}

#[tokio::test]
async fn what_cannot_be_started_is_refused_in_words() {
    let agent = Agent::start();
    let error = agent
        .refused(&[], json!({"process": {"cmd": "/no/such/program"}}))
        .await;
    assert_eq!(error.code, Code::InvalidArgument);
    let error = agent.refused(&[], json!({})).await;
    assert_eq!(error.code, Code::InvalidArgument);
    let error = agent
        .refused(&[], json!({"process": {"cmd": "true", "cwd": "/no/dir"}}))
        .await;
    assert_eq!(error.code, Code::InvalidArgument);
    assert_eq!(error.message, "cwd '/no/dir' does not exist");
    let nul = json!({"process": {"cmd": "true", "args": ["a\u{0}b"]}});
    assert_eq!(agent.refused(&[], nul).await.code, Code::InvalidArgument);
    let error = agent
        .refused(&[("authorization", &basic("nobody-here"))], shell("true"))
        .await;
    assert_eq!(error.code, Code::Unauthenticated);
    assert_eq!(error.message, "invalid username: 'nobody-here'");
    // The agent is well after all that.
    assert_eq!(agent.run("echo fine").await.stdout(), "fine\n");
}

#[tokio::test]
async fn a_process_runs_as_its_user_with_its_groups() {
    let agent = Agent::start();
    let user = [("authorization", basic("nobody"))];
    let user = [(user[0].0, user[0].1.as_str())];
    let script = "id -un; id -u; id -G; echo $USER $LOGNAME; umask; echo seen > /dev/stderr";
    let outcome = agent.run_with(&user, shell(script)).await;
    let expected = std::process::Command::new("id")
        .args(["-G", "nobody"])
        .output()
        .unwrap();
    let groups = String::from_utf8(expected.stdout).unwrap();
    assert_eq!(
        outcome.stdout(),
        format!("nobody\n65534\n{groups}nobody nobody\n0022\n")
    );
    assert_eq!(outcome.stderr, b"seen\n", "a user owns its own output");
    // What the user may not enter it cannot start in.
    let closed = tempfile::tempdir().unwrap();
    std::fs::set_permissions(closed.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let denied = json!({"process": {"cmd": "true", "cwd": closed.path()}});
    assert_eq!(
        agent.refused(&user, denied).await.code,
        Code::InvalidArgument
    );
}

#[tokio::test]
async fn the_environment_is_made_of_user_box_and_request() {
    let agent = Agent::start();
    let init = json!({"sandboxId": "ibox", "templateId": "base", "defaultUser": "root",
        "envVars": {"A": "box", "B": "box"}});
    let (status, _) = agent
        .http("POST", "/sandkeep.host/init", init.to_string())
        .await;
    assert_eq!(status, 204);
    let script = "echo $A $B $HOME $E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID; pwd";
    let request =
        json!({"process": {"cmd": "bash", "args": ["-c", script], "envs": {"B": "mine"}}});
    let outcome = agent.run_with(&[], request).await;
    assert_eq!(outcome.stdout(), "box mine /root true ibox base\n/root\n");
    let environment = agent.run("env").await;
    let environment = environment.stdout();
    assert!(
        environment.contains("B=box\n"),
        "the request's own variables do not stay"
    );
    assert!(!environment.contains("SECRET") && !environment.contains("LISTEN_FD"));
    assert!(environment.contains("PATH="));
}

#[tokio::test]
async fn a_process_inherits_nothing_else() {
    let agent = Agent::start();
    let outcome = agent
        .run("ls /proc/$$/fd; ps -o pid= -o sid= -o pgid= -p $$")
        .await;
    let text = outcome.stdout().to_owned();
    let (descriptors, ids) = text.trim().rsplit_once('\n').unwrap();
    assert_eq!(descriptors, "0\n1\n2");
    let ids: Vec<_> = ids.split_whitespace().collect();
    assert_eq!(ids[1], ids[2], "in the group that its session began with");
    assert_ne!(ids[0], ids[1], "leads neither, or setsid(1) would fork");
    let signals = agent.run("grep -E 'Sig(Blk|Ign)' /proc/self/status").await;
    assert_eq!(
        signals.stdout(),
        "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n"
    );
    let score = |text: &str| text.trim().parse::<i32>().unwrap();
    let child = score(agent.run("cat /proc/self/oom_score_adj").await.stdout());
    let path = format!("/proc/{}/oom_score_adj", agent.child.id());
    assert!(
        child > score(&std::fs::read_to_string(path).unwrap()),
        "children go first"
    );
}

/// `setsid` of a leader forks and ends with 0 at once, whatever its command does.
#[tokio::test]
async fn setsid_runs_in_place_and_its_exit_code_and_output_are_those_of_its_command() {
    let agent = Agent::start();
    let request = json!({"process": {"cmd": "setsid", "args": ["sh", "-c", "echo a; sleep 0.2; echo b; exit 3"]}});
    let outcome = agent.run_with(&[], request).await;
    assert_eq!((outcome.stdout(), outcome.end.exit_code), ("a\nb\n", 3));
    let outcome = agent.run("setsid sh -c 'exit 4'").await;
    assert_eq!(outcome.end.exit_code, 4);
}

#[tokio::test]
async fn large_output_arrives_whole_in_bounded_chunks() {
    let agent = Agent::start();
    let outcome = agent.run("head -c 20000000 /dev/zero").await;
    assert_eq!(outcome.bytes.len(), 20_000_000);
    assert!(outcome.largest <= 32 << 10);
}

#[tokio::test]
async fn a_child_that_keeps_the_output_open_does_not_delay_the_end() {
    let agent = Agent::start();
    let done = agent.directory.path().join("done");
    let go = agent.directory.path().join("go");
    let script = format!(
        "(until [ -e {} ]; do sleep 0.02; done; echo late; echo late; touch {}; sleep 60) & echo first",
        go.display(),
        done.display()
    );
    let outcome = agent.run(&script).await;
    assert_eq!(outcome.stdout(), "first\n");
    std::fs::write(&go, "").unwrap();
    // The child writes later and must not die of it.
    while !done.exists() {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_time_limit_ends_stream_and_process() {
    let agent = Agent::start();
    let message = shell("echo ready; sleep 60");
    let (pid, mut stream) = agent
        .start_process(&[("connect-timeout-ms", "300")], message)
        .await;
    let error = loop {
        match stream.next().await {
            Next::Event(ProcessEvent::Data(_)) => {}
            Next::Event(other) => panic!("unexpected {other:?}"),
            Next::End(error) => break error.unwrap(),
        }
    };
    assert_eq!(error.code, Code::DeadlineExceeded);
    let mut replay = agent
        .stream("Connect", &[], json!({"process": {"pid": pid}}))
        .await;
    assert_eq!(replay.started().await, pid);
    assert_eq!(replay.outcome().await.end.status, "signal: killed");
}

#[tokio::test]
async fn a_silent_process_shows_that_it_lives() {
    let agent = Agent::start();
    let (_, mut stream) = agent
        .start_process(&[("keepalive-ping-interval", "1")], shell("sleep 60"))
        .await;
    assert!(matches!(stream.event().await, ProcessEvent::Keepalive(_)));
}

#[tokio::test]
async fn only_connect_json_is_taken_for_streams() {
    let agent = Agent::start();
    let (status, _) = agent.http("POST", "/process.Process/Start", "{}").await;
    assert_eq!(status, 415);
    let (status, error) = agent.call("Nonsense", json!({})).await;
    assert_eq!(
        (status, error["code"].as_str()),
        (501, Some("unimplemented"))
    );
    assert_eq!(agent.http("GET", "/process.Process/List", "").await.0, 405);
}
