//! Requests that are almost right, sent through the real moat to real servers: what a server
//! serves must be what the policy let through.
//!
//! Each server takes down how it read what it served; nothing is derived from our own parsers. Two
//! boxes send: one that may ask one host anything and another, at the same address, only for what
//! is public; and one that knows names only. A third way goes through TLS.
//!
//! `SANDKEEP_HTTP_FUZZ_SECONDS` and `SANDKEEP_HTTP_FUZZ_SEED` say how long and from where; see
//! `fuzz/http-differential`.

// In a test a panic is the report, and how many were sent is what is asked for.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod attempts;
#[allow(dead_code)]
#[path = "../moat/origin.rs"]
mod origin;
mod readings;
mod servers;
#[allow(dead_code)]
#[path = "../moat/world.rs"]
mod world;

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use hickory_proto::rr::RecordType;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use rustls::{
    ClientConnection, ServerConfig,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer},
};
use sandkeep_moat::{
    AttachSpec, InterceptConfig, Patience, TlsInterceptor, Trust, policy::Policy as Rules,
};
use sandkeep_model::SandboxId;
use serde_json::json;
use tokio::{io::copy_bidirectional, net::TcpListener};

use attempts::{Attempt, Dice, Policy, attempt};
use readings::Saw;
use servers::{Served, Servers};
use world::{GOOD, LONG, World, another_box, ask, at, in_world_for};

/// Below this, the same in TLS.
const UNDER_TLS: u16 = 1000;
const SEED: u64 = 7;
/// So many of the last attempts at a server are kept, to find the one that did it.
const KEPT: usize = 500;

#[derive(Clone)]
enum Way {
    Plain(Policy),
    Tls(CertificateDer<'static>),
}

impl Way {
    const fn policy(&self) -> Policy {
        match self {
            Self::Plain(policy) => *policy,
            Self::Tls(_) => Policy::Narrowed,
        }
    }
}

/// Who sends, from where and how.
#[derive(Clone)]
struct Sender {
    namespace: Arc<OwnedFd>,
    way: Way,
}

type Sent = (Sender, Served, Attempt);

#[derive(Default)]
struct Field {
    over: AtomicBool,
    sent: AtomicU64,
    last: Mutex<BTreeMap<String, VecDeque<Sent>>>,
}

#[test]
fn servers_serve_nothing_the_policy_did_not_see() {
    let kit = PathBuf::from(std::env::var_os("SANDKEEP_TEST_HTTP_SERVERS").expect(
        "SANDKEEP_TEST_HTTP_SERVERS is not set: run this by `script/test rust` or `fuzz/http-differential`, which install the servers",
    ));
    let number = |name: &str, usual: u64| {
        let text = std::env::var(name).ok();
        text.map_or(usual, |text| text.parse().expect("a number"))
    };
    let time = Duration::from_secs(number("SANDKEEP_HTTP_FUZZ_SECONDS", 20));
    let seed = number("SANDKEEP_HTTP_FUZZ_SEED", SEED);
    let made = rcgen::generate_simple_self_signed(["b.test".to_owned()]).unwrap();
    let certificate = made.cert.der().clone();
    let key = made.signing_key.serialize_der();
    let interceptor = TlsInterceptor::new(InterceptConfig {
        trust: Trust::Only(vec![certificate.clone()]),
        secrets: Arc::new(origin::Vault::default()),
    });
    let change = move |config: &mut sandkeep_moat::MoatConfig| {
        config.interceptor = Some(Arc::new(interceptor.unwrap()));
        // So short that decisions run out of time, too.
        config.patience = Patience {
            name_within: Duration::from_millis(300),
            decide_within: Duration::from_millis(300),
            head_within: Duration::from_millis(500),
            inside_within: Duration::from_millis(500),
        };
    };
    in_world_for(time + 10 * LONG, change, move |world| async move {
        let servers = Servers::start(&kit).await;
        for served in &servers.list {
            under_tls(served.port, certificate.clone(), key.clone()).await;
        }
        run(world, servers, time, seed).await;
    });
}

async fn run(world: World, mut servers: Servers, time: Duration, seed: u64) {
    for name in ["a.test", "b.test", "o.test"] {
        world.zone.address(name, GOOD);
    }
    let narrowed = json!({"allow": ["a.test", {"to": "b.test", "http": [{"methods": ["GET"], "path": "/public/*"}]}]});
    let first = world.attach(Rules::from_json(&narrowed).unwrap()).await;
    let other = another_box();
    let attached = world.moat.attach(AttachSpec {
        id: SandboxId::random(),
        netns: other.try_clone().unwrap(),
        policy: Rules::allowing(["o.test"]).unwrap(),
        bindings: Vec::new(),
        from_point: None,
        copy_of: None,
    });
    let _second = attached.await.unwrap();
    let by_address = |policy, namespace: &Arc<OwnedFd>| Sender {
        namespace: Arc::clone(namespace),
        way: Way::Plain(policy),
    };
    let senders = [
        by_address(Policy::Narrowed, &world.namespace),
        by_address(Policy::ByName, &other),
        Sender {
            namespace: Arc::clone(&world.namespace),
            way: Way::Tls(origin::authority(&first)),
        },
    ];
    for (sender, name) in senders.iter().zip(["a.test.", "o.test."]) {
        let asked = within(&sender.namespace, move || {
            ask(at("10.0.0.1", 53), name, RecordType::A)
        });
        asked.await.unwrap();
    }
    every_server_is_heard(&servers).await;
    every_server_is_reached(&servers, &senders).await;

    let field = Arc::new(Field::default());
    // Most of the time they wait.
    let shares = [10, 10, 3];
    let workers: Vec<_> = shares
        .iter()
        .zip(&senders)
        .flat_map(|(share, sender)| std::iter::repeat_n(sender.clone(), *share))
        .enumerate()
        .map(|(number, sender)| {
            let (field, list) = (Arc::clone(&field), servers.list.clone());
            let dice = Dice::new(seed.wrapping_mul(1000) + u64::try_from(number).unwrap());
            thread::spawn(move || work(&field, &sender, &list, dice))
        })
        .collect();
    let began = Instant::now();
    let mut served: BTreeMap<String, u64> = BTreeMap::new();
    let mut findings = Vec::new();
    let mut told = Duration::ZERO;
    while began.elapsed() < time && findings.is_empty() {
        if began.elapsed() >= told {
            let sent = field.sent.load(Ordering::Relaxed);
            println!("{sent} requests in {} s", told.as_secs());
            told += 2 * LONG;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        findings.extend(forbidden(&servers, &mut served));
        servers.all_alive();
    }
    field.over.store(true, Ordering::Relaxed);
    tokio::task::spawn_blocking(move || workers.into_iter().for_each(|w| w.join().unwrap()))
        .await
        .unwrap();
    // Servers wait two seconds for the rest of what was begun.
    tokio::time::sleep(Duration::from_secs(3)).await;
    findings.extend(forbidden(&servers, &mut served));
    let sent = field.sent.load(Ordering::Relaxed);
    println!(
        "{sent} requests in {} s from seed {seed}; served: {served:?}",
        began.elapsed().as_secs()
    );
    if !findings.is_empty() {
        let blamed = blame(&servers, &field, &findings).await;
        panic!("served though the policy did not let it through: {findings:#?}\nby:\n{blamed}");
    }
    assert!(
        sent > 0 && served.values().sum::<u64>() > 0,
        "nothing was sent"
    );
}

/// What was served and must not have been; counts the rest.
fn forbidden(servers: &Servers, served: &mut BTreeMap<String, u64>) -> Vec<(&'static str, Saw)> {
    let news = servers.news();
    let mut bad = Vec::new();
    for saw in news.iter().filter_map(|line| Saw::parse(line)) {
        *served.entry(saw.server.clone()).or_default() += 1;
        if let Some(why) = saw.forbidden() {
            bad.push((why, saw));
        }
    }
    bad
}

/// Without the moat each server serves what must not be served, and that is noticed: the check can
/// fail.
async fn every_server_is_heard(servers: &Servers) {
    for served in &servers.list {
        let bytes = match served.http2_only {
            true => attempts::plain_http2("/private"),
            false => b"GET /private HTTP/1.1\r\nHost: b.test\r\nConnection: close\r\n\r\n".to_vec(),
        };
        let attempt = Attempt::whole([served.before, &bytes].concat());
        let port = served.port;
        tokio::task::spawn_blocking(move || send(&Way::Plain(Policy::ByName), port, &attempt))
            .await
            .unwrap();
        let until = Instant::now() + LONG;
        while !forbidden(servers, &mut BTreeMap::new())
            .iter()
            .any(|(_, saw)| saw.server == served.name && saw.host == "b.test")
        {
            assert!(Instant::now() < until, "{} is not heard", served.name);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// What is allowed arrives, so that the rest is refused for a reason.
async fn every_server_is_reached(servers: &Servers, senders: &[Sender]) {
    let usual = |served: &&Served| !served.http2_only && served.before.is_empty();
    for (sender, host) in senders.iter().zip(["b.test", "o.test", "b.test"]) {
        for served in servers.list.iter().filter(usual) {
            let text = format!(
                "GET /public/x HTTP/1.1\r\nHost: {host}:{}\r\nConnection: close\r\n\r\n",
                match sender.way {
                    Way::Plain(_) => served.port,
                    Way::Tls(_) => served.port + UNDER_TLS,
                }
            );
            let (way, port) = (sender.way.clone(), served.port);
            let attempt = Attempt::whole(text.into_bytes());
            let until = Instant::now() + LONG;
            loop {
                let (way, attempt) = (way.clone(), attempt.clone());
                within(&sender.namespace, move || send(&way, port, &attempt)).await;
                let mut served_now = BTreeMap::new();
                let bad = forbidden(servers, &mut served_now);
                assert!(bad.is_empty(), "{bad:?}");
                if served_now.contains_key(&served.name) {
                    break;
                }
                assert!(Instant::now() < until, "{} is not reached", served.name);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

fn work(field: &Field, sender: &Sender, list: &[Served], mut dice: Dice) {
    move_into_link_name_space(sender.namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
    while !field.over.load(Ordering::Relaxed) {
        let served = &list[dice.below(list.len())];
        let mut attempt = attempt(&mut dice, sender.way.policy(), served.http2_only);
        if dice.once_in(2) {
            attempt.bytes.splice(0..0, served.before.iter().copied());
        }
        {
            let mut last = field.last.lock().unwrap();
            let last = last.entry(served.name.clone()).or_default();
            last.push_back((sender.clone(), served.clone(), attempt.clone()));
            if last.len() > KEPT {
                last.pop_front();
            }
        }
        send(&sender.way, served.port, &attempt);
        field.sent.fetch_add(1, Ordering::Relaxed);
    }
}

/// Sends it again, one after the other, and shows those that do it.
async fn blame(servers: &Servers, field: &Field, findings: &[(&str, Saw)]) -> String {
    let last = std::mem::take(&mut *field.last.lock().unwrap());
    let mut found = String::new();
    for (name, sent) in last {
        if !findings.iter().any(|(_, saw)| saw.server == name) {
            continue;
        }
        for (sender, served, attempt) in sent.into_iter().rev() {
            let (way, again) = (sender.way.clone(), attempt.clone());
            within(&sender.namespace, move || send(&way, served.port, &again)).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
            for (why, saw) in forbidden(servers, &mut BTreeMap::new()) {
                let (way, bytes) = (sender.way.policy(), attempt.bytes.escape_ascii());
                let tls = matches!(sender.way, Way::Tls(_));
                found += &format!(
                    "{name} {way:?} TLS {tls}: {why}\n  {bytes}\n  pauses {:?}, half close {}\n  {saw:?}\n",
                    attempt.pauses, attempt.half_close
                );
            }
            if found.len() > 6000 {
                return found;
            }
        }
    }
    found
}

async fn within<T: Send + 'static>(
    namespace: &Arc<OwnedFd>,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let namespace = Arc::clone(namespace);
    let (done, wait) = tokio::sync::oneshot::channel();
    thread::spawn(move || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        drop(done.send(work()));
    });
    wait.await.unwrap()
}

impl Attempt {
    const fn whole(bytes: Vec<u8>) -> Self {
        Self {
            bytes,
            pauses: Vec::new(),
            half_close: false,
        }
    }
}

/// What comes of it is told by the servers.
fn send(way: &Way, port: u16, attempt: &Attempt) {
    let dial = |port| {
        let stream = TcpStream::connect_timeout(&at(GOOD, port), LONG)?;
        let slow = attempt.pauses.iter().any(|(_, pause)| *pause > 100);
        let patience = Duration::from_millis(if slow { 900 } else { 150 });
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        stream.set_nodelay(true)?;
        io::Result::Ok(stream)
    };
    // Refusals are resets, at any moment.
    drop(match way {
        Way::Plain(_) => dial(port).and_then(|mut stream| {
            let said = say(&mut stream, attempt);
            if attempt.half_close {
                drop(stream.shutdown(Shutdown::Write));
            }
            said.and_then(|()| listen(&mut stream))
        }),
        Way::Tls(trusted) => dial(port + UNDER_TLS).and_then(|stream| {
            let config = origin::client(&[], trusted);
            let session = ClientConnection::new(config, "b.test".try_into().unwrap()).unwrap();
            let mut stream = rustls::StreamOwned::new(session, stream);
            say(&mut stream, attempt)?;
            if attempt.half_close {
                stream.conn.send_close_notify();
                stream.flush()?;
            }
            listen(&mut stream)
        }),
    });
}

fn say(stream: &mut impl Write, attempt: &Attempt) -> io::Result<()> {
    let mut done = 0;
    for (cut, pause) in &attempt.pauses {
        let cut = (*cut).clamp(done, attempt.bytes.len());
        stream.write_all(&attempt.bytes[done..cut])?;
        stream.flush()?;
        done = cut;
        thread::sleep(Duration::from_millis(*pause));
    }
    stream.write_all(&attempt.bytes[done..])?;
    stream.flush()
}

fn listen(stream: &mut impl Read) -> io::Result<()> {
    let mut buffer = [0; 4096];
    while stream.read(&mut buffer)? > 0 {}
    Ok(())
}

/// The server at this port, also in TLS.
async fn under_tls(port: u16, certificate: CertificateDer<'static>, key: Vec<u8>) {
    let key = PrivateKeyDer::try_from(key).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind(at(GOOD, port + UNDER_TLS)).await.unwrap();
    tokio::spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                continue;
            };
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut inner) = acceptor.accept(stream).await else {
                    return;
                };
                if let Ok(mut outer) = tokio::net::TcpStream::connect(at(GOOD, port)).await {
                    // It ends as the two sides wish.
                    drop(copy_bidirectional(&mut inner, &mut outer).await);
                }
            });
        }
    });
}
