//! `policy`: what boxes may reach.

use std::{collections::BTreeMap, io::Write, net::IpAddr, path::Path};

use http::Method;
use sandkeep_moat::policy::{Policy, Profile, Reason};
use sandkeep_model::{Error, Result};
use serde::Deserialize as _;
use serde_json::{Value, json};

use super::{
    client::Client,
    output::{Output, clean},
};
use crate::args::{BoxArgs, PolicyCommand};

/// A policy file is for people to read.
const LARGEST_FILE: u64 = 1 << 20;

pub async fn policy(client: &Client, output: Output, command: PolicyCommand) -> anyhow::Result<u8> {
    match command {
        PolicyCommand::Show { sandbox } => {
            let id = client.find(&sandbox).await?;
            output.json(&client.get(&["sandboxes", &id, "network"]).await?)?;
            Ok(0)
        }
        PolicyCommand::Set {
            sandbox,
            file,
            profile,
        } => {
            let wish = match (file, profile) {
                (Some(file), None) => named(&file.to_string_lossy())?,
                (None, Some(profile)) => json!({"profile": profile}),
                _ => return Err(Error::invalid("policy", "give a FILE or --profile NAME").into()),
            };
            let id = client.find(&sandbox).await?;
            let request = client
                .request(Method::PUT, &["sandboxes", &id, "network"])?
                .json(&wish);
            let now = client.json(request).await?;
            warn_of_dead_rules(client, &id).await;
            if output.json {
                output.json(&now)?;
            }
            Ok(0)
        }
        PolicyCommand::Test {
            sandbox,
            file,
            method,
            target,
        } => {
            let mut asked = json!({"url": target, "method": method});
            match (sandbox, file) {
                (Some(sandbox), None) => asked["sandbox_id"] = client.find(&sandbox).await?.into(),
                (None, Some(file)) => asked["policy"] = named(&file)?,
                _ => {
                    return Err(
                        Error::invalid("policy", "give --box BOX or --file PROFILE|FILE").into(),
                    );
                }
            }
            test(client, output, &asked).await
        }
        PolicyCommand::Profiles => profiles(client, output).await,
        PolicyCommand::Save { name, file } => {
            let request = client
                .request(Method::PUT, &["profiles", &name])?
                .json(&read(&file)?);
            let made = client.json(request).await?;
            if output.json {
                output.json(&made)?;
            } else {
                output.line(&format!("{name}@{}", made["version"]))?;
            }
            Ok(0)
        }
        PolicyCommand::Forget { name } => {
            let request = client.request(Method::DELETE, &["profiles", &name])?;
            client.send(request).await?;
            Ok(0)
        }
        PolicyCommand::Suggest { sandbox } => suggest(client, output, &sandbox).await,
    }
}

async fn profiles(client: &Client, output: Output) -> anyhow::Result<u8> {
    let known = client.get(&["profiles"]).await?;
    if output.json {
        output.json(&known)?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = known["profiles"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|one| {
            let rules = one["policy"]["allow"].as_array().map_or(0, Vec::len);
            vec![
                one["name"].as_str().unwrap_or_default().to_owned(),
                one["version"]
                    .as_u64()
                    .map_or_else(|| "built in".to_owned(), |v| v.to_string()),
                one["opens"]
                    .as_str()
                    .map_or_else(|| format!("{rules} rules"), str::to_owned),
            ]
        })
        .collect();
    output.table(&["NAME", "VERSION", "OPENS"], &rows)?;
    Ok(0)
}

/// Exit code 1 when it would be refused.
async fn test(client: &Client, output: Output, asked: &Value) -> anyhow::Result<u8> {
    let request = client
        .request(Method::POST, &["policy", "test"])?
        .json(asked);
    let answer = client.json(request).await?;
    let text = |name: &str| answer[name].as_str().map(clean).unwrap_or_default();
    let allowed = answer["allowed"] == true;
    if output.json {
        output.json(&answer)?;
    } else if allowed {
        output.line(&format!("{} by {}", output.good("allowed"), text("rule")))?;
        if answer["why"].is_string() {
            output.line(&format!("but: {}", text("why")))?;
            output.line(&format!("hint: {}", text("hint")))?;
        }
    } else {
        output.line(&format!("{}: {}", output.bad("refused"), text("why")))?;
        output.line(&format!("hint: {}", text("hint")))?;
    }
    Ok(u8::from(!allowed))
}

/// Rules that are there and let nothing through look like rules that work. On standard error, and
/// never a reason to fail: what was asked for is done.
pub async fn warn_of_dead_rules(client: &Client, id: &str) {
    let Ok(found) = client
        .get(&["sandboxes", id, "network", "dead-rules"])
        .await
    else {
        return;
    };
    let mut stderr = std::io::stderr().lock();
    for rule in found["rules"].as_array().into_iter().flatten() {
        let text = |name: &str| clean(rule[name].as_str().unwrap_or_default());
        // Whoever closed standard error wants no warnings.
        drop(writeln!(
            stderr,
            "warning: the rule {} lets nothing through: {}\nhint: {}",
            text("rule"),
            text("why"),
            text("hint")
        ));
    }
}

/// The proposal goes to standard output, ready for `policy set`; what is new in it, and what
/// was left out, to standard error.
async fn suggest(client: &Client, output: Output, sandbox: &str) -> anyhow::Result<u8> {
    let id = client.find(sandbox).await?;
    let policy = client.get(&["sandboxes", &id, "network"]).await?;
    let denials = client
        .get(&["sandboxes", &id, "network", "denials"])
        .await?;
    let found = denials["denials"].as_array().cloned().unwrap_or_default();
    let suggestion = suggestion(policy, &found)?;
    let mut stderr = std::io::stderr().lock();
    for (to, times) in &suggestion.added {
        writeln!(stderr, "+ {} (refused {times} times)", clean(to))?;
    }
    for (host, why) in &suggestion.left_out {
        writeln!(stderr, "- {}: {}", clean(host), clean(why))?;
    }
    if suggestion.added.is_empty() {
        writeln!(stderr, "nothing to add: this is the policy as it is")?;
    } else {
        writeln!(
            stderr,
            "read it, save it, and apply it with `sandkeep policy set {id} FILE`"
        )?;
    }
    output.json(&suggestion.policy)?;
    Ok(0)
}

struct Suggestion {
    policy: Value,
    added: BTreeMap<String, u64>,
    left_out: BTreeMap<String, String>,
}

fn suggestion(mut policy: Value, denials: &[Value]) -> Result<Suggestion> {
    let mut added = BTreeMap::new();
    let mut left_out = BTreeMap::new();
    let held = Policy::from_json(&policy)
        .map_err(|error| error.context("reading the policy of the sandbox"))?;
    // A lookup says no port; the connection that would have followed mostly means HTTPS.
    let connected: Vec<&str> = denials
        .iter()
        .filter(|denial| denial["port"] != 0)
        .filter_map(|denial| denial["host"].as_str())
        .collect();
    for denial in denials {
        let Some(host) = denial["host"].as_str() else {
            continue;
        };
        let address = host.parse::<IpAddr>().ok();
        let reason = Reason::deserialize(&denial["reason"])
            .map_err(|_| Error::internal("the server gives a reason that is not known here"))?;
        if !reason.is_for_the_policy() {
            let text = |name: &str| denial[name].as_str().unwrap_or_default();
            let why = format!("{}; {}", text("why"), text("hint"));
            left_out.insert(host.to_owned(), why);
            continue;
        }
        let port = match denial["port"].as_u64() {
            Some(0) | None if connected.contains(&host) => continue,
            Some(0) | None => 443,
            Some(port) => u16::try_from(port).unwrap_or_default(),
        };
        let to = match address {
            Some(IpAddr::V6(address)) => json!({"to": address.to_string(), "ports": [port]}),
            _ => json!({"to": host, "ports": [port]}),
        };
        // What no rule can name, like a broken host name, is not for a proposal.
        if Policy::from_json(&json!({"allow": [to]})).is_err() {
            let why = match host {
                "*" => "the budget of the policy is spent: raise `limits.total_bytes`",
                _ => "this is not the name of a host that a rule could allow",
            };
            left_out.insert(host.to_owned(), why.to_owned());
            continue;
        }
        let times = denial["count"].as_u64().unwrap_or(1);
        let narrowed = is_narrowed(&held, host, port);
        let to = match (narrowed, &denial["request"]) {
            (false, _) => {
                *added.entry(format!("{host}:{port}")).or_insert(0) += times;
                to
            }
            (true, Value::Object(asked)) => {
                let (method, path) = (&asked["method"], &asked["path"]);
                let shown = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let request = format!("{} https://{host}:{port}{}", shown(method), shown(path));
                let request = if port == 80 {
                    request.replacen("https", "http", 1)
                } else {
                    request
                };
                let mut to = to;
                to["http"] = json!([{"methods": [method], "path": path}]);
                let is_rule = Policy::from_json(&json!({"allow": [to]})).is_ok();
                if !is_rule || !can_be_named(&shown(path)) {
                    left_out.insert(request, "a rule cannot name this request".to_owned());
                    continue;
                }
                *added.entry(request).or_insert(0) += times;
                to
            }
            // A rule for the host alone would open every request to it.
            (true, _) => {
                left_out.insert(
                    format!("{host}:{port}"),
                    "the policy allows only some requests to it (`http`); a rule for the whole host would lose that limit, so add it by hand if that is meant".to_owned(),
                );
                continue;
            }
        };
        let allow = policy["allow"]
            .as_array_mut()
            .ok_or_else(|| Error::internal("the server's policy has no list of rules"))?;
        if !allow.contains(&to) {
            allow.push(to);
        }
    }
    Ok(Suggestion {
        policy,
        added,
        left_out,
    })
}

/// Whether the policy lets only some requests through to this host.
fn is_narrowed(policy: &Policy, host: &str, port: u16) -> bool {
    host.parse().is_ok_and(|host| {
        let mut rules = policy.allow.iter().filter(|rule| rule.matches(&host, port));
        rules.any(|rule| !rule.http.is_empty())
    })
}

/// Whether a pattern can stand for this path alone: a star, however it is written, fits others, too.
/// What was asked for is the sandbox's choice.
fn can_be_named(path: &str) -> bool {
    !path.contains('*') && !path.to_ascii_lowercase().contains("%2a")
}

/// What `--network`, `--allow` and `--credential` ask for; `None` when none was given.
pub async fn wish(client: &Client, args: &BoxArgs) -> Result<Option<Value>> {
    let policy = wished_policy(client, args).await?;
    if args.credential.is_empty() {
        return Ok(policy);
    }
    let mut wish = policy.unwrap_or_else(|| json!({}));
    match wish.get_mut("credentials").and_then(Value::as_array_mut) {
        Some(list) => list.extend(args.credential.iter().cloned()),
        None => wish["credentials"] = args.credential.clone().into(),
    }
    Ok(Some(wish))
}

async fn wished_policy(client: &Client, args: &BoxArgs) -> Result<Option<Value>> {
    let named = args.network.as_deref().map(named).transpose()?;
    if args.allow.is_empty() {
        return Ok(named);
    }
    let mut policy = match named {
        None => json!({"default": "deny"}),
        Some(wish) if wish.get("profile").is_some() => expanded(client, &wish["profile"]).await?,
        Some(document) => document,
    };
    let rules = args.allow.iter().map(|rule| Value::from(rule.as_str()));
    match policy.get_mut("allow").and_then(Value::as_array_mut) {
        Some(allow) => allow.extend(rules),
        None => policy["allow"] = rules.collect(),
    }
    Ok(Some(policy))
}

/// Only the server knows what a profile means there.
async fn expanded(client: &Client, profile: &Value) -> Result<Value> {
    let known = client.get(&["profiles"]).await?;
    let found = known["profiles"].as_array().into_iter().flatten();
    found
        .filter(|known| known["name"] == *profile)
        .map(|known| known["policy"].clone())
        .next()
        .ok_or_else(|| Error::not_found(format!("the server knows no profile {profile}")))
}

/// The name of a profile, or a file with a policy in it.
fn named(text: &str) -> Result<Value> {
    if let Ok(profile) = text.parse::<Profile>() {
        return Ok(json!({"profile": profile.name()}));
    }
    let path = Path::new(text);
    let like_a_name = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-@".contains(&b);
    if text.bytes().all(like_a_name) && !path.exists() {
        return Ok(json!({"profile": text}));
    }
    read(path)
}

fn read(path: &Path) -> Result<Value> {
    let read = || -> std::io::Result<String> {
        if std::fs::metadata(path)?.len() > LARGEST_FILE {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        std::fs::read_to_string(path)
    };
    let text = read().map_err(|error| {
        Error::invalid("network", format!("{}: {error}", path.display()))
            .hint("name a file with a policy, or a profile; `sandkeep policy profiles` lists them")
    })?;
    serde_json::from_str(&text)
        .map_err(|error| Error::invalid("network", format!("{}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use sandkeep_moat::policy::AddressGuard;

    use super::*;

    #[test]
    fn a_suggestion_adds_what_was_refused_and_can_be_opened() {
        let policy =
            json!({"default": "deny", "allow": [{"to": "a.test"}], "deny": [], "limits": {}});
        let denials = [
            json!({"host": "b.test", "port": 0, "count": 4, "reason": "no_rule"}),
            json!({"host": "c.test", "port": 0, "count": 1, "reason": "no_rule"}),
            json!({"host": "c.test", "port": 80, "count": 2, "reason": "wrong_port"}),
            json!({"host": "10.0.0.7", "port": 22, "count": 1, "reason": "closed_range",
                "why": "10.0.0.7 is a private address", "hint": "`allow_private`"}),
            json!({"host": "a.test", "port": 0, "count": 1, "reason": "closed_range",
                "why": "a.test resolves to 10.0.0.7", "hint": "`allow_private`"}),
            json!({"host": "bad name", "port": 22, "count": 1, "reason": "no_rule"}),
        ];
        let made = suggestion(policy, &denials).unwrap();
        assert_eq!(
            made.policy["allow"],
            json!([
                {"to": "a.test"},
                {"to": "b.test", "ports": [443]},
                {"to": "c.test", "ports": [80]},
            ])
        );
        assert_eq!(made.added["c.test:80"], 2);
        assert!(made.left_out["10.0.0.7"].contains("private"));
        // A rule for it is there: what is missing is a setting of the server.
        assert!(made.left_out["a.test"].contains("`allow_private`"));
        assert!(made.left_out.contains_key("bad name"));
        Policy::from_json(&made.policy).unwrap();
    }

    #[test]
    fn a_suggestion_never_widens_a_rule_that_names_requests() {
        let policy = json!({"allow": [
            {"to": "a.test", "ports": [443], "http": [{"path": "/simple/six/*"}]},
            {"to": "*.b.test", "http": [{"methods": ["GET"], "path": "/x"}]},
        ]});
        let post = json!({"method": "POST", "path": "/upload"});
        let star = |path: &str| {
            json!({"host": "a.test", "port": 443, "count": 1,
            "reason": "request_not_allowed", "request": {"method": "POST", "path": path}})
        };
        let denials = [
            json!({"host": "a.test", "port": 443, "reason": "request_not_allowed", "count": 2, "request": post}),
            star("/*"),
            star("/x%2a"),
            json!({"host": "a.test", "port": 443, "reason": "no_rule", "count": 1}),
            json!({"host": "c.b.test", "port": 80, "reason": "request_not_allowed", "count": 1,
                "request": {"method": "GET", "path": "/y"}}),
            json!({"host": "a.test", "port": 22, "reason": "wrong_port", "count": 1}),
        ];
        let made = suggestion(policy.clone(), &denials).unwrap();
        let rules = made.policy["allow"].as_array().unwrap();
        assert_eq!(rules[..2], *policy["allow"].as_array().unwrap());
        assert_eq!(
            rules[2..],
            [
                json!({"to": "a.test", "ports": [443],
                    "http": [{"methods": ["POST"], "path": "/upload"}]}),
                json!({"to": "c.b.test", "ports": [80],
                    "http": [{"methods": ["GET"], "path": "/y"}]}),
                json!({"to": "a.test", "ports": [22]}),
            ]
        );
        assert_eq!(made.added["POST https://a.test:443/upload"], 2);
        assert!(made.left_out["a.test:443"].contains("only some requests"));
        for path in ["/*", "/x%2a"] {
            let request = format!("POST https://a.test:443{path}");
            assert!(made.left_out.contains_key(&request), "{request}");
        }
        let policy = Policy::from_json(&made.policy).unwrap();
        let allowed = |method: &str, url: &str| {
            let guard = AddressGuard::default();
            sandkeep_moat::policy::explain(&policy, &guard, method, url)
                .unwrap()
                .allowed
        };
        assert!(allowed("POST", "https://a.test/upload"));
        for (method, url) in [
            ("POST", "https://a.test/other"),
            ("POST", "https://a.test/uploads"),
            ("DELETE", "https://a.test/upload"),
            ("POST", "http://c.b.test/y"),
        ] {
            assert!(!allowed(method, url), "{method} {url}");
        }
    }

    #[test]
    fn profiles_and_files_are_told_apart() {
        assert_eq!(named("open").unwrap(), json!({"profile": "open"}));
        assert_eq!(named("team@2").unwrap(), json!({"profile": "team@2"}));
        assert_eq!(named("deny").unwrap(), json!({"profile": "air-gapped"}));
        let error = named("/nonexistent/policy.json").unwrap_err();
        assert!(error.hint.unwrap().contains("policy profiles"));
    }
}
