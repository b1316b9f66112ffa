//! The unary calls of `filesystem.Filesystem` of the real agent.

mod support_fs;

use http::StatusCode;
use serde_json::{Value, json};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::symlink;
use support_fs::{Agent, Reply};

fn code(reply: &Reply) -> (u16, String) {
    let code = reply.json()["code"].as_str().expect("code").to_owned();
    (reply.status.as_u16(), code)
}

fn at(agent: &Agent, name: &str) -> Value {
    json!({"path": agent.shown(name)})
}

#[tokio::test]
async fn stat_tells_what_there_is() {
    let agent = Agent::start().await;
    std::fs::write(agent.path("f"), "12345").expect("write");
    let entry = agent.rpc("Stat", at(&agent, "f")).await.json()["entry"].clone();
    assert_eq!(entry["name"], "f");
    assert_eq!(entry["path"], agent.shown("f"));
    assert_eq!(entry["type"], "FILE_TYPE_FILE");
    assert_eq!(entry["size"], "5");
    assert_eq!(entry["mode"], 0o644);
    assert_eq!(entry["permissions"], "-rw-r--r--");
    assert_eq!(
        (&entry["owner"], &entry["group"]),
        (&json!("root"), &json!("root"))
    );
    assert!(entry["modifiedTime"].as_str().expect("time").ends_with('Z'));
    assert_eq!(entry.get("symlinkTarget"), None);

    symlink("f", agent.path("link")).expect("link");
    let entry = agent.rpc("Stat", at(&agent, "link")).await.json()["entry"].clone();
    assert_eq!(entry["type"], "FILE_TYPE_FILE");
    let target = agent.path("f").canonicalize().expect("target");
    assert_eq!(entry["symlinkTarget"], target.to_str().expect("text"));

    let missing = agent.rpc("Stat", at(&agent, "missing")).await;
    assert_eq!(code(&missing), (404, "not_found".into()));
    let home = agent.rpc("Stat", json!({"path": "~other"})).await;
    assert_eq!(code(&home), (400, "invalid_argument".into()));
}

#[tokio::test]
async fn make_dir_once() {
    let agent = Agent::start().await;
    let made = agent.rpc("MakeDir", at(&agent, "a/b/c")).await;
    assert_eq!(made.json()["entry"]["permissions"], "drwxr-xr-x");
    assert_eq!(made.json()["entry"]["type"], "FILE_TYPE_DIRECTORY");
    let again = agent.rpc("MakeDir", at(&agent, "a/b/c")).await;
    assert_eq!(code(&again), (409, "already_exists".into()));
    std::fs::write(agent.path("f"), "").expect("write");
    let file = agent.rpc("MakeDir", at(&agent, "f")).await;
    assert_eq!(code(&file), (400, "invalid_argument".into()));
    let below = agent.rpc("MakeDir", at(&agent, "f/below")).await;
    assert_eq!(code(&below), (400, "invalid_argument".into()));
}

#[tokio::test]
async fn moving() {
    let agent = Agent::start().await;
    std::fs::write(agent.path("f"), "x").expect("write");
    let rename = async |from: &str, to: &str| {
        let message = json!({"source": agent.shown(from), "destination": agent.shown(to)});
        agent.rpc("Move", message).await
    };
    let moved = rename("f", "new/place").await;
    assert_eq!(moved.json()["entry"]["path"], agent.shown("new/place"));
    assert!(!agent.path("f").exists());
    let missing = rename("f", "other/place").await;
    assert_eq!(code(&missing), (404, "not_found".into()));
    assert!(
        !agent.path("other").exists(),
        "a failed move leaves nothing"
    );
    std::fs::create_dir_all(agent.path("full/inner")).expect("dirs");
    std::fs::create_dir(agent.path("dir")).expect("dir");
    assert_eq!(rename("dir", "full").await.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn listing() {
    let agent = Agent::start().await;
    std::fs::create_dir_all(agent.path("d/sub")).expect("dirs");
    std::fs::write(agent.path("d/a"), "").expect("write");
    std::fs::write(agent.path("d/sub/b"), "").expect("write");
    let odd = std::ffi::OsString::from_vec(b"z\xff".to_vec());
    std::fs::write(agent.path("d").join(odd), "").expect("write");
    symlink(agent.path("d"), agent.path("link")).expect("link");
    let list = async |name: &str, depth: Value| {
        let reply = agent
            .rpc(
                "ListDir",
                json!({"path": agent.shown(name), "depth": depth}),
            )
            .await;
        let json = reply.json();
        let entries = json["entries"].as_array().cloned().expect("entries");
        let paths = entries
            .iter()
            .map(|entry| entry["path"].as_str().expect("path").to_owned());
        paths.collect::<Vec<_>>()
    };
    let under = |root: &str, names: &[&str]| -> Vec<String> {
        names
            .iter()
            .map(|name| agent.shown(&format!("{root}/{name}")))
            .collect()
    };
    assert_eq!(
        list("d", json!(null)).await,
        under("d", &["a", "sub", "z\u{fffd}"])
    );
    assert_eq!(
        list("d", json!(2)).await,
        under("d", &["a", "sub", "sub/b", "z\u{fffd}"])
    );
    // Listed by the name that was asked for.
    assert_eq!(
        list("link", json!(1)).await,
        under("link", &["a", "sub", "z\u{fffd}"])
    );
    let missing = agent.rpc("ListDir", at(&agent, "missing")).await;
    assert_eq!(code(&missing), (404, "not_found".into()));
    let file = agent.rpc("ListDir", at(&agent, "d/a")).await;
    assert_eq!(code(&file), (400, "invalid_argument".into()));
}

#[tokio::test]
async fn removing() {
    let agent = Agent::start().await;
    std::fs::create_dir_all(agent.path("d/sub")).expect("dirs");
    std::fs::write(agent.path("d/sub/f"), "").expect("write");
    for _ in 0..2 {
        let removed = agent.rpc("Remove", at(&agent, "d")).await;
        assert_eq!(
            (removed.status, removed.json()),
            (StatusCode::OK, json!({}))
        );
        assert!(!agent.path("d").exists());
    }
    let root = agent.rpc("Remove", json!({"path": "/"})).await;
    assert_eq!(code(&root), (400, "invalid_argument".into()));
}

#[tokio::test]
async fn unknown_methods_and_users() {
    let agent = Agent::start().await;
    let unknown = agent.rpc("Frobnicate", json!({})).await;
    assert_eq!(code(&unknown), (501, "unimplemented".into()));
    let headers = [
        ("content-type", "application/json"),
        ("authorization", "Basic bm9ib2R5aGVyZTo="),
    ];
    let reply = agent
        .request(
            http::Method::POST,
            "/filesystem.Filesystem/Stat",
            &headers,
            "{}",
        )
        .await;
    assert_eq!(code(&reply), (401, "unauthenticated".into()));
    assert_eq!(reply.json()["message"], "invalid username: 'nobodyhere'");
}
