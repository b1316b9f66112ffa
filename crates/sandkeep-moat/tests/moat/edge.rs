use std::{
    io::{self, ErrorKind, Read, Write},
    net::{TcpListener, UdpSocket},
    process::{Command, Stdio},
};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, ipproto, recv, sendto, socket};
use sandkeep_moat::{Via, policy::Policy};

use crate::world::{EVIL, GOOD, GOOD_V6, OK, at, dial, get, in_world, refused_via, was_reset};

fn send_udp(to: std::net::SocketAddr) -> io::Result<usize> {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    UdpSocket::bind(any)?.send_to(b"QUIC", to)
}

#[test]
fn quic_and_udp_refused_at_once() {
    in_world(|world| async move {
        let outside = tokio::net::UdpSocket::bind(at(GOOD, 443)).await.unwrap();
        let _moat = world.attach(Policy::open()).await;
        for to in [
            at(GOOD, 443),
            at(GOOD_V6, 443),
            at(GOOD, 123),
            at("8.8.8.8", 853),
            at("255.255.255.255", 9),
        ] {
            let sent = world.in_box(move || send_udp(to)).await;
            let kind = sent.unwrap_err().kind();
            assert!(
                matches!(
                    kind,
                    ErrorKind::PermissionDenied | ErrorKind::HostUnreachable
                ),
                "{to} {kind}"
            );
        }
        assert_eq!(
            outside.try_recv(&mut [0; 9]).unwrap_err().kind(),
            ErrorKind::WouldBlock
        );
    });
}

#[test]
fn icmp() {
    in_world(|world| async move {
        let _moat = world.attach(Policy::open()).await;
        let sent = world
            .in_box(|| {
                let ping =
                    socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::ICMP)).unwrap();
                let echo = [8, 0, 0xf7, 0xff, 0, 0, 0, 0];
                sendto(&ping, &echo, SendFlags::empty(), &at(GOOD, 0))?;
                recv(&ping, &mut [0; 128][..], RecvFlags::DONTWAIT).map(|_| ())
            })
            .await;
        assert_eq!(sent, Err(rustix::io::Errno::PERM));
    });
}

#[test]
fn metadata_addresses() {
    in_world(|world| async move {
        let moat = world
            .attach(
                Policy::from_json(&serde_json::json!({
                    "default": "open",
                    "allow": ["169.254.169.254", "100.100.100.200", "0.0.0.0/0", "::/0"]
                }))
                .unwrap(),
            )
            .await;
        world
            .zone
            .address("metadata.google.internal", "169.254.169.254");
        for address in [
            "169.254.169.254",
            "169.254.170.2",
            "100.100.100.200",
            "fd00:ec2::254",
        ] {
            let answer = world.talk(at(address, 80), get(address)).await;
            assert!(was_reset(&answer), "{address} {answer:?}");
        }
        assert!(world.resolve("metadata.google.internal.").await.is_empty());
        assert!(refused_via(&moat, Via::Dns, "metadata.google.internal"));
    });
}

#[test]
fn inner_networks_under_open() {
    in_world(|world| async move {
        let inner = world.server(at("192.168.7.1", 80), OK).await;
        let own = world.server(at("127.0.0.1", 80), OK).await;
        let moat = world.attach(Policy::open()).await;
        for address in [
            "192.168.7.1",
            "10.0.0.7",
            "172.16.0.1",
            "100.64.0.1",
            "fe80::1",
        ] {
            let answer = world.talk(at(address, 80), get("x.test")).await;
            assert!(answer.is_err(), "{address} {answer:?}");
        }
        // The kernel tells of it a moment later.
        while !refused_via(&moat, Via::Tcp, "192.168.7.1") {
            tokio::task::yield_now().await;
        }
        // The box's loopback is its own, not that of the server.
        let answer = world.talk(at("127.0.0.1", 80), get("localhost")).await;
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert!(inner.lock().unwrap().is_empty() && own.lock().unwrap().is_empty());
    });
}

#[test]
fn loopback_inside_box_untouched() {
    in_world(|world| async move {
        let moat = world.attach(Policy::air_gapped()).await;
        for address in ["127.0.0.1", "127.0.0.53", "::1", "10.0.0.2", "fd00:a::2"] {
            let heard = world
                .in_box(move || {
                    let listener = TcpListener::bind(at(address, 0)).unwrap();
                    let to = listener.local_addr().unwrap();
                    let client = std::thread::spawn(move || {
                        dial(to).unwrap().write_all(b"between us").unwrap();
                    });
                    let mut heard = String::new();
                    listener
                        .accept()
                        .unwrap()
                        .0
                        .read_to_string(&mut heard)
                        .unwrap();
                    client.join().unwrap();
                    // Datagrams too, also to port 53.
                    let server = UdpSocket::bind(at(address, 53)).unwrap();
                    let to = server.local_addr().unwrap();
                    let any = UdpSocket::bind(at(address, 0)).unwrap();
                    any.send_to(b"x", to).unwrap();
                    server.recv(&mut [0; 1]).unwrap();
                    heard
                })
                .await;
            assert_eq!(heard, "between us", "{address}");
        }
        assert_eq!(moat.traffic(), sandkeep_moat::Traffic::default());
    });
}

#[test]
fn our_listener_is_no_way_out() {
    in_world(|world| async move {
        let _moat = world.attach(Policy::open()).await;
        // Found by a scan of loopback: it has no destination and is reset.
        let outcome = world
            .in_box(|| {
                let mut stream = dial(at("127.0.0.1", 61_613))?;
                stream.write_all(get("x.test").as_bytes())?;
                stream.read(&mut [0; 1])
            })
            .await;
        assert!(was_reset(&outcome), "{outcome:?}");
    });
}

#[test]
fn root_in_box_cannot_change_rules() {
    in_world(|world| async move {
        let _moat = world.attach(Policy::air_gapped()).await;
        // Root of a user namespace of its own, in the host's network namespace: as in a box.
        let changed = world
            .in_box(|| {
                [
                    "nft flush ruleset",
                    "nft delete table inet sandkeep",
                    "ip link set lo down",
                    "ip addr del 10.0.0.2/32 dev lo",
                    "ip route flush table local",
                    "ip link add v0 type veth",
                ]
                .map(|line| {
                    let mut words = vec!["--user", "--map-root-user"];
                    words.extend(line.split(' '));
                    let status = Command::new("unshare")
                        .args(words)
                        .stderr(Stdio::null())
                        .status()
                        .unwrap();
                    (line, status.success())
                })
            })
            .await;
        assert!(changed.iter().all(|(_, success)| !success), "{changed:?}");
        assert!(world.in_box(|| send_udp(at(GOOD, 443))).await.is_err());
        assert!(was_reset(&world.talk(at(GOOD, 443), "x\r\n").await));
    });
}

#[test]
fn kill_of_moat_nothing_leaves() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = world.server(at(GOOD, 80), OK).await;
        let moat = world.allowing(&["good.test"]).await;
        assert!(world.talk(at(GOOD, 80), get("good.test")).await.is_ok());
        let held = world
            .in_box(|| {
                let mut stream = dial(at(GOOD, 80)).unwrap();
                stream
                    .write_all(b"GET / HTTP/1.1\r\nHost: good.test\r\n\r\n")
                    .unwrap();
                stream.read_exact(&mut [0; 20]).unwrap();
                stream
            })
            .await;
        let before = (
            good.lock().unwrap().concat(),
            world.zone.asked.lock().unwrap().len(),
        );
        // The kernel closes the sockets of a killed server just as this does.
        moat.detach().await;
        let ended = world
            .in_box(move || {
                let mut stream = held;
                let mut rest = Vec::new();
                let ended = stream.read_to_end(&mut rest).map(|_| ());
                // Whether this fails or not, it must not arrive.
                drop(stream.write_all(b"GET /late HTTP/1.1\r\nHost: good.test\r\n\r\n"));
                ended
            })
            .await;
        assert!(was_reset(&ended), "{ended:?}");
        for address in [GOOD, EVIL, "8.8.8.8", GOOD_V6] {
            let outcome = world.talk(at(address, 80), get("good.test")).await;
            assert_eq!(outcome.unwrap_err().kind(), ErrorKind::ConnectionRefused);
            assert!(
                world
                    .in_box(move || send_udp(at(address, 443)))
                    .await
                    .is_err()
            );
        }
        let after = (
            good.lock().unwrap().concat(),
            world.zone.asked.lock().unwrap().len(),
        );
        assert_eq!(before, after);
        // The server is back: the same namespace gets its moat again, with the policy of now.
        let moat = world.allowing(&["good.test"]).await;
        assert!(
            world
                .talk(at(GOOD, 80), get("good.test"))
                .await
                .unwrap()
                .ends_with("hello")
        );
        drop(moat);
    });
}

#[test]
fn a_port_held_by_the_box_does_not_stop_the_moat() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let good = world.server(at(GOOD, 80), OK).await;
        world.attach(Policy::air_gapped()).await.detach().await;
        let _squatter = world
            .in_box(|| TcpListener::bind("127.0.0.1:61613").unwrap())
            .await;
        let _moat = world.allowing(&["good.test"]).await;
        assert!(
            world
                .talk(at(GOOD, 80), get("good.test"))
                .await
                .unwrap()
                .ends_with("hello")
        );
        assert_eq!(good.lock().unwrap().len(), 1);
    });
}

#[test]
fn two_boxes_do_not_meet() {
    in_world(|world| async move {
        let _moat = world.attach(Policy::open()).await;
        let listener = world
            .in_box(|| TcpListener::bind("10.0.0.2:8080").unwrap())
            .await;
        let other = crate::world::World {
            namespace: crate::world::another_box(),
            ..world
        };
        let _second = other.attach(Policy::open()).await;
        let outcome = other.talk(at("10.0.0.2", 8080), "x").await;
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::ConnectionRefused);
        drop(listener);
    });
}
