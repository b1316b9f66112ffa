//! Secrets that programs use and never have.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use super::{neighbours::in_background, refusals};
use crate::{
    bench::Bench,
    check::{Check, Class, EVERYWHERE, Level, Verdict, judged},
    fault::{Fault, Result},
    origin,
    sandbox::{Report, Sandbox, Wish},
    server::random,
    weakness::Weakness,
    world::{GOOD, held},
};

const HTTPS: &str = include_str!("../probes/https.py");
const PLAIN: [&str; 2] = ["plain", "header"];
const ENCODED: [&str; 11] = [
    "base64-of-header",
    "base64-shifted",
    "base64-url",
    "hex",
    "upper",
    "utf-16",
    "percent",
    "json-slash",
    "json-unicode",
    "html",
    "location",
];
const ROTATE: &str = "Bind secrets only to hosts that never show what they are sent; replace those \
                      that were bound to others; report it.";

pub const CHECKS: &[Check] = &[
    Check {
        id: "credentials-nowhere",
        class: Class::Credentials,
        attack: "find a bound secret in the sandbox",
        source: "docs/threats.md: theft of a secret",
        levels: EVERYWHERE,
        means: "A program has the secret it should only use.",
        todo: "Replace the secrets that are bound, and report it.",
        weakened_by: &[Weakness::SecretInside],
        run: nowhere,
    },
    Check {
        id: "credentials-elsewhere",
        class: Class::Credentials,
        attack: "have a secret sent to another host",
        source: "docs/threats.md: placeholder sent to another host",
        levels: EVERYWHERE,
        means: "A program takes the secret to a host of its own.",
        todo: "Replace the secrets that are bound, and report it.",
        weakened_by: &[Weakness::NoEdge],
        run: elsewhere,
    },
    Check {
        id: "credentials-impostor",
        class: Class::Credentials,
        attack: "have a secret sent to an impostor",
        source: "docs/threats.md: an impostor of the bound host",
        levels: EVERYWHERE,
        means: "Whoever can answer for the host's address gets the secret.",
        todo: "Replace the secrets that are bound, and report it.",
        weakened_by: &[Weakness::NoEdge],
        run: impostor,
    },
    Check {
        id: "credentials-reflected",
        class: Class::Credentials,
        attack: "have the bound host show the secret",
        source: "docs/threats.md: value echoed back",
        levels: EVERYWHERE,
        means: "A host that shows what it was sent gives the secret to the program.",
        todo: ROTATE,
        weakened_by: &[Weakness::NoEdge],
        run: |bench, level| reflected(bench, level, &PLAIN),
    },
    Check {
        id: "credentials-encoded",
        class: Class::Credentials,
        attack: "the same, shown in usual encodings",
        source: "finding 11",
        levels: EVERYWHERE,
        means: "A host that shows what it was sent in such an encoding gives the secret away.",
        todo: ROTATE,
        weakened_by: &[Weakness::NoEdge],
        run: |bench, level| reflected(bench, level, &ENCODED),
    },
    Check {
        id: "credentials-halves",
        class: Class::Credentials,
        attack: "the same, in two parts by Range",
        source: "finding 11",
        levels: EVERYWHERE,
        means: "A host that answers parts of what it shows gives the secret away.",
        todo: ROTATE,
        weakened_by: &[Weakness::NoEdge],
        run: halves,
    },
    Check {
        id: "credentials-oracle",
        class: Class::Credentials,
        attack: "guess a secret letter by letter",
        source: "finding 2",
        levels: EVERYWHERE,
        means: "A host that sends back what it is sent tells the secret in some hundred requests.",
        todo: ROTATE,
        weakened_by: &[Weakness::Planted],
        run: oracle,
    },
    Check {
        id: "credentials-api-key",
        class: Class::Credentials,
        attack: "get the server's key through the gateway",
        source: "finding 12",
        levels: EVERYWHERE,
        means: "One wrong default header of a client gives a program the whole server.",
        todo: "Send the key to the API only; after it was sent to a port of a sandbox replace it.",
        weakened_by: &[Weakness::Planted],
        run: api_key,
    },
];

/// A secret, and a sandbox that it is bound to.
struct Bound {
    value: String,
    sandbox: Sandbox,
    /// What the probe sends itself, in the self-test.
    own: Value,
}

fn bound(bench: &Bench, level: Level) -> Result<Bound> {
    // With letters of both kinds and what encoders touch, in parts that no one guesses.
    let value = format!(
        "sK-{}/{}+{}_{}=",
        random(6)?,
        random(4)?.to_uppercase(),
        random(4)?,
        random(3)?
    );
    held(&bench.world.seen.expected).clone_from(&value);
    let name = format!("verify-{}", random(4)?);
    bench.api().json(
        Method::POST,
        "/v1/secrets",
        Some(&json!({"name": name, "value": value})),
        Duration::from_secs(30),
    )?;
    let weak = bench.weak(Weakness::NoEdge);
    let mut network = json!({"allow": [
        {"to": "good.test", "ports": [80, 443]},
        {"to": "other.test", "ports": [80, 443]},
        {"to": "echo.test", "ports": [80, 443]},
        {"to": "impostor.test", "ports": [443]},
    ]});
    if !weak {
        network["credentials"] = json!([
            {"secret": name, "host": "good.test"},
            {"secret": name, "host": "impostor.test"},
        ]);
    }
    let mut wish = Wish {
        network: Some(network),
        ..Wish::default()
    };
    if bench.weak(Weakness::SecretInside) {
        wish.env.insert("LEAKED".to_owned(), value.clone());
    }
    let sandbox = bench.sandbox(level, &wish)?;
    let own = if weak { json!(value) } else { Value::Null };
    Ok(Bound {
        value,
        sandbox,
        own,
    })
}

fn probe(bench: &Bench, bound: &Bound, script: &str, more: Value) -> Result<Report> {
    let mut arguments = json!({"good": GOOD, "own": bound.own});
    if let (Some(all), Value::Object(more)) = (arguments.as_object_mut(), more) {
        all.extend(more);
    }
    let script = format!("{HTTPS}\n{script}");
    bench.probe(&bound.sandbox, &script, &arguments, "user")
}

fn nowhere(bench: &Bench, level: Level) -> Result<Verdict> {
    let bound = bound(bench, level)?;
    let backwards: String = bound.value.chars().rev().collect();
    let script = include_str!("../probes/cred_nowhere.py");
    let report = probe(bench, &bound, script, json!({"backwards": backwards}))?;
    Ok(super::by_what_worked(&report))
}

/// Requests with the value in them that `wrong` says must not be.
fn sent_away(bench: &Bench, bound: &Bound, path: &str, whole: bool) -> Vec<String> {
    let mut wrong: Vec<String> = bench
        .world
        .seen
        .requests_for(path)
        .iter()
        .filter(|request| whole || !(request.tls && request.host == "good.test"))
        .filter(|request| {
            request
                .headers
                .iter()
                .any(|(_, value)| value.contains(&bound.value))
        })
        .map(|request| {
            let how = if request.tls { "TLS" } else { "plain HTTP" };
            format!("sent to {} in {how}", request.host)
        })
        .collect();
    wrong.dedup();
    wrong
}

fn elsewhere(bench: &Bench, level: Level) -> Result<Verdict> {
    let bound = bound(bench, level)?;
    let script = include_str!("../probes/cred_elsewhere.py");
    let report = probe(bench, &bound, script, json!({}))?;
    let wrong = sent_away(bench, &bound, "/elsewhere-", false);
    Ok(judged(&wrong, refusals(&report)))
}

fn impostor(bench: &Bench, level: Level) -> Result<Verdict> {
    let bound = bound(bench, level)?;
    let script = include_str!("../probes/cred_impostor.py");
    let report = probe(bench, &bound, script, json!({}))?;
    let wrong = sent_away(bench, &bound, "/impostor-", true);
    Ok(judged(&wrong, refusals(&report)))
}

fn reflected(bench: &Bench, level: Level, disguises: &[&str]) -> Result<Verdict> {
    let bound = bound(bench, level)?;
    let script = include_str!("../probes/cred_reflected.py");
    let report = probe(bench, &bound, script, json!({"disguises": disguises}))?;
    let mut wrong = Vec::new();
    for disguise in disguises {
        let got = bytes_of(&report.text(disguise)?)?;
        let needle = origin::as_shown(disguise, &bound.value)
            .ok_or_else(|| Fault::cannot("the outside does not know the disguise"))?;
        if got.windows(needle.len()).any(|window| window == needle) {
            wrong.push((*disguise).to_owned());
        }
    }
    let held = format!("{} disguises, none shown", disguises.len());
    if wrong.is_empty() {
        return Ok(Verdict::Held(held));
    }
    Ok(Verdict::Broken(format!("shown as: {}", wrong.join(", "))))
}

fn bytes_of(hex: &str) -> Result<Vec<u8>> {
    let digits = hex.as_bytes();
    digits
        .chunks(2)
        .map(|pair| {
            std::str::from_utf8(pair)
                .ok()
                .and_then(|pair| u8::from_str_radix(pair, 16).ok())
                .ok_or_else(|| Fault::cannot("the probe told no bytes"))
        })
        .collect()
}

fn halves(bench: &Bench, level: Level) -> Result<Verdict> {
    let bound = bound(bench, level)?;
    let script = include_str!("../probes/cred_range.py");
    let report = probe(bench, &bound, script, json!({}))?;
    let mut whole = Vec::new();
    for part in report.texts("parts")? {
        whole.extend(bytes_of(&part)?);
    }
    let wrong: Vec<String> = (whole == bound.value.as_bytes())
        .then(|| "both halves came through".to_owned())
        .into_iter()
        .collect();
    Ok(judged(&wrong, "the parts were not the value"))
}

fn oracle(bench: &Bench, level: Level) -> Result<Verdict> {
    let bound = bound(bench, level)?;
    // The beginning of the value, and as many letters that are not it. A longer beginning ends the
    // answer, and a few of those suspend the secret: that is told on purpose, and bounded.
    let size = 3.min(bound.value.len());
    let right: String = bound.value.chars().take(size).collect();
    // Planted: one letter more, so that more is there to be sent.
    let wrong = "q".repeat(size + usize::from(bench.weak(Weakness::Planted)));
    let script = include_str!("../probes/cred_oracle.py");
    let report = probe(
        bench,
        &bound,
        script,
        json!({"right": right, "wrong": wrong}),
    )?;
    let (right, wrong) = (report.texts("right")?, report.texts("wrong")?);
    let told = right.iter().all(|size| !wrong.contains(size));
    let shown = format!(
        "bytes at once: {} after a right guess, {} after a wrong one",
        right.join(", "),
        wrong.join(", ")
    );
    Ok(if told {
        Verdict::Broken(shown)
    } else {
        Verdict::Held(shown)
    })
}

fn api_key(bench: &Bench, level: Level) -> Result<Verdict> {
    let sandbox = bench.sandbox(level, &Wish::default())?;
    let script = include_str!("../probes/headers_log.py");
    in_background(bench, &sandbox, script, &json!({}), "user")?;
    let key = bench.api().key.clone();
    let info = sandbox.info()?;
    let token = info["traffic_token"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let bearer = format!("Bearer {key}");
    let ask = |path: &str, key: &str, bearer: &str, token: &str| {
        let headers = [
            ("e2b-sandbox-id", sandbox.id.as_str()),
            ("e2b-sandbox-port", "8000"),
            ("x-api-key", key),
            ("authorization", bearer),
            ("e2b-traffic-access-token", token),
        ];
        let patience = Duration::from_secs(30);
        bench
            .api()
            .request(Method::GET, path, None, &headers, patience)
    };
    let reached = ask("/control", "", "", "")?.text() == "noted"
        || ask("/control", "", "", &token)?.text() == "noted";
    if !reached {
        return Err(Fault::cannot(
            "the port of a sandbox cannot be reached through the gateway",
        ));
    }
    // Refusing these is as good as taking the key away.
    for (path, key, bearer) in [
        ("/by-key", key.as_str(), ""),
        ("/by-bearer", "", bearer.as_str()),
        ("/by-both", key.as_str(), bearer.as_str()),
    ] {
        ask(path, key, bearer, "")?;
        ask(path, key, bearer, &token)?;
    }
    if bench.weak(Weakness::Planted) {
        let plant = format!("echo {key} >>/tmp/headers.log");
        sandbox.exec(&["sh", "-c", &plant], "user")?;
    }
    let log = sandbox.exec(&["cat", "/tmp/headers.log"], "user")?.out;
    if !log.contains("/control") {
        return Err(Fault::cannot("the program in the sandbox noted nothing"));
    }
    let wrong: Vec<String> = log
        .contains(&key)
        .then(|| "a program in the sandbox was sent the server's key".to_owned())
        .into_iter()
        .collect();
    Ok(judged(
        &wrong,
        "the key was taken away, or the request refused",
    ))
}
