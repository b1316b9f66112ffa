//! The search for secrets tells nothing about them: programs in the box that guess, at a site that
//! gives back the bytes they choose.

use std::io::{Read, Write};

use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use sandkeep_moat::BoxMoat;
use serde_json::json;

use crate::{
    http2::speak,
    origin::{
        CANARY, NEXT_PIECE, Scene, Tls, authority, bearer, connect, frame, refused_because,
        request, scene, told, until,
    },
    world::GOOD,
};

const SECRETS: [&str; 2] = [
    "ghp_9fK2mXq7Lw0ZtRb4",
    "wJalrXUtn-FEMI/K7MDENG_bPx+RfiCYEX=",
];
/// What the box takes for possible at each place, besides the right byte.
const WRONG: &[u8] = b"!^#~";

async fn bound(scene: &Scene, secret: &str) -> BoxMoat {
    let value = secret.to_owned();
    scene
        .vault
        .values
        .lock()
        .unwrap()
        .insert("key".to_owned(), value);
    let policy = json!({"allow": ["good.test"]});
    scene.attach(&policy, vec![bearer()]).await
}

/// Whether the secret begins with this, as far as the box can find out.
trait Guess {
    type Seen: PartialEq + std::fmt::Debug;
    async fn seen(&mut self, guess: &[u8]) -> Self::Seen;
}

/// What of the secret can be told from what it sees of right and wrong guesses. It begins with
/// `known`, and gets each byte right as long as its right guesses look unlike the wrong ones, each
/// time of so many: a machine that is busy makes things look different once. The last byte is left
/// out; whoever has the whole secret is cut off, which is what the search is for.
async fn recovered<G: Guess>(attacker: &mut G, secret: &str, known: usize, times: usize) -> String {
    let mut found = secret.as_bytes()[..known].to_vec();
    'bytes: for right in &secret.as_bytes()[known..before_the_last(secret)] {
        for _ in 0..times {
            let mut seen = Vec::new();
            for byte in WRONG.iter().chain([right]) {
                let mut guess = found.clone();
                guess.push(*byte);
                seen.push(attacker.seen(&guess).await);
            }
            let (of_right, of_wrong) = seen.split_last().unwrap();
            if of_wrong.contains(of_right) {
                break 'bytes;
            }
        }
        found.push(*right);
    }
    String::from_utf8(found).unwrap()
}

/// Padding says nothing, so the byte before it is the last one.
fn before_the_last(secret: &str) -> usize {
    secret.trim_end_matches('=').len() - 1
}

fn post(path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = format!("{headers}Content-Length: {}\r\n", body.len());
    let mut whole = request(&format!("POST {path}"), "good.test", &length).into_bytes();
    whole.extend_from_slice(body);
    whole
}

/// The guess at the end of a piece, with another piece to follow.
fn pieces(guess: &[u8]) -> Vec<u8> {
    let filler = b"here is what you sent: ";
    [filler, guess, &[NEXT_PIECE], b"and that was all of it"].concat()
}

/// The sizes of the chunks of an answer.
fn chunks(answer: &str) -> Vec<usize> {
    let (_, mut rest) = answer.split_once("\r\n\r\n").unwrap();
    let mut sizes = Vec::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        sizes.push(size);
        rest = &after[size..];
        rest = rest.strip_prefix("\r\n").unwrap();
    }
    sizes
}

struct Chunks<'a>(&'a Scene, &'a BoxMoat);

impl Guess for Chunks<'_> {
    type Seen = Vec<usize>;

    async fn seen(&mut self, guess: &[u8]) -> Vec<usize> {
        let asked = post("/say", "", &pieces(guess));
        chunks(&self.0.ask(self.1, "good.test", asked).await.whole())
    }
}

#[test]
fn chunk_sizes_do_not_tell_how_much_of_a_guess_is_right() {
    scene(|scene| async move {
        for secret in SECRETS {
            let moat = bound(&scene, secret).await;
            let found = recovered(&mut Chunks(&scene, &moat), secret, 0, 3).await;
            assert_eq!(found, "", "recovered from the sizes of chunks");
            // Also not where all but the last byte is known.
            for known in 1..before_the_last(secret) {
                let found = recovered(&mut Chunks(&scene, &moat), secret, known, 3).await;
                assert_eq!(found, secret[..known], "recovered from the sizes of chunks");
            }
        }
    });
}

struct DataFrames(hyper::client::conn::http2::SendRequest<Full<Bytes>>);

impl Guess for DataFrames {
    type Seen = Vec<usize>;

    async fn seen(&mut self, guess: &[u8]) -> Vec<usize> {
        let asked = http::Request::post("https://good.test/say")
            .body(Full::from(pieces(guess)))
            .unwrap();
        let mut body = self.0.send_request(asked).await.unwrap().into_body();
        let mut sizes = Vec::new();
        while let Some(frame) = body.frame().await {
            sizes.extend(frame.unwrap().data_ref().map(Bytes::len));
        }
        sizes
    }
}

#[test]
fn data_frames_of_http2_do_not_tell_either() {
    scene(|scene| async move {
        let secret = SECRETS[0];
        let moat = bound(&scene, secret).await;
        let mut attacker = DataFrames(speak(&scene, &moat, "good.test", GOOD).await);
        for known in 0..secret.len() - 1 {
            let found = recovered(&mut attacker, secret, known, 3).await;
            assert_eq!(found, secret[..known], "recovered from the sizes of frames");
        }
    });
}

/// What arrives of a stream while the site says nothing more.
#[derive(Debug, PartialEq)]
enum Arrived {
    All,
    Held,
    Cut,
    Refused,
}

struct Paused<'a> {
    scene: &'a Scene,
    moat: &'a BoxMoat,
    asked: usize,
}

impl Paused<'_> {
    async fn event(&mut self, event: Vec<u8>) -> Arrived {
        self.asked += 1;
        let trusted = authority(self.moat);
        let name = format!("x-go: {}-{}\r\n", std::process::id(), self.asked);
        let asked = post(
            "/say/paused",
            &name,
            &[&event, &[NEXT_PIECE][..], b"end"].concat(),
        );
        let (arrived, tls) = self
            .scene
            .world
            .in_box(move || {
                let mut tls = connect("good.test", &trusted);
                tls.write_all(&asked).unwrap();
                let mut got = Vec::new();
                let arrived = loop {
                    let mut some = [0; 4096];
                    match tls.read(&mut some) {
                        Ok(0) => break Arrived::Cut,
                        Ok(count) => got.extend_from_slice(&some[..count]),
                        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                            break Arrived::Held;
                        }
                        Err(_) => break Arrived::Cut,
                    }
                    let text = String::from_utf8_lossy(&got);
                    if text.contains("credential_suspended") {
                        break Arrived::Refused;
                    }
                    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
                    // The framing of chunks is not counted.
                    let shown: String = body.split("\r\n").skip(1).step_by(2).collect();
                    if shown.as_bytes() == event {
                        break Arrived::All;
                    }
                };
                (arrived, tls)
            })
            .await;
        drop(tls);
        arrived
    }
}

impl Guess for Paused<'_> {
    type Seen = Arrived;

    async fn seen(&mut self, guess: &[u8]) -> Arrived {
        self.event([b"data: ", guess].concat()).await
    }
}

#[test]
fn a_stream_that_pauses_tells_next_to_nothing_and_only_a_few_times() {
    scene(|scene| async move {
        let secret = SECRETS[0];
        let moat = bound(&scene, secret).await;
        let (scene, moat) = (&scene, &moat);
        let mut attacker = Paused {
            scene,
            moat,
            asked: 0,
        };
        // Events flow, and short guesses all look the same.
        let event = b"data: {\"n\": 1}\n\n".to_vec();
        assert_eq!(attacker.event(event).await, Arrived::All);
        for known in 0..5 {
            let found = recovered(&mut attacker, secret, known, 1).await;
            assert_eq!(found, secret[..known], "recovered from a pause");
        }
        // Who knows the beginning ("ghp_9") learns a byte with each near-miss, and has three.
        let found = recovered(&mut attacker, secret, 5, 1).await;
        assert!(found.len() <= 8, "recovered from pauses: {found}");
        assert!(refused_because(moat, "near-miss 3 of 3"));
        let again = attacker.event(b"data: 1\n\n".to_vec()).await;
        assert_eq!(again, Arrived::Refused);
        // Whoever set it decides what then.
        moat.set_bindings(vec![bearer()]);
        let again = attacker.event(b"data: 1\n\n".to_vec()).await;
        assert_eq!(again, Arrived::All);
    });
}

fn switch(tls: &mut Tls, path: &str) -> String {
    let ask = format!(
        "GET {path} HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    );
    tls.write_all(ask.as_bytes()).unwrap();
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        tls.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    String::from_utf8(head).unwrap()
}

/// What comes back of these bytes of a WebSocket server, until all is there or the end.
async fn through_websocket(scene: &Scene, moat: &BoxMoat, said: Vec<u8>) -> Arrived {
    let trusted = authority(moat);
    scene
        .world
        .in_box(move || {
            let mut tls = connect("good.test", &trusted);
            if switch(&mut tls, "/ws").starts_with("HTTP/1.1 502") {
                return Arrived::Refused;
            }
            tls.write_all(&told(&said)).unwrap();
            let mut got = vec![0; said.len()];
            match tls.read_exact(&mut got) {
                Ok(()) => {
                    assert_eq!(got, said);
                    Arrived::All
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Arrived::Held,
                Err(_) => Arrived::Cut,
            }
        })
        .await
}

struct Messages<'a>(&'a Scene, &'a BoxMoat);

impl Guess for Messages<'_> {
    type Seen = Arrived;

    async fn seen(&mut self, guess: &[u8]) -> Arrived {
        through_websocket(self.0, self.1, frame(0x81, guess)).await
    }
}

#[test]
fn websockets_do_not_tell_either() {
    scene(|scene| async move {
        let secret = SECRETS[0];
        let moat = bound(&scene, secret).await;
        let mut attacker = Messages(&scene, &moat);
        for known in 0..5 {
            let found = recovered(&mut attacker, secret, known, 1).await;
            assert_eq!(found, secret[..known], "recovered from a WebSocket");
        }
        let found = recovered(&mut attacker, secret, 5, 1).await;
        assert!(found.len() <= 8, "recovered from a WebSocket: {found}");
    });
}

#[test]
fn a_secret_does_not_hide_in_the_frames_of_a_websocket() {
    scene(|scene| async move {
        let secret = SECRETS[0];
        let moat = bound(&scene, secret).await;
        let letters = secret.bytes().enumerate().map(|(at, letter)| {
            let first = if at == 0 { 0x01 } else { 0x00 };
            // A ping between any two of them.
            [frame(first, &[letter]), frame(0x89, b"?")].concat()
        });
        let text = [b"<", secret.as_bytes(), b">"].concat();
        let mut masked = frame(0x81, &[]);
        masked[1] = 0x80 | 4;
        masked.extend_from_slice(&[1, 2, 3, 4, b'p' ^ 1, b'i' ^ 2, b'n' ^ 3, b'g' ^ 4]);
        let long_way = [&[0x81, 126, 0, 4], &b"ping"[..]].concat();
        for (what, said) in [
            ("whole", frame(0x81, &text)),
            ("letters", letters.collect::<Vec<_>>().concat()),
            ("packed", frame(0xc1, b"ping")),
            ("masked", masked),
            ("a longer length than needed", long_way),
            ("unknown", frame(0x83, b"ping")),
        ] {
            assert_eq!(
                through_websocket(&scene, &moat, said).await,
                Arrived::Cut,
                "{what}"
            );
        }
        let fine = [frame(0x01, b"pi"), frame(0x89, b"?"), frame(0x80, b"ng")].concat();
        let fine = [fine, frame(0x82, &[7; 3000])].concat();
        assert_eq!(through_websocket(&scene, &moat, fine).await, Arrived::All);
        until(|| refused_because(&moat, "holds a secret")).await;
        until(|| refused_because(&moat, "WebSocket")).await;
        // A server that packs though that was not asked for.
        let trusted = authority(&moat);
        let head = scene
            .world
            .in_box(move || switch(&mut connect("good.test", &trusted), "/ws?packed"));
        assert!(head.await.starts_with("HTTP/1.1 502"));
    });
}

fn percent(text: &str, kept: &str) -> String {
    text.chars()
        .map(|c| match c {
            'A'..='Z' | 'a'..='z' | '0'..='9' => c.to_string(),
            c if kept.contains(c) => c.to_string(),
            c => format!("%{:02X}", u32::from(c)),
        })
        .collect()
}

fn each(text: &str, shown: impl Fn(u32) -> String) -> String {
    text.chars().map(|c| shown(u32::from(c))).collect()
}

/// The table of attacks-found.md, and what is like it.
fn shown(secret: &str) -> Vec<(&'static str, Vec<u8>)> {
    let header = format!("Bearer {secret}");
    let object = json!({"headers": {"Authorization": header}}).to_string();
    let base64 = |text: &str| STANDARD.encode(text);
    let lines = |text: &str, end: &str| {
        let encoded = base64(text);
        let lines: Vec<_> = encoded.as_bytes().chunks(8).collect();
        lines.join(end.as_bytes())
    };
    let hex = each(secret, |c| format!("{c:02x}"));
    let pairs: Vec<_> = hex.as_bytes().chunks(2).collect();
    let wide =
        |turn: fn(u16) -> [u8; 2]| -> Vec<u8> { header.encode_utf16().flat_map(turn).collect() };
    let go = secret.replace('+', "&#43;").replace('=', "&#61;");
    let php = object.replace('/', "\\/");
    let text = |text: String| text.into_bytes();
    vec![
        ("plain", text(header.clone())),
        ("upper case", text(header.to_uppercase())),
        ("base64 of the header", text(base64(&header))),
        ("base64 of JSON", text(base64(&object))),
        (
            "base64, shifted by one",
            text(base64(&format!("x{secret}"))),
        ),
        ("base64 for URLs", text(URL_SAFE_NO_PAD.encode(&header))),
        ("base64 for Basic", text(base64(&format!("git:{secret}")))),
        (
            "base64 in lines",
            text(String::from_utf8(lines(&header, "\r\n")).unwrap()),
        ),
        ("base64 in lines in JSON", lines(&header, "\\n")),
        (
            "base64 in PHP JSON",
            text(base64(&header).replace('/', "\\/")),
        ),
        ("base64 in a query", text(percent(&base64(&header), ""))),
        ("base64 of base64", text(base64(&base64(&header)))),
        (
            "base64 for URLs of base64",
            text(URL_SAFE_NO_PAD.encode(base64(&header))),
        ),
        (
            "base64 of UTF-16 LE",
            text(STANDARD.encode(wide(u16::to_le_bytes))),
        ),
        (
            "base64 of UTF-16 BE",
            text(STANDARD.encode(wide(u16::to_be_bytes))),
        ),
        ("base64 of hex", text(base64(&hex))),
        ("hex of hex", text(each(&hex, |c| format!("{c:02x}")))),
        (
            "hex of base64",
            text(each(&base64(&header), |c| format!("{c:02x}"))),
        ),
        (
            "hex of UTF-16",
            wide(u16::to_le_bytes)
                .iter()
                .flat_map(|byte| format!("{byte:02x}").into_bytes())
                .collect(),
        ),
        ("hex", text(hex.clone())),
        ("HEX", text(hex.to_uppercase())),
        ("hex with colons", pairs.join(&b":"[..])),
        ("UTF-16 LE", wide(u16::to_le_bytes)),
        ("UTF-16 BE", wide(u16::to_be_bytes)),
        ("Python quote", text(percent(&header, "_.-~/"))),
        ("Python quote, safe=''", text(percent(&header, "_.-~"))),
        ("percent, all", text(each(secret, |c| format!("%{c:02x}")))),
        (
            "percent, twice",
            text(each(secret, |c| format!("%25{c:02X}"))),
        ),
        ("PHP JSON", text(php)),
        ("JSON, all", text(each(secret, |c| format!("\\u{c:04x}")))),
        (
            "JSON in JSON",
            text(json!(object.replace('/', "\\/")).to_string()),
        ),
        ("backslash x", text(each(secret, |c| format!("\\x{c:02X}")))),
        ("Go HTML", text(go)),
        ("entities", text(each(secret, |c| format!("&#{c};")))),
        (
            "entities without an end",
            text(each(secret, |c| format!("&#{c}"))),
        ),
        (
            "entities, hex",
            text(each(secret, |c| format!("&#x{c:X};"))),
        ),
        (
            "entities, zeros",
            text(each(secret, |c| format!("&#{c:04};"))),
        ),
        (
            "named entities",
            text(
                secret
                    .replace('+', "&plus;")
                    .replace('/', "&sol;")
                    .replace('=', "&equals;")
                    .replace('_', "&lowbar;"),
            ),
        ),
        (
            "entities in JSON",
            text(each(secret, |c| format!("\\u0026#{c};"))),
        ),
        (
            "quoted-printable",
            text(secret.replace('=', "=3D").replace('7', "=\r\n7")),
        ),
    ]
}

#[test]
fn a_reflected_secret_is_found_in_the_encodings_that_are_used() {
    scene(|scene| async move {
        let mut passed = Vec::new();
        for secret in SECRETS {
            let moat = bound(&scene, secret).await;
            for (what, text) in shown(secret) {
                let half = text.len() / 2;
                let (one, other) = text.split_at(half);
                let body = [b"-> ", one, &[NEXT_PIECE], other, b" <- that was it"].concat();
                let got = scene.ask(&moat, "good.test", post("/say", "", &body)).await;
                if got.error.is_none() && got.text.ends_with("0\r\n\r\n") {
                    passed.push((what, secret));
                }
            }
        }
        assert!(passed.is_empty(), "passed: {passed:#?}");
    });
}

#[test]
fn a_secret_in_a_header_is_found_encoded_and_in_two_halves() {
    scene(|scene| async move {
        for secret in SECRETS {
            let moat = bound(&scene, secret).await;
            let location = format!("https://x.test/?{}", percent(&STANDARD.encode(secret), ""));
            for (path, text) in [
                ("/say/header", secret.to_uppercase()),
                ("/say/header", location),
                ("/say/header", percent(secret, "_.-~")),
                ("/say/halves", secret.to_owned()),
            ] {
                let asked = post(path, "", text.as_bytes());
                let got = scene.ask(&moat, "good.test", asked).await.whole();
                assert!(got.contains("secret_reflected"), "{path} {text} {got}");
            }
        }
    });
}

#[test]
fn halves_are_not_asked_for_one_after_the_other() {
    scene(|scene| async move {
        let moat = bound(&scene, CANARY).await;
        let tricks = "Range: bytes=0-15\r\nIf-Range: \"x\"\r\nRequest-Range: bytes=0-15\r\nAccept-Charset: utf-7\r\nTE: gzip\r\nA-IM: vcdiff\r\nAccept-Encoding: br\r\n";
        let asked = request("GET /", "good.test", tricks);
        scene.ask(&moat, "good.test", asked).await.whole();
        let heard = scene.heard().pop().unwrap();
        for name in [
            "range",
            "if-range",
            "request-range",
            "accept-charset",
            "te",
            "a-im",
        ] {
            assert!(heard.all(name).is_empty(), "{name} {heard:?}");
        }
        assert_eq!(heard.all("accept-encoding"), ["identity"]);
        let asked = request("GET /part", "good.test", "");
        let got = scene.ask(&moat, "good.test", asked).await.whole();
        assert!(got.contains("unreadable_response"), "{got}");
        // Where nothing is bound, parts are as good as anything.
        moat.set_bindings(vec![]);
        moat.set_policy(
            sandkeep_moat::policy::Policy::from_json(
                &json!({"allow": [{"to": "good.test", "http": [{"path": "/*"}]}]}),
            )
            .unwrap(),
        );
        let asked = request("GET /part", "good.test", "Range: bytes=0-3\r\n");
        let got = scene.ask(&moat, "good.test", asked).await.whole();
        assert!(got.starts_with("HTTP/1.1 206"), "{got}");
        assert_eq!(scene.heard().pop().unwrap().all("range"), ["bytes=0-3"]);
    });
}
