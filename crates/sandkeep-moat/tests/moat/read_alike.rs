//! Requests that a server reads in another way than the policy, towards a host of which only some
//! requests are allowed.

use std::sync::{Arc, Mutex};

use sandkeep_moat::{BoxMoat, policy::Policy};

use crate::{
    narrowed::{new_in, send},
    origin::{request, scene},
    world::{GOOD, OK, World, at, denied, in_world, was_reset},
};

/// Paths that leave `/public/` for some server.
const TRICKS: [&str; 45] = [
    // Found by the differential fuzzing: servers that do not decode see another path.
    "/%70ublic/x",
    "/public/..%3b/private",
    "/public/%c0%ae%c0%ae/private",
    "/public/%u002e%u002e/private",
    "/public/%U002e%U002e/private",
    "/public/../private",
    "/public/./x",
    "/public/%2e%2e/private",
    "/public/.%2e/private",
    "/public/%2E./private",
    "/public/%2e%2e%2fprivate",
    "/public%2f..%2fprivate",
    "/public/..;/private",
    "/public/..;x=1/private",
    "/public/..%3Bx/private",
    "/public/%2e%2e;/private",
    "/public/x;/../private",
    "/public//private",
    "//public/x",
    "/public/..\\private",
    "/public/..%5cprivate",
    "/public/%252e%252e/private",
    "/public/%25%32%65/private",
    "/public/x%00/private",
    "/public/x%0a/private",
    "/public/x%0d%0ay",
    "/public/x%7f",
    "/public/%c0%af..%c0%afprivate",
    "/public/%e0%80%ae%e0%80%ae/private",
    "/public/%f0%80%80%ae%f0%80%80%ae/private",
    "/public/%fe%fe/private",
    "/public/%ff/private",
    "/public/%c3/private",
    "/public/%zz",
    "/public/%",
    "/public/%2",
    "/public/%3f/../private",
    "/public/%23x",
    "/public/%3fx",
    "/public/%ef%bc%8e%ef%bc%8e/private",
    "/public/..%ef%bc%8fprivate",
    "/public/..%20/private",
    "/public/.../private",
    "/public/..%09/private",
    "/public/%e2%80%a5/private",
];

const OVERRIDES: [&str; 18] = [
    "X-HTTP-Method-Override",
    "X-Method-Override",
    "X-HTTP-Method",
    "X_HTTP_Method_Override",
    "x-http_method-override",
    "X-Original-URL",
    "X-Rewrite-URL",
    "X-Original-URI",
    "X-Original-Host",
    "X-Original-Method",
    "X-Forwarded-Host",
    "X-Forwarded-Path",
    "X-Forwarded-Prefix",
    "X-Forwarded-For",
    "X-Host",
    "X-Envoy-Original-Path",
    "Forwarded",
    "X-HTTP-Host-Override",
];

const NARROW: &str = r#"{"allow": [
    {"to": "good.test", "http": [{"methods": ["GET", "POST"], "path": "/public/*"}]}
]}"#;

async fn narrow(world: &World) -> (Arc<Mutex<Vec<String>>>, BoxMoat) {
    world.zone.address("good.test", GOOD);
    let heard = world.server(at(GOOD, 80), OK).await;
    let policy = Policy::from_json(&serde_json::from_str(NARROW).unwrap()).unwrap();
    let moat = world.attach(policy).await;
    (heard, moat)
}

/// One that answers when the whole body of a request is there.
async fn reading_server(world: &World) -> Arc<Mutex<Vec<String>>> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    world.zone.address("good.test", GOOD);
    let listener = tokio::net::TcpListener::bind(at(GOOD, 80)).await.unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let taken = Arc::clone(&heard);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut text = String::new();
            let whole = |text: &str| {
                let (head, body) = text.split_once("\r\n\r\n")?;
                let head = head.to_lowercase();
                let length = head
                    .split("content-length: ")
                    .nth(1)?
                    .split("\r\n")
                    .next()?;
                (body.len() >= length.parse().ok()?).then_some(())
            };
            let mut buffer = [0; 4096];
            while whole(&text).is_none() {
                let count = stream.read(&mut buffer).await.unwrap();
                assert!(count > 0, "{text}");
                text.push_str(&String::from_utf8_lossy(&buffer[..count]));
            }
            taken.lock().unwrap().push(text);
            stream.write_all(OK.as_bytes()).await.unwrap();
        }
    });
    heard
}

#[test]
fn path_rules_by_encodings() {
    in_world(|world| async move {
        let (heard, _moat) = narrow(&world).await;
        let mut passed = Vec::new();
        for path in TRICKS {
            let bytes = request(&format!("GET {path}"), "good.test", "");
            let answer = world.talk(at(GOOD, 80), bytes).await.unwrap();
            if answer.contains("hello") {
                passed.push(path);
            } else {
                denied(&answer);
            }
        }
        assert!(passed.is_empty(), "passed: {passed:?}");
        assert!(heard.lock().unwrap().is_empty());
        // Raw bytes of another alphabet mean one thing here and another there.
        let bytes = request("GET /public/\u{a0}x", "good.test", "");
        assert!(was_reset(&world.talk(at(GOOD, 80), bytes).await));
        let bytes = request("GET /public/%2f", "good.test", "");
        let refusal = denied(&world.talk(at(GOOD, 80), bytes).await.unwrap());
        assert!(
            refusal["why"].as_str().unwrap().contains("two ways"),
            "{refusal}"
        );
        for path in [
            "/public/a%20b",
            "/public/%C3%A9",
            "/public/a.b;v=1",
            "/public/x#/../../private",
        ] {
            let bytes = request(&format!("GET {path}"), "good.test", "");
            let answer = world.talk(at(GOOD, 80), bytes).await.unwrap();
            assert!(answer.ends_with("hello"), "{path} {answer}");
        }
    });
}

#[test]
fn path_rules_by_encodings_under_tls() {
    scene(|scene| async move {
        let moat = scene
            .attach(&serde_json::from_str(NARROW).unwrap(), Vec::new())
            .await;
        let mut passed = Vec::new();
        for path in TRICKS {
            let bytes = request(&format!("GET {path}"), "good.test", "");
            let answer = scene.ask(&moat, "good.test", bytes).await.text;
            if !answer.starts_with("HTTP/1.1 403") {
                passed.push(path);
            }
        }
        assert!(passed.is_empty(), "passed: {passed:?}");
        assert!(scene.heard().is_empty());
    });
}

#[test]
fn override_headers_do_not_reach_a_narrowed_host() {
    in_world(|world| async move {
        let (heard, _moat) = narrow(&world).await;
        let mut known = 0;
        for name in OVERRIDES {
            let header = format!("{name}: overridden\r\nX-Mine: kept\r\n");
            let bytes = request("GET /public/x", "good.test", &header);
            let answer = world.talk(at(GOOD, 80), bytes).await.unwrap();
            assert!(answer.ends_with("hello"), "{name} {answer}");
            let arrived = new_in(&heard, &mut known);
            assert!(!arrived.contains("overridden"), "{name} passed: {arrived}");
            assert!(arrived.contains("X-Mine: kept"), "{arrived}");
        }
    });
}

#[test]
fn override_headers_do_not_reach_a_narrowed_host_under_tls() {
    scene(|scene| async move {
        let moat = scene
            .attach(&serde_json::from_str(NARROW).unwrap(), Vec::new())
            .await;
        for name in OVERRIDES {
            let header = format!("{name}: overridden\r\nX-Mine: kept\r\n");
            let bytes = request("GET /public/x", "good.test", &header);
            scene.ask(&moat, "good.test", bytes).await.whole();
        }
        let heard = scene.heard();
        assert_eq!(heard.len(), OVERRIDES.len());
        for one in heard {
            let values: Vec<&str> = one.headers.iter().map(|(_, v)| v.as_str()).collect();
            assert!(
                values.contains(&"kept") && !values.contains(&"overridden"),
                "{one:?}"
            );
        }
    });
}

#[test]
fn connection_lists_do_not_change_what_plain_http_means() {
    in_world(|world| async move {
        let heard = reading_server(&world).await;
        let mut known = 0;
        let policy = Policy::from_json(&serde_json::from_str(NARROW).unwrap()).unwrap();
        let _moat = world.attach(policy).await;
        let inner = "GET /private HTTP/1.1\r\nHost: good.test\r\n\r\n";
        for listed in [
            "Content-Length",
            "Host",
            "Transfer-Encoding",
            "X-Mine, content-length",
        ] {
            let bytes = format!(
                "POST /public/x HTTP/1.1\r\nHost: good.test\r\nX-Mine: 1\r\nKeep-Alive: 5\r\nProxy-Connection: x\r\nTE: trailers\r\nExpect: 100-continue\r\nConnection: close, {listed}\r\nContent-Length: {}\r\n\r\n{inner}",
                inner.len()
            );
            let answer = world.talk(at(GOOD, 80), bytes).await.unwrap();
            assert!(answer.contains("hello"), "{answer}");
            let arrived = new_in(&heard, &mut known);
            let head = arrived.split("\r\n\r\n").next().unwrap().to_lowercase();
            assert!(
                head.contains(&format!("content-length: {}", inner.len())),
                "{head}"
            );
            for gone in ["connection:", "keep-alive", "te:", "expect"] {
                assert!(!head.contains(gone), "{gone} is in {head}");
            }
            assert_eq!(
                head.contains("x-mine"),
                !listed.contains("X-Mine"),
                "{head}"
            );
        }
    });
}

#[test]
fn conflicting_lengths_are_refused() {
    in_world(|world| async move {
        let (heard, _moat) = narrow(&world).await;
        let mut known = 0;
        for framing in [
            "Content-Length: 5\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: chunked\r\nContent-Length: 5",
            "Transfer-Encoding: gzip, chunked",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            "Content-Length: 5\r\nContent-Length: 6",
            "Content-Length: +5",
            "Content-Length: 5, 5",
            "Content_Length: 5\r\nTransfer-Encoding: chunked",
        ] {
            let bytes = format!(
                "POST /public/x HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n{framing}\r\n\r\n0\r\n\r\nGET /private HTTP/1.1\r\nHost: good.test\r\n\r\n"
            );
            let answer = send(&world, 80, &bytes.into_bytes()).await;
            let arrived = new_in(&heard, &mut known);
            assert!(!arrived.contains("private"), "{framing} {arrived}");
            // Where one arrives, it has one length.
            let arrived = arrived.to_lowercase();
            for other in ["content-length", "content_length", "gzip"] {
                assert!(!arrived.contains(other), "{framing} {arrived} {answer:?}");
            }
            assert!(arrived.matches("chunked").count() < 2, "{arrived}");
        }
    });
}

#[test]
fn a_get_with_a_body_hides_no_request() {
    in_world(|world| async move {
        let (heard, _moat) = narrow(&world).await;
        let inner = "GET /private HTTP/1.1\r\nHost: good.test\r\n\r\n";
        for framed in [
            format!("Content-Length: {}\r\n\r\n{inner}", inner.len()),
            format!(
                "Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{inner}\r\n0\r\n\r\n",
                inner.len()
            ),
        ] {
            let bytes = format!(
                "GET /public/x HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n{framed}"
            );
            let refusal = denied(&world.talk(at(GOOD, 80), bytes).await.unwrap());
            assert!(
                refusal["why"].as_str().unwrap().contains("body"),
                "{refusal}"
            );
        }
        assert!(heard.lock().unwrap().is_empty());
        let answer = world
            .talk(
                at(GOOD, 80),
                request("GET /public/x", "good.test", "Content-Length: 0\r\n"),
            )
            .await
            .unwrap();
        assert!(answer.ends_with("hello"));
    });
}

#[test]
fn a_get_with_a_body_hides_no_request_under_tls() {
    scene(|scene| async move {
        let moat = scene
            .attach(&serde_json::from_str(NARROW).unwrap(), Vec::new())
            .await;
        let bytes = request("GET /public/x", "good.test", "Content-Length: 5\r\n") + "12345";
        let answer = scene.ask(&moat, "good.test", bytes).await.text;
        assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
        assert!(scene.heard().is_empty());
    });
}

/// After an upgrade to HTTP/2 nothing would be seen, narrowed or not: servers may ignore the wish.
#[test]
fn an_upgrade_to_http2_is_not_passed_on() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let heard = world.server(at(GOOD, 80), OK).await;
        let mut known = 0;
        let _moat = world.allowing(&["good.test"]).await;
        for upgrade in [
            "h2c",
            "H2C",
            "HTTP/2.0",
            "TLS/1.2",
            "websocket, h2c",
            "h2c\r\nUpgrade: TLS/1.0",
        ] {
            let bytes = format!(
                "GET /x HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade, HTTP2-Settings, close\r\nUpgrade: {upgrade}\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n\r\n"
            );
            let answer = world.talk(at(GOOD, 80), bytes).await.unwrap();
            assert!(answer.ends_with("hello"), "{answer}");
            let arrived = new_in(&heard, &mut known).to_lowercase();
            for gone in ["h2c", "tls/", "http/2.0", "http2-settings"] {
                assert!(!arrived.contains(gone), "{upgrade}: {arrived}");
            }
        }
    });
}

/// Whatever form came in, servers read one.
#[test]
fn the_host_arrives_in_one_form() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let heard = world.server(at(GOOD, 80), OK).await;
        let mut known = 0;
        let _moat = world.allowing(&["good.test"]).await;
        for host in [
            "GOOD.test",
            "good.test.",
            "good.test:80",
            "Good.Test.:80",
            "\u{ff47}ood.test",
        ] {
            let answer = world
                .talk(at(GOOD, 80), request("GET /", host, ""))
                .await
                .unwrap();
            let arrived = new_in(&heard, &mut known);
            if host.is_ascii() {
                assert!(answer.ends_with("hello"), "{host} {answer}");
                assert!(arrived.contains("Host: good.test\r\n"), "{arrived}");
            } else {
                denied(&answer);
            }
        }
        for host in [
            "good.test, evil.test",
            "evil.test@good.test",
            "good.test evil.test",
            "good.test\tx",
            "good.test:",
            ":80",
            "[good.test]",
            "good.test%2eevil.test",
        ] {
            denied(
                &world
                    .talk(at(GOOD, 80), request("GET /", host, ""))
                    .await
                    .unwrap(),
            );
        }
        assert!(new_in(&heard, &mut known).is_empty());
    });
}
