use hickory_proto::{
    op::{Message, Query, ResponseCode},
    rr::{Name, RData, RecordType, rdata},
};
use sandkeep_moat::{MoatConfig, Via, policy::Policy};
use std::{
    io::{Read, Write},
    net::UdpSocket,
    time::{Duration, Instant},
};

use crate::world::{
    EVIL, GOOD, OK, World, ask, at, data, dial, in_world, in_world_with, refused_via,
};

fn alias(target: &str) -> RData {
    RData::CNAME(rdata::CNAME(Name::from_ascii(target).unwrap()))
}

#[test]
fn dns_tunnel_sees_nothing() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        world.zone.address("c2.evil.test", EVIL);
        let moat = world
            .allowing(&["good.test", "*.below.test", "203.0.113.0/24"])
            .await;
        assert_eq!(world.resolve("good.test.").await.len(), 1);
        for name in [
            "c2.evil.test.",
            "secret-data.evil.test.",
            "good.test.evil.test.",
            "x.good.test.",
            "below.test.",
        ] {
            for kind in [
                RecordType::A,
                RecordType::TXT,
                RecordType::NULL,
                RecordType::ANY,
            ] {
                let answer = world.ask(name, kind).await;
                assert_eq!(
                    answer.metadata.response_code,
                    ResponseCode::NXDomain,
                    "{name}"
                );
                assert!(answer.answers.is_empty());
            }
        }
        let asked = world.zone.asked.lock().unwrap().clone();
        assert!(asked.iter().all(|name| name == "good.test"), "{asked:?}");
        assert!(refused_via(&moat, Via::Dns, "c2.evil.test"));
        assert!(moat.traffic().dns_blocked >= 20);
    });
}

#[test]
fn nothing_is_asked_when_the_box_is_air_gapped() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let _moat = world.attach(Policy::air_gapped()).await;
        assert!(world.resolve("good.test.").await.is_empty());
        assert!(world.zone.asked.lock().unwrap().is_empty());
    });
}

#[test]
fn services_of_an_allowed_name_are_no_refusal() {
    in_world(|world| async move {
        let policy = Policy::allowing(["good.test"]).unwrap();
        let moat = world.attach_only(policy).await;
        let answer = world.ask("_http._tcp.good.test.", RecordType::SRV).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::NoError);
        assert!(answer.answers.is_empty() && moat.denials().is_empty());
        let answer = world.ask("_http._tcp.evil.test.", RecordType::SRV).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
        assert!(world.zone.asked.lock().unwrap().is_empty());
    });
}

#[test]
fn a_refusal_says_so_in_the_answer() {
    in_world(|world| async move {
        let _moat = world.allowing(&["good.test"]).await;
        let answer = world.ask("evil.test.", RecordType::A).await;
        let options = answer.edns.unwrap().options().as_ref().to_vec();
        let shown = format!("{options:?}");
        let words: String = "blocked by policy"
            .bytes()
            .map(|b| format!("{b}, "))
            .collect();
        assert!(shown.contains(words.trim_end_matches(", ")), "{shown}");
    });
}

#[test]
fn hard_coded_resolver() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let _moat = world.allowing(&["good.test"]).await;
        for resolver in [
            "8.8.8.8",
            "203.0.113.53",
            "10.0.0.1",
            "2001:db8::53",
            "2606:4700::1111",
        ] {
            let answers = world
                .in_box(move || {
                    let good = ask(at(resolver, 53), "good.test.", RecordType::A).unwrap();
                    let evil = ask(at(resolver, 53), "evil.test.", RecordType::A).unwrap();
                    (good.answers.len(), evil.metadata.response_code)
                })
                .await;
            assert_eq!(answers, (1, ResponseCode::NXDomain), "{resolver}");
        }
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
fn queries_over_tcp() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let _moat = world.allowing(&["good.test"]).await;
        let codes = world
            .in_box(|| {
                let mut stream = dial(at("9.9.9.9", 53)).unwrap();
                ["good.test.", "evil.test."].map(|name| {
                    let mut query = Message::query();
                    query.add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
                    let bytes = query.to_vec().unwrap();
                    let length = u16::try_from(bytes.len()).unwrap().to_be_bytes();
                    stream.write_all(&[&length[..], &bytes].concat()).unwrap();
                    let mut length = [0; 2];
                    stream.read_exact(&mut length).unwrap();
                    let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
                    stream.read_exact(&mut answer).unwrap();
                    let answer = Message::from_vec(&answer).unwrap();
                    answer.metadata.response_code
                })
            })
            .await;
        assert_eq!(codes, [ResponseCode::NoError, ResponseCode::NXDomain]);
    });
}

#[test]
fn rebinding_to_private() {
    in_world(|world| async move {
        let inner = world.server(at("192.168.7.1", 80), OK).await;
        world.zone.set("good.test", vec![data("192.168.7.1")]);
        world
            .zone
            .set("mixed.test", vec![data("169.254.169.254"), data(GOOD)]);
        world
            .zone
            .set("v6.test", vec![data("fd00::1"), data("::ffff:192.168.7.1")]);
        let moat = world
            .allowing(&["good.test", "mixed.test", "v6.test"])
            .await;
        let answer = world.ask("good.test.", RecordType::A).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
        let answer = world.ask("v6.test.", RecordType::AAAA).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
        let told = world.resolve("mixed.test.").await;
        assert_eq!(told, [GOOD.parse::<std::net::IpAddr>().unwrap()]);
        // Neither when the proxy itself resolves the name, whatever address was dialled.
        let answer = world
            .talk(at(GOOD, 80), crate::world::get("good.test"))
            .await
            .unwrap();
        crate::world::denied(&answer);
        assert!(inner.lock().unwrap().is_empty());
        assert!(refused_via(&moat, Via::Dns, "good.test"));
    });
}

#[test]
fn cname_chain_to_private() {
    in_world(|world| async move {
        world.zone.set("a.test", vec![alias("b.test.")]);
        world.zone.set("b.test", vec![alias("c.test.")]);
        world.zone.set("c.test", vec![data("192.168.7.1")]);
        world.zone.set("d.test", vec![alias("e.test.")]);
        world.zone.set("e.test", vec![data(GOOD)]);
        let _moat = world.allowing(&["a.test", "d.test"]).await;
        let answer = world.ask("a.test.", RecordType::A).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
        assert!(answer.answers.is_empty());
        // A chain that ends well is followed, also where its steps are not allowed by name.
        assert_eq!(world.resolve("d.test.").await.len(), 1);
        assert!(world.resolve("e.test.").await.is_empty());
    });
}

#[test]
fn our_own_name_is_answered_here() {
    in_world(|world| async move {
        let _moat = world.attach(Policy::air_gapped()).await;
        let told = world.resolve("sandkeep.internal.").await;
        assert_eq!(told, [std::net::IpAddr::from([10, 0, 0, 1])]);
        let below = world.ask("x.sandkeep.internal.", RecordType::A).await;
        assert_eq!(below.metadata.response_code, ResponseCode::NXDomain);
        assert!(world.zone.asked.lock().unwrap().is_empty());
    });
}

#[test]
fn oversized_and_malformed_queries_do_no_harm() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let _moat = world.allowing(&["good.test"]).await;
        world
            .in_box(|| {
                let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
                socket.connect(at("8.8.8.8", 53)).unwrap();
                for length in [0, 1, 11, 12, 13, 100, 1232, 1233, 9000] {
                    socket.send(&vec![0x41; length]).unwrap();
                }
            })
            .await;
        still_answers(&world).await;
    });
}

#[test]
fn a_flood_of_queries_is_bounded() {
    const PER_SECOND: u32 = 5;
    let few = |config: &mut MoatConfig| config.dns_per_second = PER_SECOND;
    in_world_with(few, |world| async move {
        let begun = Instant::now();
        let _moat = world.attach(Policy::open()).await;
        world
            .in_box(|| {
                let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
                for round in 0..1000 {
                    let mut query = Message::query();
                    query.add_query(Query::query(
                        Name::from_ascii(format!("n{round}.test.")).unwrap(),
                        RecordType::A,
                    ));
                    let bytes = query.to_vec().unwrap();
                    socket.send_to(&bytes, at("8.8.8.8", 53)).unwrap();
                }
                // Queries are taken in turn: with an answer to this all before it were seen. One
                // that comes while too many are under way is dropped and asked again.
                while ask_within(Duration::from_secs(1), "localhost.").is_err() {}
            })
            .await;
        let asked = world.zone.asked.lock().unwrap().len();
        // One second's worth at once, and what was gained since: true at any speed.
        let most = f64::from(PER_SECOND) * (1.0 + begun.elapsed().as_secs_f64());
        assert!(asked >= 1 && asked as f64 <= most, "{asked} of {most}");
    });
}

fn ask_within(patience: Duration, name: &str) -> std::io::Result<Message> {
    crate::world::ask_within(patience, at("8.8.8.8", 53), name, RecordType::A)
}

async fn still_answers(world: &World) {
    assert_eq!(world.resolve("good.test.").await.len(), 1);
}
