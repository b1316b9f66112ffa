//! Programs that speak only HTTP/2, under interception.

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use sandkeep_moat::{BoxMoat, policy::Policy};
use serde_json::json;

use crate::{
    origin::{
        CANARY, Scene, authority, bearer, client, refused_because, scene, serve_speaking, until,
    },
    world::{EVIL, GOOD, at, dial},
};

type Sender = SendRequest<Full<Bytes>>;

/// A connection from the box.
pub async fn speak(
    scene: &Scene,
    moat: &BoxMoat,
    server: &'static str,
    address: &'static str,
) -> Sender {
    let stream = scene.world.in_box(move || dial(at(address, 443)).unwrap());
    let stream = stream.await;
    stream.set_nonblocking(true).unwrap();
    let stream = tokio::net::TcpStream::from_std(stream).unwrap();
    let config = client(&["h2"], &authority(moat));
    let stream = tokio_rustls::TlsConnector::from(config)
        .connect(server.try_into().unwrap(), stream)
        .await
        .unwrap();
    let (sender, driver) = Builder::new(TokioExecutor::new())
        .handshake(TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(driver);
    sender
}

#[derive(Debug)]
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    text: String,
    trailers: HeaderMap,
}

/// What came back, unless it broke off.
async fn call(sender: &Sender, request: Request<Full<Bytes>>) -> Result<Answer, hyper::Error> {
    let (head, body) = sender.clone().send_request(request).await?.into_parts();
    let body = body.collect().await?;
    let trailers = body.trailers().cloned().unwrap_or_default();
    Ok(Answer {
        status: head.status,
        headers: head.headers,
        text: String::from_utf8_lossy(&body.to_bytes()).into_owned(),
        trailers,
    })
}

fn post(address: &str) -> http::request::Builder {
    Request::post(address)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
}

fn message(request: http::request::Builder) -> Request<Full<Bytes>> {
    request.body(Full::from("a message")).unwrap()
}

#[test]
fn grpc_gets_its_credential_and_its_trailers() {
    scene(|scene| async move {
        let policy = json!({"allow": ["good.test"]});
        let moat = scene.attach(&policy, vec![bearer()]).await;
        let sender = speak(&scene, &moat, "good.test", GOOD).await;
        let request = post("https://good.test/trailers")
            .header("authorization", "Bearer mine")
            .header("grpc-accept-encoding", "gzip");
        let got = call(&sender, message(request)).await.unwrap();
        assert_eq!(got.text, "message");
        assert_eq!(got.trailers["grpc-status"], "0");
        let heard = &scene.heard()[0];
        assert_eq!(heard.line, "POST https://good.test/trailers");
        assert_eq!(heard.all("authorization"), [format!("Bearer {CANARY}")]);
        assert_eq!(heard.all("te"), ["trailers"]);
        // What is compressed can not be searched.
        assert_eq!(heard.all("grpc-accept-encoding"), ["identity"]);
        assert_eq!(heard.body, 9);
        assert!(moat.denials().is_empty());
    });
}

#[test]
fn requests_go_side_by_side() {
    scene(|scene| async move {
        let policy = json!({"allow": ["good.test"]});
        let moat = scene.attach(&policy, vec![bearer()]).await;
        let sender = speak(&scene, &moat, "good.test", GOOD).await;
        let meet = || message(post("https://good.test/").header("x-meet", "1"));
        let (one, other) = tokio::join!(call(&sender, meet()), call(&sender, meet()));
        assert_eq!(one.unwrap().text, "hello");
        assert_eq!(other.unwrap().text, "hello");
    });
}

#[test]
fn each_request_is_decided_on_its_own() {
    scene(|scene| async move {
        let policy = json!({"allow": [
            {"to": "good.test", "http": [{"path": "/mine/*"}]}, "other.test"
        ]});
        let moat = scene.attach(&policy, vec![]).await;
        let sender = speak(&scene, &moat, "good.test", GOOD).await;
        let ask = async |address: &str| {
            let request = Request::get(address).body(Full::default()).unwrap();
            call(&sender, request).await.unwrap()
        };
        assert_eq!(ask("https://good.test/mine/x").await.text, "hello");
        for address in [
            "https://good.test/yours",
            "https://other.test/mine/x",
            "https://good.test:8443/mine/x",
        ] {
            let got = ask(address).await;
            assert_eq!(got.status, StatusCode::FORBIDDEN, "{address}");
            assert!(got.text.contains("egress_denied"), "{got:?}");
        }
        // A Host header beside it does not make it another one.
        let two = Request::get("https://good.test/mine/x").header("host", "other.test");
        let got = call(&sender, two.body(Full::default()).unwrap()).await;
        assert_eq!(got.unwrap().status, StatusCode::FORBIDDEN);
        assert_eq!(ask("https://good.test/mine/y").await.text, "hello");
        assert_eq!(scene.heard().len(), 2);
    });
}

#[test]
fn grpc_is_refused_in_its_own_words() {
    scene(|scene| async move {
        let policy = json!({"allow": [{"to": "good.test", "http": [{"path": "/mine/*"}]}]});
        let moat = scene.attach(&policy, vec![]).await;
        let sender = speak(&scene, &moat, "good.test", GOOD).await;
        let request = message(post("https://good.test/other.Service/Call"));
        let got = call(&sender, request).await.unwrap();
        assert_eq!(got.status, StatusCode::OK);
        assert_eq!(got.headers["grpc-status"], "7");
        let words = got.headers["grpc-message"].to_str().unwrap();
        assert!(words.starts_with("good.test: "), "{words}");
        assert!(scene.heard().is_empty());
    });
}

#[test]
fn nothing_is_reflected_in_bodies_trailers_or_packed_messages() {
    scene(|scene| async move {
        let policy = json!({"allow": ["good.test"]});
        let moat = scene.attach(&policy, vec![bearer()]).await;
        let sender = speak(&scene, &moat, "good.test", GOOD).await;
        for path in ["echo", "echo/slowly", "echo/header", "echo/trailers"] {
            let request = message(post(&format!("https://good.test/{path}")));
            let got = call(&sender, request).await;
            assert!(!format!("{got:?}").contains(CANARY), "{path} {got:?}");
        }
        assert!(refused_because(&moat, "holds a secret"));
        let packed = message(post("https://good.test/packed/messages"));
        let got = call(&sender, packed).await.unwrap();
        assert_eq!(got.headers["grpc-status"], "14", "{got:?}");
        // The connection is good for the next one.
        let next = message(post("https://good.test/"));
        assert_eq!(call(&sender, next).await.unwrap().text, "hello");
    });
}

#[test]
fn a_host_that_speaks_only_http_1_is_spoken_to_in_it() {
    scene(|scene| async move {
        scene.world.zone.address("good.test", EVIL);
        let log = serve_speaking(&["http/1.1"], at(EVIL, 443), &scene.identity).await;
        let policy = json!({"allow": ["good.test"]});
        let moat = scene.attach(&policy, vec![bearer()]).await;
        let sender = speak(&scene, &moat, "good.test", EVIL).await;
        for at in 0..2 {
            let request = message(post(&format!("https://good.test/call/{at}")));
            assert_eq!(call(&sender, request).await.unwrap().text, "hello");
        }
        let heard = log.lock().unwrap().clone();
        assert_eq!(heard[1].line, "POST /call/1");
        assert_eq!(heard[1].all("host"), ["good.test"]);
        assert_eq!(heard[1].all("authorization"), [format!("Bearer {CANARY}")]);
    });
}

#[test]
fn a_change_of_policy_cuts_what_is_under_way() {
    scene(|scene| async move {
        let policy = json!({"allow": ["good.test"]});
        let moat = scene.attach(&policy, vec![bearer()]).await;
        let sender = speak(&scene, &moat, "good.test", GOOD).await;
        let waiting = tokio::spawn({
            let sender = sender.clone();
            let request = message(post("https://good.test/").header("x-never", "1"));
            async move { call(&sender, request).await }
        });
        until(|| !scene.heard().is_empty()).await;
        moat.set_policy(Policy::from_json(&json!({"allow": []})).unwrap());
        assert!(waiting.await.unwrap().is_err());
        let request = message(post("https://good.test/"));
        assert!(call(&sender, request).await.is_err());
    });
}
