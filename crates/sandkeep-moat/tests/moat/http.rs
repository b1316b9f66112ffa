use sandkeep_moat::{Phase, Via, policy::Policy};
use serde_json::json;
use std::io::{Read, Write};

use crate::world::{EVIL, GOOD, OK, at, denied, dial, get, in_world, refused_via, was_reset};

/// Reads one answer with a Content-Length of 5.
fn one_answer(stream: &mut std::net::TcpStream) -> String {
    let mut all = Vec::new();
    let mut byte = [0];
    while !all.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap();
        all.push(byte[0]);
    }
    let mut body = [0; 5];
    stream.read_exact(&mut body).unwrap();
    all.extend_from_slice(&body);
    String::from_utf8(all).unwrap()
}

#[test]
fn an_allowed_name_is_reached_and_others_are_told_why() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = world.server(at(GOOD, 80), OK).await;
        let evil = world.server(at(EVIL, 80), OK).await;
        // Another name opens the other address.
        world.zone.address("mirror.test", EVIL);
        let moat = world.allowing(&["good.test:80", "mirror.test:80"]).await;
        let answer = world.talk(at(GOOD, 80), get("good.test")).await.unwrap();
        assert!(answer.ends_with("hello"), "{answer}");
        let refusal = denied(&world.talk(at(EVIL, 80), get("evil.test")).await.unwrap());
        assert_eq!(refusal["host"], "evil.test");
        assert!(refused_via(&moat, Via::Http, "evil.test"));
        // The name decides where it goes, not the address the box dialled.
        let answer = world.talk(at(EVIL, 80), get("good.test")).await.unwrap();
        assert!(answer.ends_with("hello"));
        assert_eq!(good.lock().unwrap().len(), 2);
        assert!(evil.lock().unwrap().is_empty());
        let told = world.seen.connections.lock().unwrap().clone();
        assert!(told.iter().any(|record| record.phase == Phase::Closed
            && record.host.to_string() == "good.test"
            && record.bytes_received > 5
            && record.rule.contains("good.test")));
    });
}

#[test]
fn host_header_mismatch_on_keep_alive() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        world.zone.address("other.test", EVIL);
        let good = world.server(at(GOOD, 80), OK).await;
        let other = world.server(at(EVIL, 80), OK).await;
        let _moat = world.allowing(&["good.test", "other.test"]).await;
        for second in ["evil.test", "other.test"] {
            let rest = world
                .in_box(move || {
                    let mut stream = dial(at(GOOD, 80)).unwrap();
                    let first = "GET /a HTTP/1.1\r\nHost: good.test\r\n\r\n";
                    for _ in 0..2 {
                        stream.write_all(first.as_bytes()).unwrap();
                        assert!(one_answer(&mut stream).ends_with("hello"));
                    }
                    stream.write_all(get(second).as_bytes()).unwrap();
                    let mut rest = String::new();
                    stream.read_to_string(&mut rest).unwrap();
                    rest
                })
                .await;
            assert_eq!(denied(&rest)["host"], second);
        }
        assert!(
            good.lock()
                .unwrap()
                .iter()
                .all(|text| !text.contains("evil"))
        );
        assert!(other.lock().unwrap().is_empty());
    });
}

#[test]
fn absolute_form() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = world.server(at(GOOD, 80), OK).await;
        let _moat = world.allowing(&["good.test"]).await;
        let line = |uri: &str, host: &str| {
            format!("GET {uri} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
        };
        let answer = world
            .talk(at(GOOD, 80), line("http://good.test/x", "good.test"))
            .await;
        assert!(answer.unwrap().ends_with("hello"));
        assert!(good.lock().unwrap()[0].starts_with("GET /x HTTP/1.1"));
        for (uri, host) in [
            ("http://evil.test/", "good.test"),
            ("http://good.test/", "evil.test"),
            ("http://good.test@evil.test/", "good.test"),
            ("http://evil.test@good.test/", "good.test"),
            ("http://good.test:8080/", "good.test"),
            ("https://good.test/", "good.test"),
        ] {
            denied(&world.talk(at(GOOD, 80), line(uri, host)).await.unwrap());
        }
        assert_eq!(good.lock().unwrap().len(), 1);
    });
}

#[test]
fn connect_abuse() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = world.server(at(GOOD, 80), OK).await;
        let ssh = world.server(at(GOOD, 22), "SSH").await;
        let _moat = world.allowing(&["good.test:80"]).await;
        for target in [
            "good.test:22",
            "good.test:80",
            "evil.test:443",
            "user@good.test:80",
        ] {
            let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\nearly data");
            match world.talk(at(GOOD, 80), request).await {
                Ok(answer) => assert!(
                    answer.starts_with("HTTP/1.1 403") || answer.starts_with("HTTP/1.1 400"),
                    "{answer}"
                ),
                Err(error) => assert!(was_reset::<()>(&Err(error))),
            }
        }
        assert!(good.lock().unwrap().is_empty() && ssh.lock().unwrap().is_empty());
    });
}

#[test]
fn duplicate_host() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = world.server(at(GOOD, 80), OK).await;
        let _moat = world.allowing(&["good.test"]).await;
        for hosts in [
            "Host: good.test\r\nHost: evil.test\r\n",
            "Host: evil.test\r\nHost: good.test\r\n",
            "Host: good.test\r\nhost: good.test\r\n",
            "",
            "Host: \r\n",
            "Host: good.test, evil.test\r\n",
            "Host: good.test:81\r\n",
            "Host: good.test%00.evil.test\r\n",
            "Host: good.test.evil.test\r\n",
        ] {
            let request = format!("GET / HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n");
            denied(&world.talk(at(GOOD, 80), request).await.unwrap());
        }
        assert!(good.lock().unwrap().is_empty());
        // One spelling among many is still the same host.
        let answer = world.talk(at(GOOD, 80), get("GOOD.test.")).await.unwrap();
        assert!(answer.ends_with("hello"));
    });
}

#[test]
fn smuggled_requests_do_not_arrive() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = world.server(at(GOOD, 80), OK).await;
        let _moat = world.allowing(&["good.test"]).await;
        let inner = "GET /smuggled HTTP/1.1\r\nHost: evil.test\r\n\r\n";
        for framing in [
            format!(
                "Content-Length: {}\r\nTransfer-Encoding: chunked",
                inner.len() + 5
            ),
            "Transfer-Encoding: xchunked".to_owned(),
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity".to_owned(),
            "Content-Length: 0\r\nContent-Length: 5".to_owned(),
        ] {
            let request =
                format!("POST / HTTP/1.1\r\nHost: good.test\r\n{framing}\r\n\r\n0\r\n\r\n{inner}");
            // Refused in whatever way; what matters is what arrived.
            drop(world.talk(at(GOOD, 80), request).await);
        }
        let heard = good.lock().unwrap().concat();
        assert!(!heard.contains("evil.test"), "{heard}");
    });
}

#[test]
fn ip_literal() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = world.server(at(GOOD, 80), OK).await;
        let moat = world.allowing(&["good.test"]).await;
        world.resolve("good.test.").await;
        // 203.0.113.10 in the spellings of browsers and libc.
        for host in [
            "203.0.113.10",
            "3405803786",
            "0xcb00710a",
            "0313.0.0161.012",
            "203.0.28938",
            "[::ffff:203.0.113.10]",
        ] {
            denied(&world.talk(at(GOOD, 80), get(host)).await.unwrap());
        }
        assert!(good.lock().unwrap().is_empty());
        // A rule for the address lets it through, but only for that address.
        moat.set_policy(Policy::allowing(["203.0.113.10"]).unwrap());
        let answer = world.talk(at(GOOD, 80), get("203.0.113.10")).await.unwrap();
        assert!(answer.ends_with("hello"));
        let elsewhere = world.talk(at(EVIL, 80), get("203.0.113.10")).await;
        assert!(was_reset(&elsewhere), "{elsewhere:?}");
    });
}

#[test]
fn rules_about_requests() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = world.server(at(GOOD, 80), OK).await;
        let policy = Policy::from_json(&json!({"allow": [
            {"to": "good.test", "http": [{"methods": ["GET"], "path": "/v1/*"}]}
        ]}));
        let _moat = world.attach(policy.unwrap()).await;
        world.resolve("good.test.").await;
        let request =
            |line: &str| format!("{line} HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n\r\n");
        let answer = world
            .talk(at(GOOD, 80), request("GET /v1/x"))
            .await
            .unwrap();
        assert!(answer.ends_with("hello"));
        for line in [
            "POST /v1/x",
            "GET /admin",
            "GET /v1/../admin",
            "GET /v1/%2e%2e/admin",
        ] {
            denied(&world.talk(at(GOOD, 80), request(line)).await.unwrap());
        }
        // An upgrade to HTTP/2 would hide what comes after it: it is not passed on.
        let h2c = "GET /v1/x HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n\r\n";
        let answer = world.talk(at(GOOD, 80), h2c).await.unwrap();
        assert!(answer.ends_with("hello"));
        assert!(!good.lock().unwrap()[1].contains("h2c"));
        let other = "GET /v1/x HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade\r\nUpgrade: other\r\n\r\n";
        denied(&world.talk(at(GOOD, 80), other).await.unwrap());
        // Neither TLS nor plain bytes go round the rules.
        assert!(was_reset(&world.talk(at(GOOD, 80), "\0\x01binary").await));
        assert_eq!(good.lock().unwrap().len(), 2);
    });
}

#[test]
fn http2_without_tls_is_refused() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = world.server(at(GOOD, 80), OK).await;
        let _moat = world.allowing(&["good.test"]).await;
        world.resolve("good.test.").await;
        let answer = world
            .talk(at(GOOD, 80), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .await;
        assert!(was_reset(&answer), "{answer:?}");
        assert!(good.lock().unwrap().is_empty());
    });
}

#[test]
fn websockets_pass() {
    in_world(|world| async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        world.zone.address("good.test", GOOD);
        let listener = tokio::net::TcpListener::bind(at(GOOD, 80)).await.unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            let switch = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
            stream.write_all(switch.as_bytes()).await.unwrap();
            let mut frame = [0; 4];
            stream.read_exact(&mut frame).await.unwrap();
            stream.write_all(&frame).await.unwrap();
        });
        let _moat = world.allowing(&["good.test"]).await;
        let echoed = world
            .in_box(|| {
                let mut stream = dial(at(GOOD, 80)).unwrap();
                stream.write_all(b"GET /ws HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n").unwrap();
                let mut head = Vec::new();
                let mut byte = [0];
                while !head.ends_with(b"\r\n\r\n") {
                    stream.read_exact(&mut byte).unwrap();
                    head.push(byte[0]);
                }
                assert!(head.starts_with(b"HTTP/1.1 101"));
                stream.write_all(b"ping").unwrap();
                let mut rest = Vec::new();
                stream.read_to_end(&mut rest).unwrap();
                rest
            })
            .await;
        assert_eq!(echoed, b"ping");
    });
}
