//! A secret that a site shows does not get into the box, and neither into anything we write.

use std::{
    io::{self, Read, Write},
    sync::{Arc, Mutex},
};

use serde_json::json;

use crate::{
    origin::{
        CANARY, authority, bearer, connect, frame, refused_because, request, scene, told, until,
    },
    world::denied,
};

#[test]
fn a_reflected_secret_is_not_given_back() {
    scene(|scene| async move {
        let moat = scene
            .attach(&json!({"allow": ["good.test"]}), vec![bearer()])
            .await;
        let ask = async |line: &str| {
            let all = "Accept-Encoding: gzip, br\r\n";
            scene
                .ask(&moat, "good.test", request(line, "good.test", all))
                .await
        };
        let got = ask("GET /echo/header").await.whole();
        assert!(
            got.starts_with("HTTP/1.1 502") && got.contains("secret_reflected"),
            "{got}"
        );
        let got = ask("GET /echo/reason").await.whole();
        assert!(got.starts_with("HTTP/1.1 200 OK\r\n"), "{got}");
        for line in ["GET /echo", "GET /echo/slowly"] {
            let got = ask(line).await;
            assert!(!got.text.contains(&CANARY[..8]), "{got:?}");
            // Not a whole answer, and the client can tell.
            assert!(
                got.error.is_some() || !got.text.ends_with("0\r\n\r\n"),
                "{got:?}"
            );
        }
        let packed = ask("GET /packed").await.whole();
        assert!(packed.contains("unreadable_response"), "{packed}");
        for heard in scene.heard() {
            assert_eq!(heard.all("accept-encoding"), ["identity"]);
        }
        // On a busy machine the slow one is cut where it paused.
        let cut = |why: &str| why.contains("holds a secret") || why.contains("near-miss");
        let counted = || {
            let denials = moat.denials().into_iter().filter(|denial| cut(&denial.why));
            denials.map(|denial| denial.count).sum::<u64>()
        };
        until(|| counted() == 3).await;
        assert!(refused_because(&moat, "holds a secret"));
    });
}

#[test]
fn a_websocket_passes_but_not_with_the_secret() {
    scene(|scene| async move {
        let moat = scene
            .attach(&json!({"allow": ["good.test"]}), vec![bearer()])
            .await;
        let trusted = authority(&moat);
        let got = scene
            .world
            .in_box(move || {
                let mut tls = connect("good.test", &trusted);
                tls.write_all(b"GET /ws HTTP/1.1\r\nHost: good.test\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n")
                    .unwrap();
                let mut head = Vec::new();
                let mut byte = [0];
                while !head.ends_with(b"\r\n\r\n") {
                    tls.read_exact(&mut byte).unwrap();
                    head.push(byte[0]);
                }
                assert!(head.starts_with(b"HTTP/1.1 101"));
                for word in [b"ping", b"pong"] {
                    let said = frame(0x81, word);
                    tls.write_all(&told(&said)).unwrap();
                    let mut echo = [0; 6];
                    tls.read_exact(&mut echo).unwrap();
                    assert_eq!(echo[..], said);
                }
                tls.write_all(&told(b"auth")).unwrap();
                let mut rest = Vec::new();
                // Ends with an error or without: it ends.
                drop(tls.read_to_end(&mut rest));
                rest
            })
            .await;
        let got = String::from_utf8_lossy(&got).into_owned();
        assert!(!got.contains("canary"), "{got}");
        let heard = scene.heard();
        assert_eq!(heard[0].all("authorization"), [format!("Bearer {CANARY}")]);
        assert!(heard[0].all("sec-websocket-extensions").is_empty());
        until(|| refused_because(&moat, "holds a secret")).await;
        // Other protocols would hide what follows.
        let h2c =
            "GET / HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n";
        denied(&scene.ask(&moat, "good.test", h2c).await.text);
    });
}

#[derive(Clone, Default)]
struct Captured(Arc<Mutex<Vec<u8>>>);

impl Write for Captured {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_canary_is_nowhere() {
    let logs = Captured::default();
    let sink = logs.clone();
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_writer(move || sink.clone())
        .init();
    scene(|scene| async move {
        let policy =
            json!({"allow": [{"to": "good.test", "http": [{"methods": ["GET"], "path": "/*"}]}]});
        let moat = scene.attach(&policy, vec![bearer()]).await;
        let mut received = moat.ca_pem().unwrap();
        for line in [
            "GET /",
            "GET /echo",
            "GET /echo/header",
            "GET /echo/slowly",
            "POST /",
        ] {
            let line = request(line, "good.test", "");
            received += &scene.ask(&moat, "good.test", line).await.text;
        }
        assert_eq!(scene.heard().len(), 4);
        assert!(
            scene
                .heard()
                .iter()
                .all(|heard| format!("{heard:?}").contains("canary-6f1d"))
        );
        let connections = scene.world.seen.connections.lock().unwrap().clone();
        let denials = scene.world.seen.denials.lock().unwrap().clone();
        assert!(!connections.is_empty() && !denials.is_empty());
        let written = [
            received,
            format!("{moat:?} {:?} {:?}", moat.view(), scene.world.moat),
            serde_json::to_string(&moat.denials()).unwrap(),
            serde_json::to_string(&connections).unwrap(),
            serde_json::to_string(&denials).unwrap(),
            scene.vault.uses.lock().unwrap().concat(),
        ];
        for text in written {
            assert!(!text.contains("canary"), "{text}");
        }
    });
    let logs = String::from_utf8_lossy(&logs.0.lock().unwrap()).into_owned();
    assert!(logs.contains("good.test"), "the logs were captured: {logs}");
    assert!(!logs.contains("canary"), "{logs}");
}
