use std::{
    io::{Read, Write},
    net::Shutdown,
    sync::mpsc,
    time::Duration,
};

use sandkeep_moat::policy::Policy;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use crate::world::{EVIL, GOOD, at, dial, get, in_impatient_world, in_world, was_reset};

/// Greets, then gives back what it gets until the other side is done, and says goodbye.
async fn greeter(address: std::net::SocketAddr) {
    let listener = TcpListener::bind(address).await.unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                stream.write_all(b"220 hello\r\n").await.unwrap();
                let mut all = Vec::new();
                if stream.read_to_end(&mut all).await.is_ok() {
                    all.extend_from_slice(b" bye");
                    drop(stream.write_all(&all).await);
                }
            });
        }
    });
}

#[test]
fn ssh_like_server_speaks_first_by_name() {
    in_impatient_world(|world| async move {
        world.zone.address("good.test", GOOD);
        greeter(at(GOOD, 22)).await;
        greeter(at(EVIL, 22)).await;
        let policy = Policy::allowing(["good.test:22"]).unwrap();
        let moat = world.attach_only(policy).await;
        let greeting = |to| {
            move || {
                let mut stream = dial(at(to, 22))?;
                let mut greeting = [0; 11];
                stream.read_exact(&mut greeting).map(|()| greeting)
            }
        };
        // Not before the name was asked for: the address alone proves nothing.
        assert!(was_reset(&world.in_box(greeting(GOOD)).await));
        world.resolve("good.test.").await;
        assert_eq!(
            &world.in_box(greeting(GOOD)).await.unwrap(),
            b"220 hello\r\n"
        );
        assert!(was_reset(&world.in_box(greeting(EVIL)).await));
        let told = world.seen.connections.lock().unwrap().clone();
        assert_eq!(told[0].host.to_string(), "good.test");
        // The kernel tells of what it refused a moment later.
        while moat.denials().len() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
}

#[test]
fn by_network_and_port() {
    in_world(|world| async move {
        greeter(at(GOOD, 5432)).await;
        greeter(at(GOOD, 5433)).await;
        let _moat = world.allowing(&["203.0.113.0/26:5432"]).await;
        let try_port = |port| {
            move || {
                let mut stream = dial(at(GOOD, port))?;
                stream.write_all(b"\0\0\0\x08\x04\xd2\x16\x2f")?;
                stream.read(&mut [0; 1])
            }
        };
        assert_eq!(world.in_box(try_port(5432)).await.unwrap(), 1);
        assert!(was_reset(&world.in_box(try_port(5433)).await));
    });
}

#[test]
fn half_close() {
    in_world(|world| async move {
        greeter(at(GOOD, 7000)).await;
        let _moat = world.allowing(&[GOOD]).await;
        let all = world
            .in_box(|| {
                let mut stream = dial(at(GOOD, 7000)).unwrap();
                stream.write_all(b"data").unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
                let mut all = String::new();
                stream.read_to_string(&mut all).unwrap();
                all
            })
            .await;
        assert_eq!(all, "220 hello\r\ndata bye");
    });
}

#[test]
fn large_body() {
    const SIZE: usize = 8 << 20;
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let listener = TcpListener::bind(at(GOOD, 80)).await.unwrap();
        tokio::spawn(async move {
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\n\r\n");
            let piece: Vec<u8> = (0..1_u32 << 20).map(|at| (at % 251) as u8).collect();
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = [0; 1024];
                drop(stream.read(&mut request).await);
                drop(stream.write_all(head.as_bytes()).await);
                for _ in 0..SIZE >> 20 {
                    drop(stream.write_all(&piece).await);
                }
            }
        });
        // Once through the HTTP side and once as bytes.
        for rule in ["good.test", "203.0.113.10"] {
            let moat = world.allowing(&[rule]).await;
            let host = if rule == "good.test" { rule } else { GOOD };
            let (count, sum) = world
                .in_box(move || {
                    let mut stream = dial(at(GOOD, 80)).unwrap();
                    stream.write_all(get(host).as_bytes()).unwrap();
                    let mut all = Vec::new();
                    stream.read_to_end(&mut all).unwrap();
                    let body = all.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
                    let wrong = all[body..]
                        .iter()
                        .enumerate()
                        .filter(|(at, byte)| **byte != ((at % (1 << 20)) % 251) as u8)
                        .count();
                    (all.len() - body, wrong)
                })
                .await;
            assert_eq!((count, sum), (SIZE, 0), "{rule}");
            assert!(moat.traffic().bytes_received >= SIZE as u64);
        }
    });
}

#[test]
fn policy_change_cuts_flow() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        greeter(at(GOOD, 7000)).await;
        let moat = world.allowing(&["good.test", "203.0.113.66"]).await;
        world.resolve("good.test.").await;
        let (open, opened) = mpsc::channel();
        let end = world.in_box(move || {
            let mut stream = dial(at(GOOD, 7000)).unwrap();
            stream.read_exact(&mut [0; 11]).unwrap();
            open.send(()).unwrap();
            // Held until it is cut.
            stream.read(&mut [0; 1])
        });
        let change = async {
            tokio::task::spawn_blocking(move || opened.recv().unwrap())
                .await
                .unwrap();
            // Another policy that still bears it changes nothing.
            moat.set_policy(Policy::allowing(["*.test.example", "good.test:7000"]).unwrap());
            tokio::task::yield_now().await;
            assert_eq!(moat.traffic().open_connections, 1);
            moat.set_policy(Policy::allowing(["203.0.113.66"]).unwrap());
        };
        let (end, ()) = tokio::join!(end, change);
        assert!(was_reset(&end), "{end:?}");
    });
}

#[test]
fn hanging_up_ends_what_is_open_and_nothing_else() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        greeter(at(GOOD, 7000)).await;
        let moat = world.allowing(&["good.test"]).await;
        world.resolve("good.test.").await;
        // The second time shows that a new one can be made.
        for _ in 0..2 {
            let (open, opened) = mpsc::channel();
            let end = world.in_box(move || {
                let mut stream = dial(at(GOOD, 7000)).unwrap();
                stream.read_exact(&mut [0; 11]).unwrap();
                open.send(()).unwrap();
                // Held until it is cut.
                stream.read(&mut [0; 1])
            });
            let cut = async {
                tokio::task::spawn_blocking(move || opened.recv().unwrap())
                    .await
                    .unwrap();
                moat.hang_up();
            };
            let (end, ()) = tokio::join!(end, cut);
            assert!(was_reset(&end), "{end:?}");
        }
    });
}

#[test]
fn an_unfinished_line_is_no_way_round_the_host() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let heard = world.server(at(GOOD, 80), "HTTP/1.1 200 OK\r\n\r\n").await;
        let _moat = world.allowing(&["good.test"]).await;
        world.resolve("good.test.").await;
        let outcome = world
            .in_box(|| {
                let mut stream = dial(at(GOOD, 80)).unwrap();
                stream.write_all(b"GET / HT")?;
                // Longer than a server that speaks first is waited for.
                std::thread::sleep(Duration::from_millis(150));
                stream.write_all(b"TP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n")?;
                let mut answer = String::new();
                stream.read_to_string(&mut answer).map(|_| answer)
            })
            .await;
        crate::world::denied(&outcome.unwrap());
        assert!(heard.lock().unwrap().is_empty());
    });
}

#[test]
fn a_late_client_is_decided_by_what_it_says() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let heard = world.server(at(GOOD, 80), crate::world::OK).await;
        let _moat = world.allowing(&["good.test"]).await;
        world.resolve("good.test.").await;
        let late = |host: &'static str| {
            move || {
                let mut stream = dial(at(GOOD, 80)).unwrap();
                std::thread::sleep(Duration::from_millis(150));
                stream.write_all(get(host).as_bytes()).unwrap();
                let mut answer = String::new();
                stream.read_to_string(&mut answer).unwrap();
                answer
            }
        };
        crate::world::denied(&world.in_box(late("evil.test")).await);
        assert!(world.in_box(late("good.test")).await.ends_with("hello"));
        assert!(!heard.lock().unwrap().concat().contains("evil"));
    });
}
