//! Out to the network, past the policy. What counts is what arrives outside.

use std::net::IpAddr;

use serde_json::{Value, json};

use super::{by_what_worked, refusals};
use crate::{
    bait::OWN_PUBLIC,
    bench::Bench,
    check::{Check, Class, EVERYWHERE, Level, Verdict, judged},
    fault::Result,
    sandbox::{Report, Wish},
    weakness::Weakness,
    world::{EVIL, GOOD, PRIVATE, RESOLVER, Request, held},
};

const CUT: &str = "Do not rely on policies until it is mended: give untrusted code the air-gapped \
                   profile, cut the host's own ways out, and report it.";

pub const CHECKS: &[Check] = &[
    Check {
        id: "egress-direct",
        class: Class::Egress,
        attack: "connect to an address no rule names",
        source: "docs/threats.md: IP literals, programs that know no proxy",
        levels: EVERYWHERE,
        means: "Programs in the sandbox reach any address.",
        todo: CUT,
        weakened_by: &[Weakness::OpenPolicy],
        run: direct,
    },
    Check {
        id: "egress-syn",
        class: Class::Egress,
        attack: "complete a handshake no rule can allow",
        source: "issue 14 item 13",
        levels: EVERYWHERE,
        means: "A connection that can never be allowed is first accepted and then reset: \
                programs take it for a working network, and scanners count an open port.",
        todo: "Update Sandkeep: nothing leaves, but refusals come late.",
        weakened_by: &[Weakness::OpenPolicy],
        run: syn,
    },
    Check {
        id: "egress-packets",
        class: Class::Egress,
        attack: "send UDP, ICMP, raw and multicast packets",
        source: "docs/threats.md: QUIC, other UDP, ICMP, raw and packet sockets",
        levels: EVERYWHERE,
        means: "Packets leave the sandbox that no rule is about.",
        todo: CUT,
        weakened_by: &[Weakness::OpenMoat],
        run: packets,
    },
    Check {
        id: "egress-dns-tunnel",
        class: Class::Egress,
        attack: "carry data out in DNS questions",
        source: "docs/threats.md: DNS tunnel",
        levels: EVERYWHERE,
        means: "Data leaves in the names that are asked for.",
        todo: CUT,
        weakened_by: &[Weakness::OpenPolicy],
        run: dns_tunnel,
    },
    Check {
        id: "egress-rebinding",
        class: Class::Egress,
        attack: "an allowed name with a private address",
        source: "docs/threats.md: DNS rebinding",
        levels: EVERYWHERE,
        means: "Whoever controls an allowed name leads sandboxes into the inner network.",
        todo: CUT,
        weakened_by: &[Weakness::OpenMoat],
        run: rebinding,
    },
    Check {
        id: "egress-platform",
        class: Class::Egress,
        attack: "cloud metadata and platform addresses",
        source: "finding 9",
        levels: EVERYWHERE,
        means: "Under `open` a sandbox reaches services of the cloud that trust this machine.",
        todo: "Do not use the open profile in a cloud until it is mended: name what is needed.",
        weakened_by: &[Weakness::OpenMoat],
        run: platform,
    },
    Check {
        id: "egress-own-address",
        class: Class::Egress,
        attack: "the host by its own public address",
        source: "finding 9",
        levels: EVERYWHERE,
        means: "Under `open` a sandbox is a local peer of the host's own services: rules of its \
                firewall for the outside do not apply.",
        todo: "Do not use the open profile, or bind services of the host to the loopback.",
        weakened_by: &[Weakness::OpenMoat],
        run: own_address,
    },
    Check {
        id: "egress-http-unread",
        class: Class::Egress,
        attack: "requests that the policy does not read",
        source: "finding 7",
        levels: EVERYWHERE,
        means: "One odd byte in a request takes it past the rules about requests and hosts.",
        todo: "Do not rely on rules about requests for hosts that share addresses with others.",
        weakened_by: &[Weakness::OpenPolicy],
        run: http_unread,
    },
    Check {
        id: "egress-http-paths",
        class: Class::Egress,
        attack: "paths that mean another path",
        source: "finding 13",
        levels: EVERYWHERE,
        means: "A server may read the path as one that the policy forbids.",
        todo: "Allow the whole host or nothing until it is mended.",
        weakened_by: &[Weakness::OpenPolicy],
        run: http_paths,
    },
    Check {
        id: "egress-http-overrides",
        class: Class::Egress,
        attack: "headers that change method or path",
        source: "finding 13",
        levels: EVERYWHERE,
        means: "A server that heeds these headers does something else than the policy allowed.",
        todo: "Do not rely on rules about requests for servers that heed such headers.",
        weakened_by: &[Weakness::OpenPolicy],
        run: http_overrides,
    },
    Check {
        id: "egress-http-smuggling",
        class: Class::Egress,
        attack: "a request hidden in another",
        source: "docs/threats.md: second request, host parser confusion",
        levels: EVERYWHERE,
        means: "A request reaches the server that the policy never saw.",
        todo: CUT,
        weakened_by: &[Weakness::OpenMoat],
        run: http_smuggling,
    },
    Check {
        id: "egress-fronting",
        class: Class::Egress,
        attack: "another host behind an allowed TLS name",
        source: "docs/threats.md: domain fronting",
        levels: EVERYWHERE,
        means: "Hosts that share a server with an allowed one are reached.",
        todo: "Give hosts of large providers rules about requests, so that they are looked into.",
        weakened_by: &[Weakness::OpenPolicy],
        run: fronting,
    },
];

/// What arrived outside that no rule allows.
fn strangers(bench: &Bench, report: &Report) -> Verdict {
    bench.world.settle();
    let mut wrong = bench.world.seen.strangers();
    wrong.truncate(6);
    judged(&wrong, format!("nothing arrived; {}", refusals(report)))
}

fn direct(bench: &Bench, level: Level) -> Result<Verdict> {
    let sandbox = bench.shared_with_a_name(level)?;
    let arguments = json!({
        "good": GOOD, "hosts": [EVIL, "2001:db8:66::6"], "ports": [80, 443, 22, 8080, 5432],
    });
    let script = include_str!("../probes/egress_tcp.py");
    let report = bench.probe(&sandbox, script, &arguments, "user")?;
    Ok(strangers(bench, &report))
}

fn syn(bench: &Bench, level: Level) -> Result<Verdict> {
    let sandbox = bench.shared_with_a_name(level)?;
    let script = include_str!("../probes/egress_syn.py");
    let arguments = json!({"hosts": [EVIL, "203.0.113.9"]});
    let report = bench.probe(&sandbox, script, &arguments, "user")?;
    Ok(by_what_worked(&report))
}

fn packets(bench: &Bench, level: Level) -> Result<Verdict> {
    let sandbox = bench.shared_with_a_name(level)?;
    let script = include_str!("../probes/egress_udp.py");
    let report = bench.probe(&sandbox, script, &json!({"evil": EVIL}), "root")?;
    Ok(strangers(bench, &report))
}

fn dns_tunnel(bench: &Bench, level: Level) -> Result<Verdict> {
    let sandbox = bench.shared_with_a_name(level)?;
    let script = include_str!("../probes/egress_dns.py");
    let arguments = json!({"evil": EVIL, "resolver": RESOLVER});
    let report = bench.probe(&sandbox, script, &arguments, "user")?;
    bench.world.settle();
    let mut wrong: Vec<String> = held(&bench.world.seen.questions)
        .iter()
        .filter(|name| name.ends_with("evil.test"))
        .map(|name| format!("the outside was asked for {name}"))
        .collect();
    wrong.truncate(3);
    Ok(judged(&wrong, refusals(&report)))
}

fn with(bench: &Bench, level: Level, network: Value) -> Result<crate::sandbox::Sandbox> {
    bench.sandbox(
        level,
        &Wish {
            network: Some(network),
            ..Wish::default()
        },
    )
}

fn rebinding(bench: &Bench, level: Level) -> Result<Verdict> {
    let network = json!({"allow": ["good.test:80", "rebound.test:80", format!("{PRIVATE}:80")]});
    let network = if bench.weak(Weakness::OpenMoat) {
        json!({"allow": ["good.test:80"]})
    } else {
        network
    };
    let sandbox = match with(bench, level, network) {
        // A policy that names a private address may be refused as a whole.
        Err(crate::fault::Fault::Refused { status: 400, .. }) => with(
            bench,
            level,
            json!({"allow": ["good.test:80", "rebound.test:80"]}),
        )?,
        other => other?,
    };
    let script = include_str!("../probes/egress_tcp.py");
    let arguments = json!({"good": GOOD, "hosts": ["rebound.test", PRIVATE], "ports": [80]});
    let report = bench.probe(&sandbox, script, &arguments, "user")?;
    bench.world.settle();
    let wrong: Vec<String> = (bench.world.seen.packets_to(IpAddr::V4(PRIVATE)) > 0)
        .then(|| format!("packets arrived at {PRIVATE}"))
        .into_iter()
        .collect();
    Ok(judged(&wrong, refusals(&report)))
}

/// Services of clouds that trust whoever asks from this machine.
const PLATFORM: [&str; 9] = [
    "169.254.169.254",
    "169.254.170.2",
    "169.254.170.23",
    "168.63.129.16",
    "100.100.100.200",
    "192.0.0.192",
    "fd00:ec2::254",
    "fd00:ec2::23",
    "fd20:ce::254",
];

/// Answered outside as everything is: that the open profile works.
const SOMEWHERE: &str = "9.9.9.9";

fn platform(bench: &Bench, level: Level) -> Result<Verdict> {
    let sandbox = with(bench, level, json!({"profile": "open"}))?;
    let script = include_str!("../probes/egress_tcp.py");
    let arguments = json!({"good": SOMEWHERE, "hosts": PLATFORM, "ports": [80]});
    let report = bench.probe(&sandbox, script, &arguments, "user")?;
    bench.world.settle();
    let wrong: Vec<String> = PLATFORM
        .iter()
        .filter(|address| {
            address
                .parse()
                .is_ok_and(|address| bench.world.seen.packets_to(address) > 0)
        })
        .map(|address| format!("packets arrived at {address}"))
        .collect();
    Ok(judged(&wrong, refusals(&report)))
}

fn own_address(bench: &Bench, level: Level) -> Result<Verdict> {
    let before = bench.bait.touched();
    let sandbox = with(bench, level, json!({"profile": "open"}))?;
    let script = include_str!("../probes/egress_tcp.py");
    let arguments = json!({
        "good": SOMEWHERE, "hosts": [OWN_PUBLIC, "198.18.0.1"], "ports": [bench.bait.port],
    });
    let report = bench.probe(&sandbox, script, &arguments, "user")?;
    let wrong: Vec<String> = (bench.bait.touched() > before)
        .then(|| {
            format!(
                "a service of the host answered at {OWN_PUBLIC} port {}",
                bench.bait.port
            )
        })
        .into_iter()
        .collect();
    Ok(judged(&wrong, refusals(&report)))
}

/// One host is open, the other one narrowed to some requests; both are at one address.
fn narrowed() -> Value {
    json!({"allow": [
        "open.test:80",
        {"to": "narrow.test", "ports": [80], "http": [{"methods": ["GET"], "path": "/public/*"}]},
    ]})
}

fn request(first: &str, host: &str, more: &str) -> String {
    format!("{first}\r\nHost: {host}\r\n{more}Connection: close\r\n\r\n")
}

/// Sends requests and gives those that arrived although `wrong` says that they must not.
fn http(
    bench: &Bench,
    level: Level,
    requests: &[String],
    wrong: impl Fn(&Request) -> bool,
) -> Result<Verdict> {
    let sandbox = with(bench, level, narrowed())?;
    let arguments = json!({
        "resolve": ["open.test", "narrow.test"],
        "good": GOOD,
        "control": request("GET /public/control HTTP/1.1", "narrow.test", ""),
        "requests": requests,
    });
    let script = include_str!("../probes/egress_http.py");
    let report = bench.probe(&sandbox, script, &arguments, "user")?;
    let mut arrived: Vec<String> = held(&bench.world.seen.requests)
        .iter()
        .filter(|request| wrong(request))
        .map(|request| {
            let target: String = request.target.chars().take(40).collect();
            format!(
                "{} {} of {:?} arrived",
                request.method, target, request.host
            )
        })
        .collect();
    arrived.dedup();
    let all = arrived.len();
    arrived.truncate(4);
    if all > arrived.len() {
        arrived.push(format!("and {} others", all - arrived.len()));
    }
    Ok(judged(&arrived, refusals(&report)))
}

fn http_unread(bench: &Bench, level: Level) -> Result<Verdict> {
    let requests = [
        request("GET /private?\u{c3}\u{a9} HTTP/1.1", "narrow.test", ""),
        request("GET /private\u{80} HTTP/1.1", "nowhere.test", ""),
        request("G_T /private HTTP/1.1", "narrow.test", ""),
        request("GET /private\u{7f} HTTP/1.1", "narrow.test", ""),
        request("get /private HTTP/1.1", "narrow.test", ""),
        request("GET  /private HTTP/1.1", "narrow.test", ""),
        format!(
            "\r\n{}",
            request("GET /private HTTP/1.1", "narrow.test", "")
        ),
        request("GET /private\u{ff}\u{fe} HTTP/1.0", "narrow.test", ""),
    ];
    http(bench, level, &requests, |request| {
        request.target.starts_with("/private")
            || (request.host != "narrow.test" && request.host != "open.test")
    })
}

fn http_paths(bench: &Bench, level: Level) -> Result<Verdict> {
    let paths = [
        "/public/../private",
        "/public/%2e%2e/private",
        "/public/..%2fprivate",
        "/public/..%3b/private",
        "/public/..;/private",
        "/public/%c0%ae%c0%ae/private",
        "/public/%u002e%u002e/private",
        "/public/..%5cprivate",
        "/public/%252e%252e/private",
        "/public//../private",
        "/public/.%00./private",
    ];
    let requests: Vec<String> = paths
        .iter()
        .map(|path| request(&format!("GET {path} HTTP/1.1"), "narrow.test", ""))
        .collect();
    http(bench, level, &requests, |request| {
        request.target.contains("private")
    })
}

fn http_overrides(bench: &Bench, level: Level) -> Result<Verdict> {
    let headers = [
        "X-HTTP-Method-Override: DELETE",
        "X-HTTP-Method: DELETE",
        "X-Method-Override: DELETE",
        "X-Original-URL: /private",
        "X-Rewrite-URL: /private",
    ];
    let requests: Vec<String> = headers
        .iter()
        .map(|header| {
            let first = "GET /public/overridden HTTP/1.1";
            request(first, "narrow.test", &format!("{header}\r\n"))
        })
        .collect();
    http(bench, level, &requests, |request| {
        request.headers.iter().any(|(name, value)| {
            name.starts_with("x-") && (value == "DELETE" || value == "/private")
        })
    })
}

fn http_smuggling(bench: &Bench, level: Level) -> Result<Verdict> {
    let hidden = "GET /hidden HTTP/1.1\r\nHost: other.test\r\n\r\n";
    let first = "POST /public/a HTTP/1.1\r\nHost: narrow.test\r\n";
    let get = "GET /public/a HTTP/1.1\r\nHost: narrow.test\r\n";
    let size = hidden.len();
    let requests = [
        format!("{get}\r\n{hidden}"),
        format!(
            "{get}Content-Length: {size}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{hidden}"
        ),
        format!("{get}Content-Length: 0\r\nContent-Length: {size}\r\n\r\n{hidden}"),
        format!("{get}Transfer-Encoding: xchunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n{hidden}"),
        format!("{get}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n{hidden}"),
        format!("{first}Content-Length: 0\r\n\r\n{hidden}"),
        "GET http://other.test/hidden HTTP/1.1\r\nHost: narrow.test\r\n\r\n".to_owned(),
        "GET /hidden HTTP/1.1\r\nHost: narrow.test\r\nHost: other.test\r\n\r\n".to_owned(),
        format!(
            "{get}Connection: Upgrade, Content-Length\r\nUpgrade: h2c\r\nContent-Length: {size}\r\n\r\n{hidden}"
        ),
    ];
    http(bench, level, &requests, |request| {
        request.target.contains("hidden") || request.host == "other.test"
    })
}

fn fronting(bench: &Bench, level: Level) -> Result<Verdict> {
    let network =
        json!({"allow": [{"to": "good.test", "http": [{"methods": ["GET"], "path": "/*"}]}]});
    let sandbox = with(bench, level, network)?;
    let script = include_str!("../probes/egress_tls.py");
    let report = bench.probe(&sandbox, script, &json!({"good": GOOD}), "user")?;
    let mut wrong: Vec<String> = bench
        .world
        .seen
        .requests_for("/fronted-")
        .iter()
        .filter(|request| request.host != "good.test" || request.to != IpAddr::V4(GOOD))
        .map(|request| format!("a request for {} arrived", request.host))
        .collect();
    wrong.dedup();
    Ok(judged(&wrong, refusals(&report)))
}
