//! What a box can ask about itself.

use std::sync::Arc;

use bytes::Bytes;
use http::Response;
use sandkeep_moat::{BoxFuture, Inside, InsideDesk, Place, Visit, policy::Policy};
use serde_json::{Value, json};

use crate::world::{EVIL, GOOD, World, at, denied, get, in_world_with};

const OURS: &str = "10.0.0.1";
const METADATA: &str = "169.254.169.254";

/// Stands for the metadata service: says who asked for what.
struct Others;

impl Inside for Others {
    fn answer(&self, visit: Visit) -> BoxFuture<'_, Response<Bytes>> {
        let said = format!(
            "{} {:?} {} {}",
            visit.from.id(),
            visit.place,
            visit.request.method(),
            visit.request.uri()
        );
        Box::pin(std::future::ready(Response::new(said.into())))
    }
}

fn with_desk<F: Future<Output = ()>>(test: impl FnOnce(World) -> F + Send + 'static) {
    in_world_with(
        |config| config.inside = Some(Arc::new(InsideDesk::new(Some(Arc::new(Others))))),
        test,
    );
}

async fn ask(world: &World, path: &str) -> (u16, Value) {
    let text =
        format!("GET {path} HTTP/1.1\r\nHost: sandkeep.internal\r\nConnection: close\r\n\r\n");
    let answer = world.talk(at(OURS, 80), text).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap_or(Value::Null))
}

#[test]
fn why() {
    with_desk(|world| async move {
        world.zone.address("mirror.test", EVIL);
        let _moat = world.allowing(&["good.test:443", "mirror.test:80"]).await;
        denied(&world.talk(at(EVIL, 80), get("evil.test")).await.unwrap());
        let (status, answer) = ask(&world, "/why?host=evil.test&port=80").await;
        assert_eq!(status, 200);
        assert_eq!(answer["allowed"], false);
        assert!(answer["hint"].as_str().unwrap().contains("evil.test:80"));
        assert_eq!(answer["denials"][0]["host"], "evil.test");
        let (_, answer) = ask(&world, "/why?host=good.test").await;
        assert_eq!(answer["allowed"], true);
        assert_eq!(answer["rule"], "good.test port 443");
        for bad in [
            "/why",
            "/why?host=",
            "/why?host=a%00b",
            "/why?host=a.test&port=x",
            "/why?host=a&host=b",
        ] {
            let (status, answer) = ask(&world, bad).await;
            assert_eq!(status, 400, "{bad}");
            assert!(answer["error"]["message"].is_string());
        }
    });
}

#[test]
fn policy_and_denials() {
    with_desk(|world| async move {
        world.zone.address("good.test", GOOD);
        let moat = world.allowing(&["good.test:443"]).await;
        let (_, answer) = ask(&world, "/policy").await;
        assert_eq!(answer["policy"]["allow"][0]["to"], "good.test");
        assert_eq!(answer["words"][1], "good.test port 443 is open.");
        moat.set_policy(Policy::air_gapped());
        let text = "GET /policy HTTP/1.1\r\nHost: 169.254.169.254\r\nAccept: text/plain\r\nConnection: close\r\n\r\n";
        let answer = world.talk(at(METADATA, 80), text).await.unwrap();
        assert!(
            answer.ends_with("\r\n\r\nNothing can be reached.\n"),
            "{answer}"
        );
        let (_, answer) = ask(&world, "/denials").await;
        assert_eq!(answer, json!({"denials": []}));
        assert!(world.resolve("evil.test.").await.is_empty());
        let (_, answer) = ask(&world, "/denials").await;
        assert_eq!(answer["denials"][0]["host"], "evil.test");
    });
}

#[test]
fn the_rest_is_passed_on_with_the_box_that_asks() {
    with_desk(|world| async move {
        let moat = world.allowing(&["good.test"]).await;
        for (address, place) in [(OURS, Place::Internal), (METADATA, Place::Metadata)] {
            let text = "PUT /v1/session?x=1 HTTP/1.1\r\nHost: sandkeep.internal\r\nConnection: close\r\n\r\n";
            let answer = world.talk(at(address, 80), text).await.unwrap();
            let said = format!("{} {place:?} PUT /v1/session?x=1", moat.id());
            assert!(answer.ends_with(&said), "{answer}");
        }
        // Other ports of these addresses are closed.
        assert!(world.talk(at(METADATA, 8080), "x").await.is_err());
    });
}

#[test]
fn names_pointed_at_us_learn_nothing() {
    with_desk(|world| async move {
        let _moat = world.allowing(&["good.test"]).await;
        for (line, status) in [
            ("GET /policy HTTP/1.1\r\nHost: evil.test", 403),
            ("GET /denials HTTP/1.1\r\nHost: evil.test", 403),
            ("POST /policy HTTP/1.1\r\nHost: sandkeep.internal", 400),
        ] {
            let text = format!("{line}\r\nConnection: close\r\n\r\n");
            let answer = world.talk(at(OURS, 80), text).await.unwrap();
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}")),
                "{answer}"
            );
        }
    });
}
