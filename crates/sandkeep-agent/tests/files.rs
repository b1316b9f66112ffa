//! `/files` of the real agent.

mod support_fs;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::{GzDecoder, GzEncoder};
use http::{Method, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use serde_json::json;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use support_fs::{Agent, build, files_url, read};

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).expect("gzip");
    encoder.finish().expect("gzip")
}

fn gunzip(bytes: &[u8]) -> Vec<u8> {
    let mut decoder = GzDecoder::new(Vec::new());
    decoder.write_all(bytes).expect("gunzip");
    decoder.finish().expect("gunzip")
}

fn form(parts: &[(&str, Option<&str>, &str)]) -> (String, String) {
    let mut body = String::new();
    for (name, filename, data) in parts {
        let filename = filename.map_or_else(String::new, |name| format!("; filename=\"{name}\""));
        body += &format!(
            "--bound\r\nContent-Disposition: form-data; name=\"{name}\"{filename}\r\n\r\n{data}\r\n"
        );
    }
    (
        "multipart/form-data; boundary=bound".into(),
        body + "--bound--\r\n",
    )
}

#[tokio::test]
async fn what_is_uploaded_can_be_downloaded() {
    let agent = Agent::start().await;
    let reply = agent.put("a/b/c.txt", &[], "hello").await;
    assert_eq!(reply.status, StatusCode::OK);
    let path = agent.shown("a/b/c.txt");
    assert_eq!(
        reply.json(),
        json!([{"path": path, "name": "c.txt", "type": "file"}])
    );

    let url = agent.url("a/b/c.txt");
    let reply = agent
        .get(&url, &[("accept-encoding", "gzip, deflate")])
        .await;
    assert_eq!(
        (reply.status, &reply.body[..]),
        (StatusCode::OK, &b"hello"[..])
    );
    assert_eq!(reply.header("content-length"), "5");
    assert_eq!(
        reply.header("content-disposition"),
        "inline; filename=\"c.txt\""
    );
    assert_eq!(reply.header("vary"), "Accept-Encoding");
    assert_eq!(reply.header("access-control-allow-origin"), "*");

    let head = agent.request(Method::HEAD, &url, &[], "").await;
    assert_eq!((head.status, head.body.len()), (StatusCode::OK, 0));
    assert_eq!(head.header("content-length"), "5");
    let other = agent.request(Method::DELETE, &url, &[], "").await;
    assert!(other.refused(405).contains("GET"));
}

#[tokio::test]
async fn an_upload_truncates_and_keeps_the_mode() {
    let agent = Agent::start().await;
    agent.put("f", &[], "a long first version").await;
    let path = agent.path("f");
    assert_eq!(path.metadata().expect("meta").mode() & 0o777, 0o644);
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("chmod");
    agent.put("f", &[], "short").await;
    assert_eq!(std::fs::read(&path).expect("read"), b"short");
    assert_eq!(path.metadata().expect("meta").mode() & 0o777, 0o755);
    agent.put("f", &[], "").await;
    assert_eq!(std::fs::read(&path).expect("read"), b"");
}

#[tokio::test]
async fn files_and_new_parents_belong_to_the_user_named() {
    let agent = Agent::start().await;
    let passwd = std::fs::read_to_string("/etc/passwd").expect("passwd");
    let daemon = passwd
        .lines()
        .find(|line| line.starts_with("daemon:"))
        .expect("daemon");
    let uid: u32 = daemon
        .split(':')
        .nth(2)
        .expect("uid")
        .parse()
        .expect("number");
    let url = format!("{}&username=daemon", agent.url("theirs/f"));
    let octets = [("content-type", "application/octet-stream")];
    let reply = agent.request(Method::POST, &url, &octets, "x").await;
    assert_eq!(reply.status, StatusCode::OK, "{:?}", reply.body);
    for name in ["theirs", "theirs/f"] {
        assert_eq!(
            agent.path(name).metadata().expect("meta").uid(),
            uid,
            "{name}"
        );
    }
    assert_eq!(agent.path("").metadata().expect("meta").uid(), 0);

    let url = format!("{}&username=nobodyhere", agent.url("f"));
    let refused = agent
        .request(Method::POST, &url, &octets, "x")
        .await
        .refused(401);
    assert!(
        refused.starts_with("error looking up user 'nobodyhere':"),
        "{refused}"
    );
    assert!(
        agent
            .get(&url, &[])
            .await
            .refused(401)
            .contains("nobodyhere")
    );
}

#[tokio::test]
async fn forms_hold_one_file_or_many() {
    let agent = Agent::start().await;
    let (b, c) = (agent.shown("b"), agent.shown("deep/c d"));
    let (kind, body) = form(&[
        ("file", Some(&b), "bb"),
        ("note", None, "skip"),
        ("file", Some(&c), ""),
    ]);
    let headers = [("content-type", kind.as_str())];
    let reply = agent
        .request(Method::POST, "/files", &headers, body.clone())
        .await;
    assert_eq!(
        reply.json(),
        json!([
            {"path": b, "name": "b", "type": "file"},
            {"path": c, "name": "c d", "type": "file"}
        ])
    );
    assert_eq!(std::fs::read(agent.path("b")).expect("b"), b"bb");
    assert_eq!(std::fs::read(agent.path("deep/c d")).expect("c"), b"");

    // The query's path names the single file, with or without a file name.
    for filename in [Some("other"), None] {
        let (_, body) = form(&[("file", filename, "by path")]);
        let reply = agent
            .request(Method::POST, &agent.url("q"), &headers, body)
            .await;
        assert_eq!(reply.json()[0]["path"], agent.shown("q"));
        assert_eq!(std::fs::read(agent.path("q")).expect("q"), b"by path");
    }

    // An empty path in the query names nothing.
    let (_, body) = form(&[("file", Some(&b), "again")]);
    let reply = agent
        .request(Method::POST, "/files?path=", &headers, body)
        .await;
    assert_eq!(reply.json()[0]["path"], b);

    let packed = [
        ("content-type", kind.as_str()),
        ("content-encoding", "gzip"),
    ];
    let (_, body) = form(&[("file", Some(&b), "packed")]);
    let reply = agent
        .request(Method::POST, "/files", &packed, gzip(body.as_bytes()))
        .await;
    assert_eq!(reply.status, StatusCode::OK);
    assert_eq!(std::fs::read(agent.path("b")).expect("b"), b"packed");
}

#[tokio::test]
async fn bad_uploads_are_refused_in_words() {
    let agent = Agent::start().await;
    let f = agent.shown("f");
    let (kind, twice) = form(&[("file", Some(&f), "1"), ("file", Some(&f), "2")]);
    let post = async |url: &str, kind: &str, extra: &[(&str, &str)], body: Bytes| {
        let mut headers = vec![("content-type", kind)];
        headers.extend_from_slice(extra);
        agent.request(Method::POST, url, &headers, body).await
    };
    let refused = post("/files", &kind, &[], twice.into()).await.refused(400);
    assert!(refused.contains("same path"), "{refused}");
    let (_, nameless) = form(&[("file", None, "1")]);
    assert!(
        post("/files", &kind, &[], nameless.into())
            .await
            .refused(400)
            .contains("no path")
    );
    let octets = "application/octet-stream";
    assert!(
        post("/files", octets, &[], "x".into())
            .await
            .refused(400)
            .contains("no path")
    );
    assert!(
        post("/files", &kind, &[], "--bound\r\n".into())
            .await
            .refused(400)
            .contains("multipart")
    );
    assert!(
        post("/files", "multipart/form-data", &[], "".into())
            .await
            .refused(400)
            .contains("boundary")
    );
    assert!(
        post("/files", "text/plain", &[], "x".into())
            .await
            .refused(400)
            .contains("text/plain")
    );
    let url = agent.url("f");
    assert!(
        post(&url, octets, &[("content-encoding", "br")], "x".into())
            .await
            .refused(400)
            .contains("br")
    );
    assert!(
        post(&url, octets, &[("content-encoding", "gzip")], "x".into())
            .await
            .refused(400)
            .contains("gzip")
    );
    assert!(
        post(&url, octets, &[("x-metadata-a", "ż")], "x".into())
            .await
            .refused(400)
            .contains("ASCII")
    );
    assert!(
        post("/files?path=~root/x", octets, &[], "x".into())
            .await
            .refused(400)
            .contains("~root")
    );
    assert!(
        post(&agent.url(""), octets, &[], "x".into())
            .await
            .refused(400)
            .contains("is a directory")
    );
    std::fs::write(agent.path("file"), "").expect("write");
    assert!(
        post(&agent.url("file/below"), octets, &[], "x".into())
            .await
            .refused(400)
            .contains("not a directory")
    );
    let long = agent.url(&"n".repeat(300));
    assert!(
        post(&long, octets, &[], "x".into())
            .await
            .refused(400)
            .contains("too long")
    );
    // A large body is read to its end, so that the client sees the answer.
    let large = Bytes::from(vec![0; 8 << 20]);
    assert!(
        post(&agent.url(""), octets, &[], large)
            .await
            .refused(400)
            .contains("is a directory")
    );
}

#[tokio::test]
async fn a_full_disk_is_507() {
    let agent = Agent::start().await;
    let full = agent.path("full");
    std::fs::create_dir(&full).expect("dir");
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
        .arg(&full)
        .status()
        .expect("mount");
    assert!(mounted.success(), "this test mounts a small tmpfs");
    let reply = agent.put("full/f", &[], vec![1; 4 << 20]).await;
    let unmounted = std::process::Command::new("umount").arg(&full).status();
    assert!(unmounted.expect("umount").success());
    assert!(reply.refused(507).contains("not enough disk space"));
}

#[tokio::test]
async fn metadata_is_kept_and_replaced() {
    let agent = Agent::start().await;
    let reply = agent
        .put(
            "f",
            &[("X-Metadata-Author", "me"), ("x-metadata-b", "2")],
            "x",
        )
        .await;
    assert_eq!(
        reply.json()[0]["metadata"],
        json!({"author": "me", "b": "2"})
    );
    let stat = async || {
        let reply = agent.rpc("Stat", json!({"path": agent.shown("f")})).await;
        reply.json()["entry"]["metadata"].clone()
    };
    assert_eq!(stat().await, json!({"author": "me", "b": "2"}));
    agent.put("f", &[("x-metadata-b", "3")], "x").await;
    assert_eq!(stat().await, json!({"b": "3"}));
    let reply = agent.put("f", &[], "x").await;
    assert_eq!(reply.json()[0].get("metadata"), None);
    assert_eq!(stat().await, json!(null));
}

#[tokio::test]
async fn large_files_go_both_ways() {
    let agent = Agent::start().await;
    let mut bytes = vec![0; 3 << 20];
    for (at, word) in bytes.chunks_exact_mut(4).enumerate() {
        word.copy_from_slice(&u32::try_from(at).expect("small").to_le_bytes());
    }
    let bytes = Bytes::from(bytes);
    assert_eq!(
        agent.put("raw", &[], bytes.clone()).await.status,
        StatusCode::OK
    );
    assert_eq!(
        agent
            .put("gz", &[("content-encoding", "gzip")], gzip(&bytes))
            .await
            .status,
        StatusCode::OK
    );
    let mut body = b"--bound\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\n".to_vec();
    body.extend_from_slice(&bytes);
    body.extend_from_slice(b"\r\n--bound--\r\n");
    let kind = [("content-type", "multipart/form-data; boundary=bound")];
    let reply = agent
        .request(Method::POST, &agent.url("form"), &kind, body)
        .await;
    assert_eq!(reply.status, StatusCode::OK);
    for name in ["raw", "gz", "form"] {
        let reply = agent
            .get(&agent.url(name), &[("accept-encoding", "gzip")])
            .await;
        assert_eq!(reply.headers.get("content-encoding"), None);
        assert!(reply.body == bytes, "{name}");
    }
    let only_gzip = [("accept-encoding", "gzip, identity;q=0")];
    let reply = agent.get(&agent.url("raw"), &only_gzip).await;
    assert_eq!(reply.header("content-encoding"), "gzip");
    assert!(gunzip(&reply.body) == bytes);
}

#[tokio::test]
async fn gzip_where_it_helps() {
    let agent = Agent::start().await;
    let text = "all work and no play\n".repeat(1000);
    agent.put("text", &[], text.clone()).await;
    let url = agent.url("text");
    let packed = agent.get(&url, &[("accept-encoding", "gzip")]).await;
    assert_eq!(packed.header("content-encoding"), "gzip");
    assert!(packed.body.len() < text.len() / 2);
    assert_eq!(gunzip(&packed.body), text.as_bytes());
    // The tag of the packed version is good for asking again.
    let tag = packed.header("etag").to_owned();
    let again = [("accept-encoding", "gzip"), ("if-none-match", tag.as_str())];
    assert_eq!(
        agent.get(&url, &again).await.status,
        StatusCode::NOT_MODIFIED
    );
    for plain in ["identity", "br", "gzip;q=0.5, identity"] {
        let reply = agent.get(&url, &[("accept-encoding", plain)]).await;
        assert_eq!(reply.headers.get("content-encoding"), None);
        assert_eq!(reply.body, text);
    }
    let refused = agent
        .get(&url, &[("accept-encoding", "identity;q=0")])
        .await;
    assert!(refused.refused(406).contains("encoding"));
}

#[tokio::test]
async fn ranges_and_conditions() {
    let agent = Agent::start().await;
    agent.put("f", &[], "0123456789").await;
    let url = agent.url("f");
    let whole = agent.get(&url, &[]).await;
    let tag = whole.header("etag").to_owned();
    assert_eq!(whole.header("accept-ranges"), "bytes");
    let range = async |value: &str, extra: &[(&str, &str)]| {
        let mut headers = vec![("range", value)];
        headers.extend_from_slice(extra);
        agent.get(&url, &headers).await
    };
    let part = range("bytes=2-4", &[("accept-encoding", "gzip")]).await;
    assert_eq!(
        (part.status, &part.body[..]),
        (StatusCode::PARTIAL_CONTENT, &b"234"[..])
    );
    assert_eq!(part.header("content-range"), "bytes 2-4/10");
    assert_eq!(&range("bytes=-3", &[]).await.body[..], b"789");
    assert_eq!(
        &range("bytes=8-", &[("if-range", &tag)]).await.body[..],
        b"89"
    );
    assert_eq!(
        range("bytes=8-", &[("if-range", "\"old\"")]).await.status,
        StatusCode::OK
    );
    let outside = range("bytes=10-", &[]).await;
    assert_eq!(outside.header("content-range"), "bytes */10");
    assert!(outside.refused(416).contains("10 bytes"));

    let not_modified = agent.get(&url, &[("if-none-match", &tag)]).await;
    assert_eq!(
        (not_modified.status, not_modified.body.len()),
        (StatusCode::NOT_MODIFIED, 0)
    );
    let date = whole.header("last-modified");
    let since = agent.get(&url, &[("if-modified-since", date)]).await;
    assert_eq!(since.status, StatusCode::NOT_MODIFIED);
    let failed = agent.get(&url, &[("if-match", "\"other\"")]).await;
    failed.refused(412);

    agent.put("empty", &[], "").await;
    let empty = agent
        .get(&agent.url("empty"), &[("range", "bytes=0-9")])
        .await;
    assert_eq!(
        (empty.status, empty.header("content-length")),
        (StatusCode::OK, "0")
    );
}

#[tokio::test]
async fn special_files_never_block() {
    let agent = Agent::start().await;
    let refused = agent.get(&agent.url("missing"), &[]).await.refused(404);
    assert_eq!(
        refused,
        format!("path '{}' does not exist", agent.shown("missing"))
    );
    assert!(
        agent
            .get(&agent.url(""), &[])
            .await
            .refused(400)
            .contains("is a directory")
    );

    let made = std::process::Command::new("mkfifo")
        .arg(agent.path("pipe"))
        .status();
    assert!(made.expect("mkfifo").success());
    let _socket = std::os::unix::net::UnixListener::bind(agent.path("socket")).expect("socket");
    for (name, words) in [("pipe", "named pipe"), ("socket", "socket")] {
        assert!(
            agent
                .get(&agent.url(name), &[])
                .await
                .refused(400)
                .contains(words)
        );
        assert!(agent.put(name, &[], "x").await.refused(400).contains(words));
    }
    let device = files_url("/dev/zero".as_ref());
    assert!(
        agent
            .get(&device, &[])
            .await
            .refused(400)
            .contains("character device")
    );

    // Files the kernel makes up: no size, or a wrong one, or no reading at all.
    let version = agent
        .get("/files?path=/proc/version", &[("range", "bytes=0-3")])
        .await;
    assert_eq!(version.status, StatusCode::OK);
    assert_eq!(
        version.body,
        std::fs::read("/proc/version").expect("version")
    );
    let online = agent
        .get("/files?path=/sys/devices/system/cpu/online", &[])
        .await;
    assert_eq!(online.status, StatusCode::OK);
    assert!(!online.body.is_empty() && online.body.len() < 4096);
    let memory = agent.get("/files?path=/proc/self/mem", &[]).await;
    assert!(memory.refused(500).contains("cannot read '/proc/self/mem'"));
}

#[tokio::test]
async fn a_client_that_vanishes_leaves_nothing_behind() {
    let agent = Agent::start().await;
    let (sender, receiver) = tokio::sync::mpsc::channel::<Bytes>(1);
    let frames = futures_util::stream::unfold(receiver, |mut receiver| async {
        let bytes = receiver.recv().await?;
        Some((Ok(http_body::Frame::data(bytes)), receiver))
    });
    let body = StreamBody::new(frames).boxed_unsync();
    let octets = [("content-type", "application/octet-stream")];
    let request = build(Method::POST, &agent.url("half"), &octets, body);
    let mut connection = agent.connect().await;
    let response = tokio::spawn(async move { connection.send_request(request).await });
    for _ in 0..16 {
        sender
            .send(Bytes::from(vec![7; 256 << 10]))
            .await
            .expect("send");
    }
    let half = agent.path("half");
    agent
        .until("the upload is open", |agent| {
            agent.open_files().contains(&half)
        })
        .await;
    // Dropping the request's task closes the connection in the middle.
    response.abort();
    drop(sender);
    agent
        .until("the upload is closed", |agent| {
            agent.open_files().is_empty()
        })
        .await;

    // The same for a reader.
    agent.put("big", &[], vec![7; 32 << 20]).await;
    let big = agent.path("big");
    let request = build(Method::GET, &agent.url("big"), &[], empty());
    let response = agent.send(request).await;
    agent
        .until("the download is open", |agent| {
            agent.open_files().contains(&big)
        })
        .await;
    drop(response);
    agent
        .until("the download is closed", |agent| {
            agent.open_files().is_empty()
        })
        .await;
}

fn empty() -> support_fs::ClientBody {
    http_body_util::Empty::new()
        .map_err(|never| match never {})
        .boxed_unsync()
}

#[tokio::test]
async fn a_file_that_shrinks_breaks_the_download_off() {
    let agent = Agent::start().await;
    agent.put("big", &[], vec![7; 32 << 20]).await;
    let response = agent
        .send(build(Method::GET, &agent.url("big"), &[], empty()))
        .await;
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(agent.path("big"))
        .expect("open");
    file.set_len(1000).expect("truncate");
    let result = response.into_body().collect().await;
    assert!(result.is_err(), "a short file must not look whole");
}

#[tokio::test]
async fn several_requests_on_one_connection() {
    let agent = Agent::start().await;
    let mut connection = agent.connect().await;
    let octets = [("content-type", "application/octet-stream")];
    for number in 0..3 {
        let text = Bytes::from(format!("number {number}"));
        let body = http_body_util::Full::new(text.clone());
        let body = body.map_err(|never| match never {}).boxed_unsync();
        connection.ready().await.expect("ready");
        let sent = connection.send_request(build(Method::POST, &agent.url("f"), &octets, body));
        assert_eq!(
            read(sent.await.expect("upload")).await.status,
            StatusCode::OK
        );
        connection.ready().await.expect("ready");
        let got = connection.send_request(build(Method::GET, &agent.url("f"), &[], empty()));
        assert_eq!(read(got.await.expect("download")).await.body, text);
    }
}
