//! Every refusal says its true reason: one test for each that a sandbox can meet.

use std::{sync::Arc, time::Duration};

use hickory_proto::{op::ResponseCode, rr::RecordType};
use sandkeep_moat::{
    BoxMoat, InsideDesk, Via,
    policy::{Policy, Reason},
};
use serde_json::{Value, json};

use crate::world::{EVIL, GOOD, World, at, data, get, in_world, in_world_with};

fn reasons(moat: &BoxMoat, via: Via, host: &str) -> Vec<Reason> {
    moat.denials()
        .into_iter()
        .filter(|denial| denial.via == via && denial.host == host)
        .map(|denial| denial.reason)
        .collect()
}

/// A connection that the kernel refuses is told of a moment later.
async fn soon(moat: &BoxMoat, via: Via, host: &str) -> Vec<Reason> {
    for _ in 0..200 {
        let found = reasons(moat, via, host);
        if !found.is_empty() {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Vec::new()
}

#[test]
fn no_rule() {
    in_world(|world| async move {
        let moat = world.allowing(&["good.test"]).await;
        world.ask("evil.test.", RecordType::A).await;
        assert_eq!(reasons(&moat, Via::Dns, "evil.test"), [Reason::NoRule]);
        assert!(world.talk(at(EVIL, 443), "x").await.is_err());
        assert_eq!(soon(&moat, Via::Tcp, EVIL).await, [Reason::NoRule]);
    });
}

#[test]
fn an_allowed_name_at_a_private_address_names_the_setting_and_not_a_rule() {
    in_world(|world| async move {
        world.zone.address("mirror.test", "172.20.0.3");
        let moat = world.allowing(&["mirror.test:443"]).await;
        let answer = world.ask("mirror.test.", RecordType::A).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
        let denial = &moat.denials()[0];
        assert_eq!(denial.reason, Reason::ClosedRange);
        assert_eq!(denial.range, Some("172.16.0.0/12".parse().unwrap()));
        assert_eq!(
            denial.why,
            "mirror.test resolves to 172.20.0.3, a private address (172.16.0.0/12), which this server keeps closed"
        );
        assert!(denial.hint.contains("`allow_private`"), "{denial:?}");
        assert!(denial.hint.contains("172.20.0.3/32"), "{denial:?}");
        assert!(!denial.hint.contains("policy suggest"), "{denial:?}");
    });
}

#[test]
fn a_private_address_that_a_rule_names() {
    in_world(|world| async move {
        let moat = world
            .allowing(&["10.1.2.3:80", "169.254.169.254:8080"])
            .await;
        for (address, port, reason) in [
            ("10.1.2.3", 80, Reason::ClosedRange),
            ("169.254.169.254", 8080, Reason::Metadata),
        ] {
            assert!(world.talk(at(address, port), "x").await.is_err());
            assert_eq!(soon(&moat, Via::Tcp, address).await, [reason], "{address}");
        }
    });
}

#[test]
fn a_name_that_resolves_to_the_metadata_service_or_to_loopback() {
    in_world(|world| async move {
        world.zone.address("meta.test", "169.254.169.254");
        world.zone.address("loop.test", "127.0.0.1");
        let moat = world.allowing(&["meta.test", "loop.test"]).await;
        assert_eq!(reasons(&moat, Via::Dns, "meta.test"), [Reason::Metadata]);
        assert_eq!(
            reasons(&moat, Via::Dns, "loop.test"),
            [Reason::NeverReached]
        );
        for denial in moat.denials() {
            assert!(!denial.hint.contains("allow_private"), "{denial:?}");
        }
    });
}

#[test]
fn the_servers_own_private_address_is_not_called_openable() {
    in_world(|world| async move {
        // The machine the moat runs on has it, see `lay_cable`.
        world.zone.address("own.test", "100.64.9.1");
        let moat = world.allowing(&["own.test"]).await;
        assert_eq!(reasons(&moat, Via::Dns, "own.test"), [Reason::OwnAddress]);
    });
}

#[test]
fn a_name_that_does_not_exist_and_one_without_an_address() {
    in_world(|world| async move {
        world.zone.set("mail.test", vec![data("2001:db8::9")]);
        let moat = world
            .attach_only(Policy::allowing(["typo.test", "mail.test"]).unwrap())
            .await;
        let answer = world.ask("typo.test.", RecordType::A).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
        assert_eq!(reasons(&moat, Via::Dns, "typo.test"), [Reason::NoSuchName]);
        let why = &moat.denials()[0].why;
        assert!(why.starts_with("typo.test is allowed, but"), "{why}");
        // That it has no IPv4 address is no refusal: it has one of the other family.
        world.ask("mail.test.", RecordType::A).await;
        assert!(reasons(&moat, Via::Dns, "mail.test").is_empty());
    });
}

#[test]
fn under_an_open_policy_a_name_that_does_not_exist_is_no_refusal() {
    in_world(|world| async move {
        let moat = world.attach_only(Policy::open()).await;
        world.ask("typo.test.", RecordType::A).await;
        assert!(moat.denials().is_empty());
    });
}

#[test]
fn no_answer_from_upstream() {
    in_world(|world| async move {
        let moat = world
            .attach_only(Policy::allowing(["servfail.test", "silent.test"]).unwrap())
            .await;
        for name in ["servfail.test", "silent.test"] {
            let answer = world.ask(&format!("{name}."), RecordType::A).await;
            assert_eq!(
                answer.metadata.response_code,
                ResponseCode::ServFail,
                "{name}"
            );
            assert_eq!(
                reasons(&moat, Via::Dns, name),
                [Reason::DnsFailed],
                "{name}"
            );
        }
    });
}

#[test]
fn the_wrong_port_and_the_wrong_request() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let policy = json!({"allow": [
            {"to": "good.test", "ports": [80], "http": [{"methods": ["GET"], "path": "/a"}]},
        ]});
        let moat = world.attach(Policy::from_json(&policy).unwrap()).await;
        assert!(world.talk(at(GOOD, 81), "x").await.is_err());
        assert_eq!(soon(&moat, Via::Tcp, GOOD).await, [Reason::WrongPort]);
        let answer = world.talk(at(GOOD, 80), get("good.test")).await.unwrap();
        assert!(
            answer.contains("\"reason\":\"request_not_allowed\""),
            "{answer}"
        );
        let found = reasons(&moat, Via::Http, "good.test");
        assert_eq!(found, [Reason::RequestNotAllowed]);
    });
}

#[test]
fn a_range_the_policy_denies() {
    in_world(|world| async move {
        let policy = json!({"default": "open", "deny": ["203.0.113.0/24"]});
        let moat = world.attach_only(Policy::from_json(&policy).unwrap()).await;
        assert!(world.talk(at(EVIL, 443), "x").await.is_err());
        assert_eq!(soon(&moat, Via::Tcp, EVIL).await, [Reason::DeniedRange]);
    });
}

#[test]
fn why_tells_an_allowed_name_whose_lookup_fails_from_one_that_is_closed() {
    in_world_with(
        |config| config.inside = Some(Arc::new(InsideDesk::new(None))),
        |world| async move {
            world.zone.address("good.test", GOOD);
            world.zone.address("mirror.test", "172.20.0.3");
            let _moat = world
                .allowing(&["good.test", "mirror.test", "typo.test", "servfail.test"])
                .await;
            let good = why(&world, "good.test").await;
            assert_eq!(
                (&good["allowed"], &good["why"]),
                (&json!(true), &Value::Null)
            );
            for (name, allowed, reason) in [
                ("mirror.test", false, "closed_range"),
                ("typo.test", true, "no_such_name"),
                ("servfail.test", true, "dns_failed"),
                ("evil.test", false, "no_rule"),
            ] {
                let answer = why(&world, name).await;
                assert_eq!(answer["allowed"], allowed, "{answer}");
                assert_eq!(answer["reason"], reason, "{answer}");
                assert!(answer["hint"].is_string(), "{answer}");
            }
        },
    );
}

async fn why(world: &World, host: &str) -> Value {
    let text = format!(
        "GET /why?host={host} HTTP/1.1\r\nHost: sandkeep.internal\r\nConnection: close\r\n\r\n"
    );
    let answer = world.talk(at("10.0.0.1", 80), text).await.unwrap();
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}

#[test]
fn rules_that_can_let_nothing_through_are_known_beforehand() {
    in_world(|world| async move {
        let policy = Policy::allowing([
            "good.test",
            "203.0.113.0/24",
            "10.0.0.0/8",
            "0.0.0.0/0",
            "169.254.169.254",
            "192.168.7.1:80",
        ]);
        let dead = policy.unwrap().dead_rules(world.moat.guard());
        let found: Vec<_> = dead
            .iter()
            .map(|(rule, refusal)| (rule.as_str(), refusal.reason))
            .collect();
        assert_eq!(
            found,
            [
                ("10.0.0.0/8", Reason::ClosedRange),
                ("169.254.169.254", Reason::Metadata),
                ("192.168.7.1 port 80", Reason::ClosedRange),
            ]
        );
    });
}
