//! Watches of the real agent, streamed and polled.

mod support_fs;

use serde_json::{Value, json};
use support_fs::{Agent, event_text};

async fn create(agent: &Agent, message: Value) -> Value {
    let reply = agent.rpc("CreateWatcher", message).await;
    assert_eq!(reply.status, 200, "{:?}", reply.body);
    reply.json()
}

async fn events(agent: &Agent, watcher: &Value) -> Vec<Value> {
    let reply = agent.rpc("GetWatcherEvents", watcher.clone()).await;
    reply.json()["events"].as_array().cloned().expect("events")
}

async fn texts(agent: &Agent, watcher: &Value) -> Vec<String> {
    events(agent, watcher)
        .await
        .iter()
        .map(event_text)
        .collect()
}

#[tokio::test]
async fn an_upload_is_three_events_at_once() {
    let agent = Agent::start().await;
    let watcher = create(&agent, json!({"path": agent.shown("")})).await;
    for round in 0..20 {
        let name = format!("f{round}");
        agent.put(&name, &[], "small").await;
        let want = ["CREATE", "CHMOD", "WRITE"].map(|kind| format!("{kind} {name}"));
        assert_eq!(texts(&agent, &watcher).await, want);
    }
    assert!(texts(&agent, &watcher).await.is_empty());
    agent.rpc("RemoveWatcher", watcher.clone()).await;
    let gone = agent.rpc("GetWatcherEvents", watcher).await;
    assert_eq!(gone.json()["code"], "not_found");
}

#[tokio::test]
async fn a_form_is_three_events_too() {
    let agent = Agent::start().await;
    let mut stream = agent.watch(json!({"path": agent.shown("")}), &[]).await;
    assert_eq!(stream.next().await, Ok(json!({"start": {}})));
    let body = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\nhello\r\n--b--\r\n";
    let kind = [("content-type", "multipart/form-data; boundary=b")];
    agent
        .request(http::Method::POST, &agent.url("f"), &kind, body)
        .await;
    agent.rpc("Remove", json!({"path": agent.shown("f")})).await;
    for want in ["CREATE f", "CHMOD f", "WRITE f", "REMOVE f"] {
        assert_eq!(stream.event().await, want);
    }
}

#[tokio::test]
async fn new_directories_are_watched_in_time() {
    let agent = Agent::start().await;
    let watcher = create(&agent, json!({"path": agent.shown(""), "recursive": true})).await;
    for round in 0..20 {
        let dir = format!("d{round}");
        agent
            .rpc("MakeDir", json!({"path": agent.shown(&dir)}))
            .await;
        agent.put(&format!("{dir}/f"), &[], "x").await;
        // By calls and by the box's own programs alike.
        std::fs::create_dir_all(agent.path(&format!("{dir}/x/y"))).expect("dirs");
        std::fs::write(agent.path(&format!("{dir}/x/y/z")), "x").expect("write");
        let got = texts(&agent, &watcher).await;
        for want in [
            "CREATE DIR",
            "CREATE DIR/f",
            "WRITE DIR/f",
            "CREATE DIR/x/y",
            "CREATE DIR/x/y/z",
            "WRITE DIR/x/y/z",
        ] {
            let want = want.replace("DIR", &dir);
            let times = got.iter().filter(|text| **text == want).count();
            assert_eq!(times, 1, "{want} in {got:?}");
        }
    }
}

#[tokio::test]
async fn entries_come_with_events_when_asked_for() {
    let agent = Agent::start().await;
    let watcher = create(
        &agent,
        json!({"path": agent.shown(""), "includeEntry": true}),
    )
    .await;
    agent.put("f", &[], "small").await;
    let got = events(&agent, &watcher).await;
    assert_eq!(got.len(), 3);
    for event in got {
        assert_eq!(event["entry"]["path"], agent.shown("f"));
    }
    std::fs::remove_file(agent.path("f")).expect("remove");
    let got = events(&agent, &watcher).await;
    assert_eq!(got, [json!({"name": "f", "type": "EVENT_TYPE_REMOVE"})]);
}

#[tokio::test]
async fn streams_keep_alive_and_end_in_time() {
    let agent = Agent::start().await;
    let headers = [
        ("connect-timeout-ms", "4000"),
        ("keepalive-ping-interval", "1"),
    ];
    let mut stream = agent
        .watch(json!({"path": agent.shown("")}), &headers)
        .await;
    assert_eq!(stream.next().await, Ok(json!({"start": {}})));
    let mut alive = 0;
    let end = loop {
        match stream.next().await {
            Ok(message) => assert_eq!(message, json!({"keepalive": {}})),
            Err(end) => break end,
        }
        alive += 1;
    };
    assert!(alive > 0);
    assert_eq!(end["error"]["code"], "deadline_exceeded");
}

#[tokio::test]
async fn what_cannot_be_watched_is_refused() {
    let agent = Agent::start().await;
    std::fs::write(agent.path("f"), "").expect("write");
    for (name, code) in [("missing", "not_found"), ("f", "invalid_argument")] {
        let message = json!({"path": agent.shown(name)});
        let reply = agent.rpc("CreateWatcher", message.clone()).await;
        assert_eq!(reply.json()["code"], code);
        let end = agent
            .watch(message, &[])
            .await
            .next()
            .await
            .expect_err("the end");
        assert_eq!(end["error"]["code"], code);
    }
    let unknown = agent
        .rpc("GetWatcherEvents", json!({"watcherId": "w0"}))
        .await;
    assert_eq!(unknown.json()["code"], "not_found");
}

#[tokio::test]
async fn readers_that_leave_free_their_watch() {
    let agent = Agent::start().await;
    let inotify = |agent: &Agent| {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", agent.pid())).expect("fds");
        fds.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
            .filter(|target| target.to_string_lossy().contains("inotify"))
            .count()
    };
    let mut stream = agent.watch(json!({"path": agent.shown("")}), &[]).await;
    assert_eq!(stream.next().await, Ok(json!({"start": {}})));
    let watcher = create(&agent, json!({"path": agent.shown("")})).await;
    assert_eq!(inotify(&agent), 2);
    drop(stream);
    agent.rpc("RemoveWatcher", watcher).await;
    agent
        .until("both are closed", |agent| inotify(agent) == 0)
        .await;
}

#[tokio::test]
async fn an_unread_watcher_forgets_the_oldest_first() {
    let agent = Agent::start().await;
    let watcher = create(&agent, json!({"path": agent.shown("")})).await;
    for number in 0..6000 {
        let path = agent.path(&number.to_string());
        std::fs::write(&path, "").expect("write");
        std::fs::remove_file(&path).expect("remove");
    }
    let got = texts(&agent, &watcher).await;
    assert_eq!(got.len(), 10_000);
    assert_eq!(got[9_999], "REMOVE 5999");
}
