use std::{
    io::{Read, Write},
    time::{Duration, Instant},
};

use sandkeep_moat::{Via, policy::Policy};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpListener};

use crate::world::{
    GOOD, OK, World, at, dial, get, in_impatient_world, in_world, in_world_with, refused_via,
    was_reset,
};

async fn source(size: usize) {
    let listener = TcpListener::bind(at(GOOD, 7000)).await.unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                drop(stream.write_all(&vec![7; size]).await);
            });
        }
    });
}

fn policy(limits: &Value) -> Policy {
    Policy::from_json(&json!({"allow": [GOOD, "good.test"], "limits": limits})).unwrap()
}

async fn fetch(world: &World) -> std::io::Result<usize> {
    world
        .in_box(|| {
            let mut all = Vec::new();
            let mut stream = dial(at(GOOD, 7000))?;
            stream.read_to_end(&mut all).map(|_| all.len())
        })
        .await
}

#[test]
fn rate_limit() {
    in_world(|world| async move {
        source(300_000).await;
        let moat = world
            .attach(policy(&json!({"bytes_per_second": 100_000})))
            .await;
        let start = Instant::now();
        assert_eq!(fetch(&world).await.unwrap(), 300_000);
        // One second's worth may come at once; the rest takes its time.
        assert!(start.elapsed() >= Duration::from_millis(1800));
        assert_eq!(moat.traffic().bytes_received, 300_000);
    });
}

#[test]
fn byte_limit() {
    in_world(|world| async move {
        source(300_000).await;
        let moat = world.attach(policy(&json!({"total_bytes": 100_000}))).await;
        assert!(was_reset(&fetch(&world).await));
        // Nothing more, not even a new connection, until there is another policy.
        assert!(fetch(&world).await.is_err());
        assert!(refused_via(&moat, Via::Tcp, "*"));
        moat.set_policy(policy(&json!({"total_bytes": 400_000})));
        assert_eq!(fetch(&world).await.unwrap(), 300_000);
    });
}

#[test]
fn concurrent_limit() {
    in_world(|world| async move {
        let _server = world.server(at(GOOD, 80), OK).await;
        let _moat = world
            .attach(policy(&json!({"concurrent_connections": 2})))
            .await;
        let outcome = world
            .in_box(|| {
                let ask = b"GET / HTTP/1.1\r\nHost: 203.0.113.10\r\n\r\n";
                let open = || {
                    let mut stream = dial(at(GOOD, 80))?;
                    stream.write_all(ask)?;
                    stream.read_exact(&mut [0; 20]).map(|()| stream)
                };
                let first = open();
                let second = open();
                let third = open();
                assert!(first.is_ok() && second.is_ok());
                drop(first);
                third.map(|_| ())
            })
            .await;
        assert!(was_reset(&outcome), "{outcome:?}");
    });
}

#[test]
fn new_connections_per_second() {
    in_world(|world| async move {
        let _server = world.server(at(GOOD, 80), OK).await;
        let moat = world
            .attach(policy(&json!({"new_connections_per_second": 1})))
            .await;
        // All of them at once: even a slow machine gets no second one allowed by waiting.
        let (answered, reset) = world
            .in_box(|| {
                let streams: Vec<_> = (0..200).map(|_| dial(at(GOOD, 80))).collect();
                let outcomes: Vec<_> = streams
                    .into_iter()
                    .map(|stream| {
                        let mut stream = stream?;
                        stream.write_all(get(GOOD).as_bytes())?;
                        stream.read_exact(&mut [0; 20])
                    })
                    .collect();
                let answered = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
                (answered, outcomes.iter().filter(|o| was_reset(o)).count())
            })
            .await;
        assert!(answered >= 1 && reset >= 1, "{answered} and {reset}");
        assert!(refused_via(&moat, Via::Tcp, GOOD));
    });
}

#[test]
fn slow_loris_client() {
    in_impatient_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let server = world.server(at(GOOD, 80), OK).await;
        let moat = world.allowing(&["good.test"]).await;
        // One that says nothing waits for the server, which may speak first: its address was given
        // for an allowed name, or it would not have begun.
        for start in ["G", "GET / HTTP/1.1\r\nHost: good.test\r\nX-"] {
            let outcome = world
                .in_box(move || {
                    let mut stream = dial(at(GOOD, 80)).unwrap();
                    stream
                        .set_read_timeout(Some(Duration::from_millis(50)))
                        .unwrap();
                    stream.write_all(start.as_bytes()).unwrap();
                    // Dripping must not keep it open: somebody else ends it.
                    loop {
                        match stream.read(&mut [0; 512]) {
                            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                            Ok(1..) => {}
                            Ok(0) | Err(_) => return true,
                        }
                        if stream.write_all(b"a").is_err() {
                            return true;
                        }
                    }
                })
                .await;
            assert!(outcome, "{start}");
        }
        assert!(server.lock().unwrap().is_empty());
        // The last one is counted off a moment after its client was told.
        while moat.traffic().open_connections > 0 {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn many_connections_at_once() {
    in_world_with(
        |config| config.most_connections = 1000,
        |world| async move {
            world.zone.address("good.test", GOOD);
            let _server = world.server(at(GOOD, 80), OK).await;
            let moat = world.allowing(&["good.test"]).await;
            let answered = world
                .in_box(|| {
                    let ask = b"GET / HTTP/1.1\r\nHost: good.test\r\n\r\n";
                    let mut streams: Vec<_> = (0..300)
                        .map(|_| {
                            let mut stream = dial(at(GOOD, 80)).unwrap();
                            stream.write_all(ask).unwrap();
                            stream
                        })
                        .collect();
                    streams
                        .iter_mut()
                        .filter_map(|stream| stream.read_exact(&mut [0; 20]).ok())
                        .count()
                })
                .await;
            assert_eq!(answered, 300);
            assert_eq!(moat.traffic().connections, 300);
        },
    );
}
