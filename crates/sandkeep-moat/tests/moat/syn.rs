//! Refused with the first packet: where no rule can allow a connection, none comes about.

use std::{
    io::{ErrorKind, Read},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

use hickory_proto::rr::RecordType;
use sandkeep_moat::{AttachSpec, BoxMoat, Denial, Via, policy::Policy};
use sandkeep_model::SandboxId;
use serde_json::json;

use crate::world::{
    EVIL, GOOD, GOOD_V6, LONG, World, ask, at, get, in_world, in_world_with, refused_via,
};

/// How a connection begins; nothing is said on it.
async fn begin(world: &World, to: SocketAddr) -> Result<(), ErrorKind> {
    world
        .in_box(move || TcpStream::connect_timeout(&to, LONG).map(drop))
        .await
        .map_err(|error| error.kind())
}

async fn refused(world: &World, to: SocketAddr) {
    assert_eq!(
        begin(world, to).await,
        Err(ErrorKind::ConnectionRefused),
        "{to}"
    );
}

async fn begins(world: &World, to: SocketAddr) {
    assert_eq!(begin(world, to).await, Ok(()), "{to}");
}

async fn told(moat: &BoxMoat, host: &str) {
    while !refused_via(moat, Via::Tcp, host) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn a_handshake_as_a_channel_nothing_is_allowed() {
    in_world(|world| async move {
        let moat = world.attach(Policy::air_gapped()).await;
        for (address, port) in [
            (GOOD, 443),
            (EVIL, 22),
            ("8.8.8.8", 80),
            (GOOD_V6, 443),
            ("2606:4700::1", 80),
            ("10.0.0.7", 80),
            ("10.0.0.1", 443),
            ("169.254.169.254", 443),
            ("100.100.100.200", 80),
        ] {
            refused(&world, at(address, port)).await;
            told(&moat, address).await;
        }
        let denial = &moat.denials()[0];
        assert!(!denial.why.is_empty() && !denial.hint.is_empty());
        // Our own listener, found by a scan, is no destination either.
        refused(&world, at("127.0.0.1", 61_613)).await;
    });
}

#[test]
fn an_address_opens_with_the_answer_for_an_allowed_name_and_only_its_ports() {
    in_world(|world| async move {
        for (name, address) in [
            ("good.test", GOOD),
            ("other.test", EVIL),
            ("six.test", GOOD_V6),
        ] {
            world.zone.address(name, address);
        }
        let policy = json!({"allow": [
            {"to": "good.test", "ports": [80, "8000-8010"]}, "*.six.test", "six.test:443"
        ]});
        let moat = world.attach_only(Policy::from_json(&policy).unwrap()).await;
        refused(&world, at(GOOD, 80)).await;
        world.resolve("other.test").await;
        refused(&world, at(EVIL, 80)).await;
        world.resolve("good.test").await;
        for (port, open) in [
            (80, true),
            (8000, true),
            (8010, true),
            (8011, false),
            (79, false),
            (443, false),
        ] {
            if open {
                begins(&world, at(GOOD, port)).await;
            } else {
                refused(&world, at(GOOD, port)).await;
            }
        }
        // The reason names the name: that is what a policy needs.
        told(&moat, GOOD).await;
        let named = |denial: &Denial| denial.why.contains("good.test is allowed, but not on port");
        while !moat.denials().iter().any(named) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        refused(&world, at(GOOD_V6, 443)).await;
        world.ask("six.test", RecordType::AAAA).await;
        begins(&world, at(GOOD_V6, 443)).await;
        refused(&world, at(GOOD_V6, 80)).await;
    });
}

#[test]
fn the_first_packet_after_the_answer_passes() {
    in_world(|world| async move {
        let names: Vec<String> = (0..200).map(|at| format!("n{at}.test")).collect();
        for (at, name) in names.iter().enumerate() {
            world.zone.address(name, &format!("203.0.113.{}", at + 20));
        }
        let policy = Policy::allowing(names.iter().map(String::as_str)).unwrap();
        let _moat = world.attach_only(policy).await;
        let refused = world
            .in_box(move || {
                names
                    .iter()
                    .enumerate()
                    .map(|(place, name)| {
                        let answer = ask(at("10.0.0.1", 53), name, RecordType::A).unwrap();
                        assert_eq!(answer.answers.len(), 1);
                        let to = at(&format!("203.0.113.{}", place + 20), 443);
                        TcpStream::connect_timeout(&to, LONG).map(drop)
                    })
                    .filter(|outcome| outcome.is_err())
                    .count()
            })
            .await;
        assert_eq!(refused, 0);
    });
}

#[test]
fn networks_ports_and_what_is_closed() {
    in_world(|world| async move {
        let policy = json!({"allow": [
            "203.0.113.0/28:7000", {"to": "2001:db8::/64", "ports": ["80-90"]}, "192.168.0.0/16", "0.0.0.0/0:9999"
        ]});
        let moat = world.attach(Policy::from_json(&policy).unwrap()).await;
        begins(&world, at(GOOD, 7000)).await;
        refused(&world, at(GOOD, 7001)).await;
        refused(&world, at(EVIL, 7000)).await;
        begins(&world, at(GOOD_V6, 85)).await;
        refused(&world, at(GOOD_V6, 91)).await;
        refused(&world, at("2001:db8:0:1::1", 85)).await;
        begins(&world, at("8.8.8.8", 9999)).await;
        // No rule opens what the operator did not, or what cannot be opened.
        for closed in [
            "192.168.7.1",
            "168.63.129.16",
            "169.254.170.23",
            "100.64.9.1",
        ] {
            refused(&world, at(closed, 9999)).await;
            told(&moat, closed).await;
        }
        let denial = moat.denials();
        let wire = denial.iter().find(|denial| denial.host == "168.63.129.16");
        assert!(wire.unwrap().why.contains("metadata"));
    });
}

#[test]
fn where_everything_is_open_what_is_closed_is_refused_at_once() {
    in_world(|world| async move {
        let policy = json!({"default": "open", "deny": ["203.0.113.64/26"], "allow": ["203.0.113.67:22", "good.test"]});
        world.zone.address("good.test", "203.0.113.70");
        let _moat = world.attach_only(Policy::from_json(&policy).unwrap()).await;
        for to in [
            at(GOOD, 443),
            at(GOOD_V6, 25),
            at("8.8.8.8", 1),
            at("203.0.113.67", 22),
        ] {
            begins(&world, to).await;
        }
        for closed in [
            EVIL,
            "203.0.113.67",
            "203.0.113.70",
            "192.168.7.1",
            "10.1.1.1",
            "fd00:ec2::23",
            "64:ff9b::a01:101",
            "2002:a01:101::1",
            "::ffff:0:a00:1",
        ] {
            refused(&world, at(closed, 80)).await;
        }
        world.resolve("good.test").await;
        begins(&world, at("203.0.113.70", 80)).await;
    });
}

#[test]
fn another_policy_holds_with_the_next_packet() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        world.zone.address("evil.test", EVIL);
        let moat = world.allowing(&["good.test:80"]).await;
        begins(&world, at(GOOD, 80)).await;
        moat.set_policy(Policy::allowing(["good.test:443", "evil.test"]).unwrap());
        refused(&world, at(GOOD, 80)).await;
        // What was told before counts for the new policy.
        begins(&world, at(GOOD, 443)).await;
        refused(&world, at(EVIL, 80)).await;
        world.resolve("evil.test").await;
        begins(&world, at(EVIL, 80)).await;
        moat.set_policy(Policy::air_gapped());
        refused(&world, at(GOOD, 443)).await;
        refused(&world, at(EVIL, 80)).await;
        moat.set_policy(Policy::open());
        begins(&world, at(EVIL, 81)).await;
    });
}

#[test]
fn a_flood_of_names_fills_no_set() {
    in_world(|world| async move {
        let flood = 3000_u32;
        for place in 0..flood {
            let [_, _, high, low] = place.to_be_bytes();
            world.zone.address(
                &format!("n{place}.flood.test"),
                &format!("9.9.{high}.{low}"),
            );
        }
        world.zone.address("good.test", GOOD);
        let moat = world.allowing(&["*.flood.test"]).await;
        for place in 0..flood {
            let name = format!("n{place}.flood.test");
            // A flood is slowed down; what was dropped is asked again.
            while world.resolve(&name).await.is_empty() {}
        }
        // The newest are open, the oldest are not.
        begins(&world, at("9.9.11.183", 80)).await;
        refused(&world, at("9.9.0.1", 80)).await;
        drop(moat);
    });
}

#[test]
fn what_was_told_is_known_after_the_server_was_killed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    in_world_with(
        move |config| config.memory = Some(path),
        |world| async move {
            world.zone.address("good.test", GOOD);
            let _greeter = greeter().await;
            let id = SandboxId::random();
            let attach = async |id: &SandboxId, point: Option<&str>, policy| {
                world
                    .moat
                    .attach(AttachSpec {
                        id: id.clone(),
                        netns: world.namespace.try_clone().unwrap(),
                        policy,
                        bindings: Vec::new(),
                        from_point: point.map(str::to_owned),
                        copy_of: None,
                    })
                    .await
                    .unwrap()
            };
            let policy = || Policy::allowing(["good.test"]).unwrap();
            let moat = attach(&id, None, policy()).await;
            world.resolve("good.test").await;
            moat.keep_at("point");
            // As the kernel closes the sockets of a killed server.
            moat.detach().await;
            refused(&world, at(GOOD, 22)).await;
            let moat = attach(&id, None, policy()).await;
            assert_eq!(greeting(&world).await, "hello\r\n");
            moat.detach().await;
            // Another sandbox knows nothing of it, unless it comes from a point that did.
            let other = SandboxId::random();
            let moat = attach(&other, None, policy()).await;
            refused(&world, at(GOOD, 22)).await;
            moat.detach().await;
            let moat = attach(&other, Some("point"), policy()).await;
            assert_eq!(greeting(&world).await, "hello\r\n");
            moat.detach().await;
            // What the policy of now does not allow is not opened by what was told before.
            let moat = attach(&id, None, Policy::allowing(["other.test"]).unwrap()).await;
            refused(&world, at(GOOD, 22)).await;
            moat.detach().await;
            world.moat.forget(&id);
            let moat = attach(&id, None, policy()).await;
            refused(&world, at(GOOD, 22)).await;
            drop(moat);
        },
    );
}

/// A server that speaks first: its clients name no host.
async fn greeter() -> Arc<tokio::task::JoinHandle<()>> {
    let listener = tokio::net::TcpListener::bind(at(GOOD, 22)).await.unwrap();
    Arc::new(tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            use tokio::io::AsyncWriteExt;
            stream.write_all(b"hello\r\n").await.unwrap();
        }
    }))
}

async fn greeting(world: &World) -> String {
    world
        .in_box(|| {
            let mut said = String::new();
            let mut stream = TcpStream::connect_timeout(&at(GOOD, 22), LONG)?;
            stream.set_read_timeout(Some(LONG))?;
            stream.read_to_string(&mut said).map(|_| said)
        })
        .await
        .unwrap()
}

#[test]
fn what_is_asked_of_ourselves_and_dns_over_tcp_go_on() {
    let inside = |config: &mut sandkeep_moat::MoatConfig| {
        config.inside = Some(Arc::new(sandkeep_moat::InsideDesk::default()));
    };
    in_world_with(inside, |world| async move {
        let moat = world.attach(Policy::air_gapped()).await;
        for (address, port) in [
            ("10.0.0.1", 80),
            ("169.254.169.254", 80),
            ("9.9.9.9", 53),
            ("2606::9", 53),
        ] {
            begins(&world, at(address, port)).await;
        }
        let answer = world
            .talk(at("10.0.0.1", 80), get("sandkeep.internal"))
            .await
            .unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        drop(moat);
    });
}

#[test]
fn a_flood_of_refusals_is_counted_to_the_last() {
    const COUNT: u64 = 3000;
    in_world(|world| async move {
        let moat = world.attach(Policy::air_gapped()).await;
        world
            .in_box(|| {
                for _ in 0..COUNT {
                    assert!(TcpStream::connect_timeout(&at(EVIL, 443), LONG).is_err());
                }
            })
            .await;
        // What is told last tells of all that were lost before it.
        while moat.traffic().denied < COUNT {
            refused(&world, at(EVIL, 443)).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(moat.denials().len(), 1);
    });
}
