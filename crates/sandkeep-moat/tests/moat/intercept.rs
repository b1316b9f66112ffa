//! Interception and credentials: who gets them, and who does not.

use std::io::{Read, Write};

use sandkeep_moat::Via;
use serde_json::json;

use crate::{
    origin::{
        CANARY, Identity, authority, bearer, binding, connect, connect_speaking, refused_because,
        request, scene, serve, until,
    },
    world::{EVIL, GOOD, at, denied, refused_via, was_reset},
};

#[test]
fn a_credential_is_attached_and_the_own_header_of_the_box_is_replaced() {
    scene(|scene| async move {
        let moat = scene
            .attach(&json!({"allow": ["good.test:443"]}), vec![bearer()])
            .await;
        let own = "Authorization: Bearer mine\r\nAUTHORIZATION: Basic eDp5\r\nX-Other: stays\r\n";
        let got = scene
            .ask(&moat, "good.test", request("GET /a?b=c", "good.test", own))
            .await
            .whole();
        assert!(got.ends_with("hello"), "{got}");
        let heard = &scene.heard()[0];
        assert_eq!(heard.line, "GET /a?b=c");
        assert_eq!(heard.all("authorization"), [format!("Bearer {CANARY}")]);
        assert_eq!(heard.all("x-other"), ["stays"]);
        assert_eq!(heard.all("host"), ["good.test"]);
        let uses = scene.vault.uses.lock().unwrap().clone();
        assert_eq!(uses.len(), 1);
        assert!(uses[0].contains("good.test") && !uses[0].contains(CANARY));
        assert!(moat.denials().is_empty());
    });
}

#[test]
fn folded_and_nominated_headers_do_not_keep_the_own_one() {
    scene(|scene| async move {
        let moat = scene
            .attach(&json!({"allow": ["good.test"]}), vec![bearer()])
            .await;
        // `Connection` may not take the credential off again.
        let listed = "GET / HTTP/1.1\r\nHost: good.test\r\nConnection: close, authorization, host\r\nAuthorization: mine\r\n\r\n";
        scene.ask(&moat, "good.test", listed).await.whole();
        let heard = scene.heard();
        assert_eq!(heard[0].all("authorization"), [format!("Bearer {CANARY}")]);
        assert_eq!(heard[0].all("host"), ["good.test"]);
        // A folded header is refused or read as one; never passed on beside ours.
        let folded = "X-Fold: a\r\n Authorization: mine\r\n";
        scene
            .ask(&moat, "good.test", request("GET /", "good.test", folded))
            .await;
        for heard in scene.heard() {
            assert_eq!(heard.all("authorization"), [format!("Bearer {CANARY}")]);
        }
    });
}

#[test]
fn other_hosts_paths_and_methods_get_nothing() {
    scene(|scene| async move {
        let narrow = binding(&json!({
            "secret": "key", "host": "good.test", "path": "/mine/*", "methods": ["GET"]
        }));
        // Interception of other.test comes from a rule about requests.
        let policy = json!({"allow": [
            "good.test", {"to": "other.test", "http": [{"path": "/*"}]}
        ]});
        let moat = scene.attach(&policy, vec![narrow]).await;
        for (line, host) in [
            ("GET /mine/x", "other.test"),
            ("GET /yours", "good.test"),
            ("POST /mine/x", "good.test"),
            ("GET /mine/../yours", "good.test"),
            ("GET /mine%2fx", "good.test"),
        ] {
            let own = "Authorization: own\r\nContent-Length: 0\r\n";
            let got = scene.ask(&moat, host, request(line, host, own)).await;
            assert!(got.whole().ends_with("hello"));
            let heard = scene.heard().pop().unwrap();
            assert_eq!(heard.all("authorization"), ["own"], "{line} {host}");
        }
        scene
            .ask(&moat, "good.test", request("GET /mine/x", "good.test", ""))
            .await
            .whole();
        let heard = scene.heard().pop().unwrap();
        assert_eq!(heard.all("authorization"), [format!("Bearer {CANARY}")]);
        assert_eq!(scene.vault.uses.lock().unwrap().len(), 1);
    });
}

#[test]
fn query_basic_and_placeholder() {
    scene(|scene| async move {
        let bound = |place: serde_json::Value| {
            let mut document = json!({"secret": "key", "host": "good.test"});
            document
                .as_object_mut()
                .unwrap()
                .extend(place.as_object().unwrap().clone());
            binding(&document)
        };
        let moat = scene.attach(&json!({"allow": ["good.test"]}), vec![]).await;
        let ask = async |headers: &str| {
            let line = "POST /p?k=PLACEHOLDER_key_1&api_key=mine";
            let rest = format!("{headers}Content-Length: 17\r\n");
            let full = request(line, "good.test", &rest) + "PLACEHOLDER_key_1";
            scene.ask(&moat, "good.test", full).await.whole();
            scene.heard().pop().unwrap()
        };
        moat.set_bindings(vec![bound(json!({"query": {"name": "api_key"}}))]);
        let heard = ask("").await;
        assert_eq!(
            heard.line,
            "POST /p?k=PLACEHOLDER_key_1&api%5Fkey=canary%2D6f1d%2F90%22ab"
        );
        moat.set_bindings(vec![bound(json!({"basic": {"user": "git"}}))]);
        // "git:" and the canary.
        let encoded = "Basic Z2l0OmNhbmFyeS02ZjFkLzkwImFi";
        assert_eq!(ask("").await.all("authorization"), [encoded]);
        moat.set_bindings(vec![bound(
            json!({"placeholder": {"text": "PLACEHOLDER_key_1"}}),
        )]);
        let heard = ask("X-Key: v1 PLACEHOLDER_key_1\r\n").await;
        assert_eq!(heard.all("x-key"), [format!("v1 {CANARY}")]);
        // Neither in the URL nor in the body.
        assert!(heard.line.contains("k=PLACEHOLDER_key_1"));
        assert_eq!(heard.body, 17);
        // A request without the placeholder goes as it is and counts as no use.
        let uses = scene.vault.uses.lock().unwrap().len();
        ask("").await;
        assert_eq!(scene.vault.uses.lock().unwrap().len(), uses);
    });
}

#[test]
fn a_credential_never_widens_reach() {
    scene(|scene| async move {
        let moat = scene
            .attach(&json!({"allow": ["other.test"]}), vec![bearer()])
            .await;
        let got = scene
            .ask(&moat, "good.test", request("GET /", "good.test", ""))
            .await;
        assert!(was_reset::<()>(&Err(got.error.unwrap())));
        assert!(scene.heard().is_empty());
        assert!(refused_via(&moat, Via::Tls, "good.test"));
        // Nor does it go to another port of its host.
        let elsewhere = binding(&json!({"secret": "key", "host": "other.test", "port": 8443}));
        moat.set_bindings(vec![elsewhere]);
        let got = scene.ask_trusting(
            scene.identity.certificate.clone(),
            "other.test",
            request("GET /", "other.test", ""),
        );
        assert!(got.await.whole().ends_with("hello"));
        assert!(scene.heard()[0].all("authorization").is_empty());
    });
}

#[test]
fn hosts_without_a_binding_are_passed_on_untouched() {
    scene(|scene| async move {
        let policy = json!({"allow": ["good.test", "other.test"]});
        let moat = scene.attach(&policy, vec![bearer()]).await;
        // The client trusts only the certificate of the site itself.
        let own = scene.identity.certificate.clone();
        let line = request("GET /", "other.test", "");
        let got = scene.ask_trusting(own.clone(), "other.test", line).await;
        assert!(got.whole().ends_with("hello"));
        // And does not get along with us where we sit in between.
        let line = request("GET /", "good.test", "");
        let got = scene.ask_trusting(own, "good.test", line).await;
        assert!(got.error.is_some());
        until(|| refused_because(&moat, "does not trust")).await;
        assert_eq!(scene.heard().len(), 1);
    });
}

#[test]
fn sni_and_host_must_agree() {
    scene(|scene| async move {
        let policy = json!({"allow": ["good.test", "other.test", "evil.test"]});
        let moat = scene.attach(&policy, vec![bearer()]).await;
        for host in [
            "other.test",
            "evil.test",
            "good.test:8443",
            "good.test.evil.test",
        ] {
            let line = request("GET /", host, "");
            let got = scene.ask(&moat, "good.test", line).await.whole();
            denied(&got);
        }
        for line in [
            "GET https://other.test/",
            "GET http://good.test/",
            "GET https://good.test@other.test/",
            "CONNECT other.test:443",
            "TRACE /",
        ] {
            let got = scene
                .ask(&moat, "good.test", request(line, "good.test", ""))
                .await;
            assert!(
                got.text.starts_with("HTTP/1.1 403") || got.text.starts_with("HTTP/1.1 400"),
                "{line} {got:?}"
            );
        }
        assert!(scene.heard().is_empty());
        assert!(refused_via(&moat, Via::Http, "other.test"));
        let absolute = request("GET https://good.test/x", "good.test", "");
        scene.ask(&moat, "good.test", absolute).await.whole();
        assert_eq!(scene.heard()[0].line, "GET /x");
    });
}

#[test]
fn second_request_with_another_host() {
    scene(|scene| async move {
        let policy = json!({"allow": ["good.test", "other.test"]});
        let moat = scene.attach(&policy, vec![bearer()]).await;
        let trusted = authority(&moat);
        let rest = scene
            .world
            .in_box(move || {
                let mut tls = connect("good.test", &trusted);
                for _ in 0..2 {
                    tls.write_all(b"GET /k HTTP/1.1\r\nHost: good.test\r\n\r\n")
                        .unwrap();
                    let mut answer = Vec::new();
                    while !answer.ends_with(b"hello") {
                        let mut byte = [0];
                        tls.read_exact(&mut byte).unwrap();
                        answer.push(byte[0]);
                    }
                }
                tls.write_all(request("GET /", "other.test", "").as_bytes())
                    .unwrap();
                let mut rest = String::new();
                tls.read_to_string(&mut rest).unwrap();
                rest
            })
            .await;
        assert_eq!(denied(&rest)["host"], "other.test");
        assert_eq!(scene.heard().len(), 2);
    });
}

#[test]
fn an_upstream_with_a_bad_certificate_gets_nothing() {
    scene(|scene| async move {
        scene.world.zone.address("good.test", EVIL);
        scene.world.zone.address("else.test", GOOD);
        let evil = serve(at(EVIL, 443), &Identity::of(&["good.test"])).await;
        let moat = scene
            .attach(
                &json!({"allow": ["good.test", "else.test"]}),
                vec![bearer()],
            )
            .await;
        let line = request("GET /", "good.test", "");
        let got = scene.ask(&moat, "good.test", line).await.whole();
        assert!(got.starts_with("HTTP/1.1 502"), "{got}");
        assert!(got.contains("upstream_untrusted"), "{got}");
        assert!(evil.lock().unwrap().is_empty());
        assert!(refused_because(&moat, "certificate"));
        // A trusted certificate for another name is no better.
        let elsewhere = binding(&json!({"secret": "key", "host": "else.test"}));
        moat.set_bindings(vec![elsewhere]);
        let line = request("GET /", "else.test", "");
        let got = scene.ask(&moat, "else.test", line).await.whole();
        assert!(got.contains("upstream_untrusted"), "{got}");
        assert!(scene.heard().is_empty());
    });
}

#[test]
fn rules_about_requests_hold_inside_tls() {
    scene(|scene| async move {
        let policy = json!({"allow": [
            {"to": "good.test", "http": [{"methods": ["GET"], "path": "/v1/*"}]}
        ]});
        let moat = scene.attach(&policy, vec![]).await;
        let ask = async |line: &str| {
            let line = request(line, "good.test", "");
            scene.ask(&moat, "good.test", line).await.whole()
        };
        assert!(ask("GET /v1/x").await.ends_with("hello"));
        for line in [
            "DELETE /v1/x",
            "GET /admin",
            "GET /v1/../admin",
            "GET /v1/%2e%2e/admin",
        ] {
            assert_eq!(denied(&ask(line).await)["host"], "good.test");
        }
        assert_eq!(scene.heard().len(), 1);
        // A narrower policy holds for the next request.
        let none = json!({"allow": [{"to": "good.test", "http": [{"path": "/v2/*"}]}]});
        moat.set_policy(sandkeep_moat::policy::Policy::from_json(&none).unwrap());
        denied(&ask("GET /v1/x").await);
    });
}

#[test]
fn smuggled_requests_do_not_arrive() {
    scene(|scene| async move {
        let moat = scene
            .attach(&json!({"allow": ["good.test"]}), vec![bearer()])
            .await;
        let inner = "GET /smuggled HTTP/1.1\r\nHost: good.test\r\n\r\n";
        for framing in [
            "Content-Length: 4\r\nTransfer-Encoding: chunked",
            "Content-Length: 0\r\nContent-Length: 5",
            "Transfer-Encoding: xchunked",
            "Transfer-Encoding: chunked\r\n\t, identity",
        ] {
            let full = format!(
                "POST / HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n{framing}\r\n\r\n0\r\n\r\n{inner}"
            );
            // Refused in whatever way; what matters is what arrived.
            drop(scene.ask(&moat, "good.test", full).await);
        }
        assert!(
            scene
                .heard()
                .iter()
                .all(|heard| !heard.line.contains("smuggled"))
        );
    });
}

#[test]
fn http2_is_not_a_way_round() {
    scene(|scene| async move {
        let moat = scene
            .attach(&json!({"allow": ["good.test"]}), vec![bearer()])
            .await;
        // Not agreed on, but spoken all the same.
        let spoken = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
        drop(scene.ask(&moat, "good.test", spoken).await);
        for (protocols, agreed) in [
            (&["h2", "http/1.1"][..], Some(b"http/1.1".to_vec())),
            (&["h2"][..], Some(b"h2".to_vec())),
            (&["h3"][..], None),
        ] {
            let trusted = authority(&moat);
            let got = scene.world.in_box(move || {
                let mut tls = connect_speaking(protocols, "good.test", &trusted);
                tls.conn
                    .complete_io(&mut tls.sock)
                    .is_ok()
                    .then(|| tls.conn.alpn_protocol().map(<[u8]>::to_vec))
                    .flatten()
            });
            assert_eq!(got.await, agreed);
        }
        until(|| refused_because(&moat, "speaks neither")).await;
        assert!(scene.heard().is_empty());
    });
}

#[test]
fn what_is_kept_of_a_refusal_is_bounded() {
    scene(|scene| async move {
        let policy = json!({"allow": [{"to": "good.test", "http": [{"path": "/v1"}]}]});
        let moat = scene.attach(&policy, vec![]).await;
        let line = format!("GET /{}", "x".repeat(20_000));
        let line = request(&line, "good.test", "");
        denied(&scene.ask(&moat, "good.test", line).await.whole());
        assert!(moat.denials()[0].why.len() < 2000);
    });
}

#[test]
fn a_missing_secret_is_said_and_nothing_is_sent() {
    scene(|scene| async move {
        let moat = scene
            .attach(&json!({"allow": ["good.test"]}), vec![bearer()])
            .await;
        let line = request("GET /", "good.test", "Authorization: own\r\n");
        for value in [None, Some("two\r\nlines: evil")] {
            let mut values = std::collections::HashMap::new();
            values.extend(value.map(|value| ("key".to_owned(), value.to_owned())));
            *scene.vault.values.lock().unwrap() = values;
            let got = scene.ask(&moat, "good.test", line.clone()).await.whole();
            assert!(got.contains("credential_unavailable"), "{got}");
        }
        assert!(scene.heard().is_empty());
    });
}

#[test]
fn large_bodies_pass_both_ways() {
    scene(|scene| async move {
        let moat = scene
            .attach(&json!({"allow": ["good.test"]}), vec![bearer()])
            .await;
        let got = scene
            .ask(&moat, "good.test", request("GET /large", "good.test", ""))
            .await
            .whole();
        let (_, body) = got.split_once("\r\n\r\n").unwrap();
        assert_eq!(body.len(), 8 << 20);
        let length = format!("Content-Length: {}\r\n", 8 << 20);
        let mut upload = request("PUT /", "good.test", &length).into_bytes();
        upload.resize(upload.len() + (8 << 20), b'y');
        scene.ask(&moat, "good.test", upload).await.whole();
        assert_eq!(scene.heard()[1].body, 8 << 20);
        // The same without a length told beforehand.
        let head = request("POST /", "good.test", "Transfer-Encoding: chunked\r\n");
        let chunk = format!("10000\r\n{}\r\n", "z".repeat(0x10000));
        let chunked = format!("{head}{}0\r\n\r\n", chunk.repeat(32));
        scene.ask(&moat, "good.test", chunked).await.whole();
        assert_eq!(scene.heard()[2].body, 32 * 0x10000);
    });
}

#[test]
fn narrowing_the_policy_cuts_an_intercepted_connection() {
    scene(|scene| async move {
        let moat = scene
            .attach(&json!({"allow": ["good.test"]}), vec![bearer()])
            .await;
        let trusted = authority(&moat);
        let (ready, wait) = tokio::sync::oneshot::channel();
        let ended = scene.world.in_box(move || {
            let mut tls = connect("good.test", &trusted);
            tls.write_all(b"GET / HTTP/1.1\r\nHost: good.test\r\n\r\n")
                .unwrap();
            let mut byte = [0];
            tls.read_exact(&mut byte).unwrap();
            ready.send(()).unwrap();
            tls.read_to_end(&mut Vec::new())
        });
        let narrow = async {
            wait.await.unwrap();
            moat.set_policy(sandkeep_moat::policy::Policy::air_gapped());
        };
        let (ended, ()) = tokio::join!(ended, narrow);
        assert!(was_reset(&ended), "{ended:?}");
    });
}
