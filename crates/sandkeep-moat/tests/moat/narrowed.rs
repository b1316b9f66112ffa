//! Requests that are not seen, towards a host of which only some requests are allowed.

use std::{
    io::{self, Read, Write},
    sync::{Arc, Mutex},
};

use sandkeep_moat::{BoxMoat, policy::Policy};
use serde_json::json;

use crate::world::{EVIL, GOOD, OK, World, at, dial, in_impatient_world, in_world, was_reset};

/// `a.test` may be asked anything, `b.test` only for what is public; both are one server.
const SHARED: &str = r#"{"allow": [
    {"to": "a.test", "ports": [80, 22]},
    {"to": "b.test", "ports": [80, 22], "http": [{"methods": ["GET"], "path": "/public/*"}]}
]}"#;

async fn shared(world: &World, port: u16) -> (Arc<Mutex<Vec<String>>>, BoxMoat) {
    world.zone.address("a.test", GOOD);
    world.zone.address("b.test", GOOD);
    let heard = world.server(at(GOOD, port), OK).await;
    let policy = Policy::from_json(&serde_json::from_str(SHARED).unwrap()).unwrap();
    let moat = world.attach(policy).await;
    // Only the open name is looked up: the box knows the address from it.
    world.resolve("a.test.").await;
    (heard, moat)
}

/// What was heard since the last time.
pub fn new_in(heard: &Mutex<Vec<String>>, known: &mut usize) -> String {
    let heard = heard.lock().unwrap();
    let fresh = heard[*known..].concat();
    *known = heard.len();
    fresh
}

/// Sends these bytes and says no more; what comes back until it is over.
pub async fn send(world: &World, port: u16, bytes: &[u8]) -> io::Result<String> {
    let bytes = bytes.to_vec();
    world
        .in_box(move || {
            let mut stream = dial(at(GOOD, port))?;
            stream.write_all(&bytes)?;
            // It may be reset by now, which reading tells.
            drop(stream.shutdown(std::net::Shutdown::Write));
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer)?;
            Ok(String::from_utf8_lossy(&answer).into_owned())
        })
        .await
}

fn line(bytes: &[u8]) -> Vec<u8> {
    [bytes, b"\r\nHost: b.test\r\nConnection: close\r\n\r\n"].concat()
}

/// Beginnings that some server reads as a request.
fn hidden_requests() -> Vec<Vec<u8>> {
    let mut list: Vec<Vec<u8>> = [
        // The findings themselves.
        &b"GET /private?\xc3\xa9 HTTP/1.1"[..],
        b"GET /private\x80 HTTP/1.1",
        b"G_T /private HTTP/1.1",
        // Their class.
        b"GET /private\x7f HTTP/1.1",
        b"GET /private\xff HTTP/1.1",
        b"GET /private\x01 HTTP/1.1",
        b"GET /private\0 HTTP/1.1",
        b"GET\t/private\tHTTP/1.1",
        b"GET\x0b/private\x0bHTTP/1.1",
        b"GET\x0c/private\x0cHTTP/1.1",
        b"GET\x1c/private\x1dHTTP/1.1",
        b"GET\xa0/private\xa0HTTP/1.1",
        b"GET\x85/private\x85HTTP/1.1",
        b"get /private HTTP/1.1",
        b"g3t /private HTTP/1.1",
        b"G.T /private HTTP/1.1",
        b"G!#$%&'*+.^_`|~T /private HTTP/1.1",
        b"<GET /private HTTP/1.1",
        b"G\xc9T /private HTTP/1.1",
        b"GET /private HTTP/0.9",
        b"GET /private HTTP/1.2",
        b"GET /private HTTP/01.1",
        b"GET /private HTTP/1.1 ",
        b"GET /private http/1.1",
        b"GET /private HTTQ/1.1",
        b"GET /private",
        b"GET  /private",
        b"G_T /private",
        b"GET http://b.test/private",
        b"GET http://b.test/private\x80 HTTP/1.1",
        b"GET \\private HTTP/1.1",
        b"OPTIONS * HTTP/1.1\x80",
        b"SSH-2.0-x /private HTTP/1.1",
        b"*1 /private HTTP/1.1",
        b"0024git-upload-pack /private HTTP/1.1",
        b"<stream:stream /private HTTP/1.1",
        b"PROXY TCP4 1.2.3.4 1.2.3.4 1 80\r\nGET /private HTTP/1.1",
        b"PRI * HTTP/2.0",
        // Found by the differential fuzzing: Apache takes any byte in a method if it is told to be
        // lenient, and gunicorn of Debian 12 takes NUL.
        b"\x80G)T /private HTTP/1.1",
        b"\x01GET /private HTTP/1.1",
        b"GET\0 /private\rHTTP/1.1",
        b"PROPFIND http:/private",
        b"\xef\xbb\xbf /private",
        b"get #x",
        b"get ?x",
        // A line feed alone is a blank to gunicorn.
        b"GEEET\n /private HTTP/1.1",
    ]
    .iter()
    .map(|first| line(first))
    .collect();
    let plain = line(b"GET /private HTTP/1.1");
    for before in [
        &b" "[..],
        b"\t",
        b"\r\n ",
        b"\n\t",
        b"\x0b",
        b"\r\n\x0c",
        b"\r\n\0",
        b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\x01\x01\x01\x01\x01\x01\x01\x01\0\x50\0\x50",
    ] {
        list.push([before, &plain].concat());
    }
    list.push([&b"GET "[..], &[b'/'; 3000], b"\x80", &plain].concat());
    list.push([&[b'G'; 3000][..], b"_", &plain].concat());
    // A server that takes the old form of hellos speaks TLS after it.
    list.push(b"\x80\x2e\x01\x03\x03\0\x15\0\0\0\x10".to_vec());
    list
}

#[test]
fn http_policy_by_one_byte() {
    in_world(|world| async move {
        let (heard, moat) = shared(&world, 80).await;
        let mut passed = Vec::new();
        for bytes in hidden_requests() {
            let before = heard.lock().unwrap().len();
            let refused = moat
                .denials()
                .iter()
                .map(|denial| denial.count)
                .sum::<u64>();
            let answer = send(&world, 80, &bytes).await;
            let now = moat
                .denials()
                .iter()
                .map(|denial| denial.count)
                .sum::<u64>();
            let silent = now == refused && !matches!(&answer, Ok(text) if text.contains(" 400 "));
            if heard.lock().unwrap().len() != before || silent {
                let first = &bytes[..bytes.len().min(70)];
                passed.push(format!("{}", first.escape_ascii()));
            }
        }
        assert!(passed.is_empty(), "passed unseen: {passed:#?}");
    });
}

#[test]
fn http_policy_by_one_byte_slowly() {
    in_world(|world| async move {
        let (heard, _moat) = shared(&world, 80).await;
        let mut known = 0;
        for bytes in hidden_requests() {
            // A long one says nothing new but takes long.
            let bytes: Vec<u8> = bytes.into_iter().take(60).collect();
            let shown = bytes.escape_ascii().to_string();
            let answer = world
                .in_box(move || {
                    let mut stream = dial(at(GOOD, 80))?;
                    for byte in bytes {
                        stream.write_all(&[byte])?;
                        std::thread::sleep(std::time::Duration::from_millis(2));
                    }
                    drop(stream.shutdown(std::net::Shutdown::Write));
                    let mut answer = String::new();
                    stream.read_to_string(&mut answer)?;
                    io::Result::Ok(answer)
                })
                .await;
            let arrived = new_in(&heard, &mut known);
            assert!(arrived.is_empty(), "{shown} arrived: {arrived} {answer:?}");
        }
    });
}

/// The name in no policy of the third request of the finding: nothing here is narrowed at all.
#[test]
fn a_host_in_no_policy_is_not_reached_by_one_byte() {
    in_world(|world| async move {
        world.zone.address("a.test", GOOD);
        let heard = world.server(at(GOOD, 80), OK).await;
        let _moat = world.allowing(&["a.test"]).await;
        world.resolve("a.test.").await;
        for first in ["GET /private\u{80} HTTP/1.1", "G_T / HTTP/1.1", "GET /x"] {
            let bytes = format!("{first}\r\nHost: nowhere.test\r\n\r\n");
            let answer = send(&world, 80, bytes.as_bytes()).await;
            let arrived = heard.lock().unwrap().concat();
            assert!(arrived.is_empty(), "{first:?} {arrived} {answer:?}");
        }
    });
}

#[test]
fn raw_to_an_address_shared_with_a_narrowed_name() {
    in_world(|world| async move {
        let (heard, moat) = shared(&world, 80).await;
        for bytes in [&b"\0\x01binary"[..], b"*1\r\n$4\r\nPING\r\n"] {
            let answer = world.talk(at(GOOD, 80), bytes).await;
            assert!(was_reset(&answer), "{answer:?}");
        }
        assert!(heard.lock().unwrap().is_empty());
        let denials = moat.denials();
        assert!(
            denials.iter().any(|d| d.why.contains("b.test")),
            "{denials:?}"
        );
        // Where nothing is shared such bytes go on.
        world.zone.address("a.test", EVIL);
        let elsewhere = world.server(at(EVIL, 80), "+PONG\r\n").await;
        moat.set_policy(Policy::allowing(["c.test"]).unwrap());
        world.zone.address("c.test", EVIL);
        world.resolve("c.test.").await;
        let answer = world
            .in_box(|| {
                let mut stream = dial(at(EVIL, 80))?;
                stream.write_all(b"*1\r\n$4\r\nPING\r\n")?;
                drop(stream.shutdown(std::net::Shutdown::Write));
                let mut answer = String::new();
                stream.read_to_string(&mut answer)?;
                io::Result::Ok(answer)
            })
            .await;
        assert_eq!(answer.unwrap(), "+PONG\r\n");
        assert_eq!(elsewhere.lock().unwrap().len(), 1);
    });
}

/// A gRPC server sends its settings before it is asked anything: what the client says then is
/// still looked at.
#[test]
fn a_server_that_greets_does_not_hide_requests() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    in_world(|world| async move {
        world.zone.address("a.test", GOOD);
        world.zone.address("b.test", EVIL);
        let heard = Arc::new(Mutex::new(Vec::new()));
        let listener = tokio::net::TcpListener::bind(at(GOOD, 22)).await.unwrap();
        let taken = Arc::clone(&heard);
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                stream.write_all(b"hello\r\n").await.unwrap();
                let mut buffer = [0; 4096];
                while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                    taken.lock().unwrap().extend_from_slice(&buffer[..count]);
                    if stream.write_all(b"bye\r\n").await.is_err() {
                        break;
                    }
                }
            }
        });
        let policy = Policy::from_json(&serde_json::from_str(SHARED).unwrap()).unwrap();
        let _moat = world.attach(policy).await;
        world.resolve("a.test.").await;
        let after_greeting = |bytes: &'static [u8]| {
            world.in_box(move || {
                let mut stream = dial(at(GOOD, 22))?;
                let mut greeting = [0; 7];
                stream.read_exact(&mut greeting)?;
                stream.write_all(bytes)?;
                drop(stream.shutdown(std::net::Shutdown::Write));
                let mut answer = String::new();
                stream.read_to_string(&mut answer)?;
                io::Result::Ok(answer)
            })
        };
        for bytes in [
            &b"GET /private HTTP/1.1\r\nHost: b.test\r\n\r\n"[..],
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /private\r\n",
            b"G_T /private\x80 HTTP/1.1\r\nHost: b.test\r\n\r\n",
        ] {
            let answer = after_greeting(bytes).await;
            assert!(was_reset(&answer), "{} {answer:?}", bytes.escape_ascii());
        }
        assert!(heard.lock().unwrap().is_empty());
        for bytes in [&b"SSH-2.0-client\r\n"[..], b"EHLO me\r\n", b"\0\0\0\x08"] {
            assert_eq!(after_greeting(bytes).await.unwrap(), "bye\r\n");
        }
    });
}

/// What does not speak HTTP is not taken for it.
#[test]
fn other_protocols_still_pass() {
    in_world(|world| async move {
        world.zone.address("a.test", GOOD);
        world.zone.address("b.test", EVIL);
        let heard = world.server(at(GOOD, 22), "!").await;
        let policy = Policy::from_json(&serde_json::from_str(SHARED).unwrap()).unwrap();
        let _moat = world.attach(policy).await;
        world.resolve("a.test.").await;
        for bytes in [
            &b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n"[..],
            // PostgreSQL, Redis, MongoDB, AMQP, LDAP, MQTT, Kafka, memcached, SMTP, telnet, X11.
            b"\0\0\0\x08\x04\xd2\x16\x2f",
            b"*1\r\n$4\r\nPING\r\n",
            b"\x3a\0\0\0\x01\0\0\0\0\0\0\0\xd4\x07\0\0",
            b"!\x01\0\0\x01\0\0\0\0\0\0\0\xd4\x07\0\0",
            b"AMQP\0\0\x09\x01",
            b"0\x1c\x02\x01\x01`\x17\x02\x01\x03\x04\x09cn=admin\x80\x05abcde",
            b"0\x84\0\0\0\x1c",
            b"\x10\x0c\0\x04MQTT\x04\x02\0\x3c\0\0",
            b"\0\0\0\x1d\0\x12\0\x03",
            b"stats\r\n",
            b"get key\r\n",
            b"EHLO me.test\r\n",
            b"\xff\xfd\x03\xff\xfb\x18",
            b"l\0\x0b\0\0\0\0\0\0\0\0\0",
            b"0032git-upload-pack /me/project.git\0host=git.test\0",
            b"<?xml version='1.0'?>",
            b"<stream:stream xmlns='jabber:client' to='a.test' xmlns:stream='http://etherx.jabber.org/streams'>",
            b"{\"id\": 1, \"method\": \"mining.subscribe\"}\n",
        ] {
            let answer = world
                .in_box(move || {
                    let mut stream = dial(at(GOOD, 22))?;
                    stream.write_all(bytes)?;
                    let mut answer = [0];
                    stream.read_exact(&mut answer)?;
                    io::Result::Ok(answer)
                })
                .await;
            assert!(answer.is_ok(), "{} {answer:?}", bytes.escape_ascii());
        }
        assert!(heard.lock().unwrap().len() > 15);
    });
}

/// A rule for the address does not undo what is said about a name at that address.
#[test]
fn a_rule_for_an_address_does_not_hide_requests_to_a_narrowed_name() {
    in_impatient_world(|world| async move {
        world.zone.address("b.test", GOOD);
        let heard = world.server(at(GOOD, 80), OK).await;
        let mut known = 0;
        let policy = Policy::from_json(&json!({"allow": [
            GOOD, {"to": "b.test", "http": [{"methods": ["GET"], "path": "/public/*"}]}
        ]}));
        let _moat = world.attach(policy.unwrap()).await;
        for bytes in hidden_requests() {
            let answer = send(&world, 80, &bytes).await;
            let arrived = new_in(&heard, &mut known);
            assert!(
                arrived.is_empty(),
                "{} {arrived:?} {answer:?}",
                bytes.escape_ascii()
            );
        }
        // Slower than anybody waits.
        let answer = world
            .in_box(|| {
                let mut stream = dial(at(GOOD, 80))?;
                stream.write_all(b"GET /priv")?;
                std::thread::sleep(std::time::Duration::from_millis(700));
                stream.write_all(b"ate HTTP/1.1\r\nHost: b.test\r\n\r\n")?;
                let mut answer = String::new();
                stream.read_to_string(&mut answer)?;
                io::Result::Ok(answer)
            })
            .await;
        assert!(heard.lock().unwrap().is_empty(), "{answer:?}");
        // What is no HTTP may go there: the rule says so.
        let answer = world
            .in_box(|| {
                let mut stream = dial(at(GOOD, 80))?;
                stream.write_all(b"\0\x01binary")?;
                let mut answer = [0; 5];
                stream.read_exact(&mut answer)?;
                io::Result::Ok(answer)
            })
            .await;
        assert_eq!(&answer.unwrap(), b"HTTP/");
    });
}
