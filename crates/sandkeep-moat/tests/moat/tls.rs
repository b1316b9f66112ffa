use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer},
};
use sandkeep_moat::{Via, policy::Policy};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::world::{
    EVIL, GOOD, GOOD_V6, at, dial, in_impatient_world, in_world, refused_via, was_reset,
};

/// A TLS server for these names, the certificate to trust it by, and how often it was dialled.
struct Origin {
    certificate: CertificateDer<'static>,
    dialled: Arc<AtomicUsize>,
}

async fn origin(address: SocketAddr, names: &[&str]) -> Origin {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let made = rcgen::generate_simple_self_signed(names).unwrap();
    let certificate = made.cert.der().clone();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    let dialled = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&dialled);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::Relaxed);
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                if let Ok(mut stream) = acceptor.accept(stream).await {
                    let mut word = [0; 4];
                    if stream.read_exact(&mut word).await.is_ok() {
                        stream.write_all(&word).await.unwrap();
                        stream.shutdown().await.unwrap();
                    }
                }
            });
        }
    });
    Origin {
        certificate,
        dialled,
    }
}

fn client(server: &'static str, trusted: &CertificateDer<'static>) -> ClientConnection {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    ClientConnection::new(Arc::new(config), server.try_into().unwrap()).unwrap()
}

fn echo(mut session: ClientConnection, mut stream: TcpStream) -> io::Result<Vec<u8>> {
    let mut tls = rustls::Stream::new(&mut session, &mut stream);
    tls.write_all(b"ping")?;
    let mut answer = vec![0; 4];
    tls.read_exact(&mut answer)?;
    Ok(answer)
}

/// The first bytes of a session to this server.
fn first_bytes(server: &'static str, trusted: &CertificateDer<'static>) -> Vec<u8> {
    let mut bytes = Vec::new();
    client(server, trusted).write_tls(&mut bytes).unwrap();
    bytes
}

/// Adds an extension of this kind at the end of a ClientHello.
fn with_extension(mut hello: Vec<u8>, kind: [u8; 2]) -> Vec<u8> {
    // What an outer encrypted ClientHello looks like; other kinds may hold anything.
    hello.extend_from_slice(&[kind[0], kind[1], 0, 12, 0, 0, 1, 0, 1, 7, 0, 1, 9, 0, 1, 9]);
    let session = usize::from(hello[43]);
    let suites = 44 + session;
    let compression =
        suites + 2 + usize::from(u16::from_be_bytes([hello[suites], hello[suites + 1]]));
    let extensions = compression + 1 + usize::from(hello[compression]);
    for place in [3, 7, extensions] {
        let longer = u16::from_be_bytes([hello[place], hello[place + 1]]) + 16;
        hello[place..place + 2].copy_from_slice(&longer.to_be_bytes());
    }
    hello
}

#[test]
fn an_allowed_name_is_passed_on_untouched() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = origin(at(GOOD, 443), &["good.test"]).await;
        let moat = world.allowing(&["good.test:443"]).await;
        world.resolve("good.test.").await;
        // The certificate that is trusted is the origin's own: nobody sat in between.
        let answer = world
            .in_box(move || echo(client("good.test", &good.certificate), dial(at(GOOD, 443))?))
            .await;
        assert_eq!(answer.unwrap(), b"ping");
        assert!(moat.denials().is_empty());
        assert_eq!(moat.traffic().connections, 1);
    });
}

#[test]
fn sni_evil_to_allowed_ip() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        world.zone.address("evil.test", GOOD);
        let good = origin(at(GOOD, 443), &["good.test", "evil.test"]).await;
        let moat = world.allowing(&["good.test"]).await;
        world.resolve("good.test.").await;
        let answer = world
            .in_box(move || echo(client("evil.test", &good.certificate), dial(at(GOOD, 443))?))
            .await;
        assert!(was_reset(&answer), "{answer:?}");
        assert_eq!(good.dialled.load(Ordering::Relaxed), 0);
        assert!(refused_via(&moat, Via::Tls, "evil.test"));
        assert!(
            !world
                .zone
                .asked
                .lock()
                .unwrap()
                .contains(&"evil.test".to_owned())
        );
    });
}

#[test]
fn sni_spoof_to_own_ip_dials_the_name() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = origin(at(GOOD, 443), &["good.test"]).await;
        let evil = origin(at(EVIL, 443), &["good.test"]).await;
        // Another name opens the other address.
        world.zone.address("mirror.test", EVIL);
        let _moat = world.allowing(&["good.test", "mirror.test"]).await;
        let answer = world
            .in_box(move || echo(client("good.test", &good.certificate), dial(at(EVIL, 443))?))
            .await;
        assert_eq!(answer.unwrap(), b"ping");
        assert_eq!(evil.dialled.load(Ordering::Relaxed), 0);
        assert_eq!(good.dialled.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn no_sni() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = origin(at(GOOD, 443), &["good.test", GOOD]).await;
        let moat = world.allowing(&["good.test"]).await;
        world.resolve("good.test.").await;
        let trusted = good.certificate.clone();
        let answer = world
            .in_box(move || echo(client(GOOD, &trusted), dial(at(GOOD, 443))?))
            .await;
        assert!(was_reset(&answer), "{answer:?}");
        assert_eq!(good.dialled.load(Ordering::Relaxed), 0);
        assert!(refused_via(&moat, Via::Tcp, GOOD));
        // With a rule for the address there is nothing left to know.
        moat.set_policy(Policy::allowing(["203.0.113.0/28"]).unwrap());
        let answer = world
            .in_box(move || echo(client(GOOD, &good.certificate), dial(at(GOOD, 443))?))
            .await;
        assert_eq!(answer.unwrap(), b"ping");
    });
}

#[test]
fn ech() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = origin(at(GOOD, 443), &["good.test"]).await;
        let moat = world.allowing(&["good.test"]).await;
        let hello = first_bytes("good.test", &good.certificate);
        let hidden = with_extension(hello.clone(), [0xfe, 0x0d]);
        assert!(was_reset(&world.talk(at(GOOD, 443), hidden.clone()).await));
        assert_eq!(good.dialled.load(Ordering::Relaxed), 0);
        assert!(moat.denials()[0].why.contains("ECH"));
        // Some other unknown extension does not matter, and neither does ECH where all is open.
        for (policy, bytes) in [
            (
                Policy::allowing(["good.test"]).unwrap(),
                with_extension(hello, [0xfe, 0x0e]),
            ),
            (Policy::open(), hidden),
        ] {
            moat.set_policy(policy);
            let answered = world
                .in_box(move || {
                    let mut stream = dial(at(GOOD, 443)).unwrap();
                    stream.write_all(&bytes).unwrap();
                    stream.read(&mut [0; 1]).unwrap()
                })
                .await;
            assert_eq!(answered, 1);
        }
    });
}

#[test]
fn client_hello_split_over_packets() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = origin(at(GOOD, 443), &["good.test"]).await;
        let moat = world.allowing(&["good.test"]).await;
        for (server, passes) in [("good.test", true), ("evil.test", false)] {
            let bytes = first_bytes(server, &good.certificate);
            // As one message in many records, and each record in two packets.
            let mut records = Vec::new();
            for piece in bytes[5..].chunks(40) {
                records
                    .push([&[0x16, 3, 1, 0, u8::try_from(piece.len()).unwrap()], piece].concat());
            }
            let outcome = world
                .in_box(move || -> io::Result<usize> {
                    let mut stream = dial(at(GOOD, 443))?;
                    stream.set_nodelay(true)?;
                    for record in records {
                        let (start, end) = record.split_at(3);
                        stream.write_all(start)?;
                        std::thread::sleep(Duration::from_millis(2));
                        stream.write_all(end)?;
                    }
                    stream.read(&mut [0; 1])
                })
                .await;
            if passes {
                assert_eq!(outcome.unwrap(), 1);
            } else {
                assert!(was_reset(&outcome), "{outcome:?}");
            }
        }
        assert!(refused_via(&moat, Via::Tls, "evil.test"));
    });
}

#[test]
fn half_a_client_hello_is_cut_off() {
    in_impatient_world(|world| async move {
        let good = origin(at(GOOD, 443), &["good.test"]).await;
        let _moat = world.allowing(&["good.test"]).await;
        let mut bytes = first_bytes("good.test", &good.certificate);
        bytes.truncate(60);
        assert!(was_reset(&world.talk(at(GOOD, 443), bytes).await));
        // And one that never ends: each byte promises more.
        let endless = [0x16, 3, 1, 0x40, 0].repeat(20_000);
        assert!(was_reset(&world.talk(at(GOOD, 443), endless).await));
    });
}

#[test]
fn rules_about_requests_need_to_see_them() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = origin(at(GOOD, 443), &["good.test"]).await;
        let policy = Policy::from_json(&json!({"allow": [
            {"to": "good.test", "http": [{"path": "/v1/*"}]}
        ]}));
        let moat = world.attach(policy.unwrap()).await;
        world.resolve("good.test.").await;
        let answer = world
            .in_box(move || echo(client("good.test", &good.certificate), dial(at(GOOD, 443))?))
            .await;
        assert!(was_reset(&answer), "{answer:?}");
        assert!(refused_via(&moat, Via::Tls, "good.test"));
        assert_eq!(good.dialled.load(Ordering::Relaxed), 0);
    });
}

#[test]
fn ipv6() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD_V6);
        let good = origin(at(GOOD_V6, 443), &["good.test", "evil.test"]).await;
        let moat = world.allowing(&["good.test"]).await;
        let trusted = good.certificate.clone();
        let answer = world
            .in_box(move || echo(client("good.test", &trusted), dial(at(GOOD_V6, 443))?))
            .await;
        assert_eq!(answer.unwrap(), b"ping");
        let answer = world
            .in_box(move || {
                echo(
                    client("evil.test", &good.certificate),
                    dial(at(GOOD_V6, 443))?,
                )
            })
            .await;
        assert!(was_reset(&answer), "{answer:?}");
        assert_eq!(good.dialled.load(Ordering::Relaxed), 1);
        assert!(refused_via(&moat, Via::Tls, "evil.test"));
    });
}

#[test]
fn narrowed_requests_are_not_widened_by_hiding_the_name() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = origin(at(GOOD, 443), &["good.test", GOOD]).await;
        let policy = Policy::from_json(&json!({"default": "open", "allow": [
            {"to": "good.test", "ports": [443], "http": [{"path": "/v1/*"}]}
        ]}));
        let _moat = world.attach(policy.unwrap()).await;
        for server in ["good.test", GOOD] {
            let trusted = good.certificate.clone();
            let answer = world
                .in_box(move || echo(client(server, &trusted), dial(at(GOOD, 443))?))
                .await;
            assert!(was_reset(&answer), "{server} {answer:?}");
        }
        assert_eq!(good.dialled.load(Ordering::Relaxed), 0);
    });
}
