use std::{cell::RefCell, time::Duration};

use sandkeep_model::SandboxId;

use super::*;
use crate::{BoxIdentity, Claims, Issuer, IssuerConfig, SigningAlgorithm};

/// A box with the real issuer behind it.
struct RealBox {
    _dir: tempfile::TempDir,
    issuer: Issuer,
    identity: BoxIdentity,
    sessions: Sessions,
    asked: RefCell<Vec<String>>,
}

impl Source for RealBox {
    fn identity(&self) -> Result<Value> {
        serde_json::to_value(&self.identity).map_err(|error| Error::internal(error.to_string()))
    }

    fn named(&self, name: &str) -> Option<Audience> {
        self.identity.tokens.audience(name).cloned()
    }

    fn token(&self, audience: &Audience) -> Result<Secret> {
        self.asked.borrow_mut().push(audience.to_string());
        if audience.as_str() == "broken" {
            return Err(Error::internal("opening /secret/path failed"));
        }
        let claims = Claims::of(&self.identity, audience.clone());
        Ok(self.issuer.mint(&claims)?.token)
    }
}

impl RealBox {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let issuer = Issuer::open(
            &dir.path().join("identity"),
            IssuerConfig {
                url: "https://keep.test".parse().unwrap(),
                trust_domain: "keep.test".parse().unwrap(),
                algorithm: SigningAlgorithm::EdDsa,
            },
        )
        .unwrap();
        Self {
            _dir: dir,
            issuer,
            identity: BoxIdentity {
                sandbox: SandboxId::random(),
                template: "base".parse().unwrap(),
                org: Some("acme".parse().unwrap()),
                task: None,
                scopes: Default::default(),
                parent: None,
                tokens: serde_json::from_value(json!({"vault": "https://vault.test"})).unwrap(),
                created: Timestamp::now(),
            },
            sessions: Sessions::new(),
            asked: RefCell::default(),
        }
    }

    fn ask(&self, method: &str, target: &str, headers: &[(&str, &str)]) -> Response {
        self.ask_at(method, target, headers, Timestamp::now())
    }

    fn ask_at(
        &self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        now: Timestamp,
    ) -> Response {
        let mut all: Vec<(&str, &[u8])> = headers.iter().map(|(n, v)| (*n, v.as_bytes())).collect();
        if !headers.iter().any(|(n, _)| n.eq_ignore_ascii_case("host")) {
            all.push(("Host", b"sandkeep.internal"));
        }
        let (path, query) = target
            .split_once('?')
            .map_or((target, None), |(path, query)| (path, Some(query)));
        let context = MetadataContext {
            sessions: &self.sessions,
            source: self,
        };
        let request = Request {
            method,
            path,
            query,
            headers: &all,
        };
        handle_at(&context, &request, now)
    }

    fn session(&self) -> String {
        let response = self.ask(
            "PUT",
            "/v1/session",
            &[("X-Sandkeep-Metadata-Ttl-Seconds", "600")],
        );
        assert_eq!(response.status, 200);
        response.body
    }
}

#[test]
fn the_two_steps() {
    let room = RealBox::new();
    let session = room.session();
    let headers = [("x-sandkeep-metadata-token", session.as_str())];
    let response = room.ask("GET", "/v1/identity", &headers);
    assert_eq!(response.status, 200);
    let document: Value = serde_json::from_str(&response.body).unwrap();
    assert_eq!(document["sandbox"], room.identity.sandbox.as_str());
    assert_eq!(document["org"], "acme");

    let response = room.ask(
        "GET",
        "/v1/token?audience=https%3A%2F%2Fvault.test",
        &headers,
    );
    assert_eq!(response.status, 200);
    let read = room
        .issuer
        .verify(
            &response.body,
            &"https://vault.test".parse().unwrap(),
            Some(&room.identity.sandbox),
            |_| true,
        )
        .unwrap();
    assert_eq!(
        read.claims,
        Claims::of(&room.identity, "https://vault.test".parse().unwrap())
    );
    assert!(
        response
            .headers
            .iter()
            .any(|(name, value)| *name == "cache-control" && value == "no-store")
    );
}

#[test]
fn the_way_of_ec2_works_too() {
    let room = RealBox::new();
    let response = room.ask(
        "PUT",
        "/latest/api/token",
        &[
            ("X-aws-ec2-metadata-token-ttl-seconds", "21600"),
            ("Host", "169.254.169.254:80"),
        ],
    );
    assert_eq!(response.status, 200);
    let headers = [("X-aws-ec2-metadata-token", response.body.as_str())];
    assert_eq!(room.ask("GET", "/v1/identity", &headers).status, 200);
}

#[test]
fn nothing_without_a_session() {
    let room = RealBox::new();
    let other = RealBox::new().session();
    for headers in [
        vec![],
        vec![("x-sandkeep-metadata-token", "")],
        vec![("x-sandkeep-metadata-token", "wrong")],
        // A box that was forked still has the session of its parent in memory.
        vec![("x-sandkeep-metadata-token", other.as_str())],
    ] {
        for target in ["/v1/identity", "/v1/token?audience=a"] {
            assert_eq!(room.ask("GET", target, &headers).status, 401, "{headers:?}");
        }
    }
    assert!(room.asked.borrow().is_empty());
    assert_eq!(room.ask("GET", "/", &[]).status, 200);
}

#[test]
fn a_session_ends_in_time() {
    let room = RealBox::new();
    let session = room.session();
    let headers = [("x-sandkeep-metadata-token", session.as_str())];
    let later = Timestamp::now().plus(Duration::from_secs(601));
    assert_eq!(
        room.ask_at("GET", "/v1/identity", &headers, later).status,
        401
    );
}

#[test]
fn a_session_needs_a_length_in_bounds() {
    let room = RealBox::new();
    for ttl in [
        "",
        "0",
        "21601",
        "-1",
        "+5",
        "1.5",
        "ten",
        "99999999999999999999",
    ] {
        let headers = [("X-Sandkeep-Metadata-Ttl-Seconds", ttl)];
        assert_eq!(
            room.ask("PUT", "/v1/session", &headers).status,
            400,
            "{ttl}"
        );
    }
    assert_eq!(room.ask("PUT", "/v1/session", &[]).status, 400);
}

#[test]
fn a_proxy_gets_nothing() {
    let room = RealBox::new();
    let session = room.session();
    for name in [
        "X-Forwarded-For",
        "x-forwarded-host",
        "Forwarded",
        "Via",
        "X-Real-IP",
    ] {
        let headers = [
            ("x-sandkeep-metadata-token", session.as_str()),
            (name, "127.0.0.1"),
            ("X-Sandkeep-Metadata-Ttl-Seconds", "60"),
        ];
        assert_eq!(
            room.ask("GET", "/v1/token?audience=a", &headers).status,
            403,
            "{name}"
        );
        assert_eq!(
            room.ask("PUT", "/v1/session", &headers).status,
            403,
            "{name}"
        );
    }
    assert!(room.asked.borrow().is_empty());
}

#[test]
fn a_rebound_name_gets_nothing() {
    let room = RealBox::new();
    for host in [
        "evil.test",
        "",
        "sandkeep.internal.evil.test",
        "169.254.169.254:8080",
        "sandkeep.internal@evil.test",
    ] {
        let headers = [("Host", host), ("X-Sandkeep-Metadata-Ttl-Seconds", "60")];
        assert_eq!(
            room.ask("PUT", "/v1/session", &headers).status,
            403,
            "{host}"
        );
    }
    let twice = [
        ("Host", "sandkeep.internal"),
        ("host", "evil.test"),
        ("X-Sandkeep-Metadata-Ttl-Seconds", "60"),
    ];
    assert_eq!(room.ask("PUT", "/v1/session", &twice).status, 400);
}

#[test]
fn an_audience_is_needed_once() {
    let room = RealBox::new();
    let session = room.session();
    let headers = [("x-sandkeep-metadata-token", session.as_str())];
    let long = format!("/v1/token?audience={}", "a".repeat(5000));
    for target in [
        "/v1/token",
        "/v1/token?audience=",
        "/v1/token?audience",
        "/v1/token?audience=a&audience=b",
        "/v1/token?audience=a&%61udience=b",
        "/v1/token?audience=a+b",
        "/v1/token?audience=%00",
        "/v1/token?audience=%ff",
        &long,
    ] {
        let status = room.ask("GET", target, &headers).status;
        assert!(status == 400 || status == 413, "{target}: {status}");
    }
    assert!(room.asked.borrow().is_empty());
    let both = [headers[0], ("x-aws-ec2-metadata-token", session.as_str())];
    assert_eq!(room.ask("GET", "/v1/token?audience=a", &both).status, 400);
}

#[test]
fn wrong_methods_and_pages() {
    let room = RealBox::new();
    for (method, path, status) in [
        ("POST", "/v1/session", 405),
        ("GET", "/latest/api/token", 405),
        ("PUT", "/v1/identity", 405),
        ("HEAD", "/", 405),
        ("OPTIONS", "/v1/token", 405),
        ("GET", "/latest/meta-data/iam/security-credentials/", 404),
        ("GET", "/v1/identity/", 404),
        ("GET", "//v1/identity", 404),
    ] {
        assert_eq!(
            room.ask(method, path, &[]).status,
            status,
            "{method} {path}"
        );
    }
}

#[test]
fn too_many_tokens_are_refused() {
    let room = RealBox::new();
    let session = room.session();
    let headers = [("x-sandkeep-metadata-token", session.as_str())];
    let now = Timestamp::now();
    let refused = (0..30)
        .map(|_| room.ask_at("GET", "/v1/token?audience=a", &headers, now))
        .find(|response| response.status == 429)
        .unwrap();
    assert!(
        refused
            .headers
            .contains(&("retry-after", Cow::Borrowed("1")))
    );
}

#[test]
fn our_faults_are_not_told_to_the_box() {
    let room = RealBox::new();
    let session = room.session();
    let headers = [("x-sandkeep-metadata-token", session.as_str())];
    let response = room.ask("GET", "/v1/token?audience=broken", &headers);
    assert_eq!(response.status, 500);
    assert!(!response.body.contains("/secret/path"));
}

#[test]
fn tokens_are_not_printed() {
    let room = RealBox::new();
    let response = room.ask(
        "PUT",
        "/v1/session",
        &[("X-Sandkeep-Metadata-Ttl-Seconds", "600")],
    );
    assert!(!format!("{response:?}").contains(&response.body));
}

#[test]
fn a_token_is_asked_for_by_its_name_too() {
    let room = RealBox::new();
    let session = room.sessions.start(60, Timestamp::now()).unwrap();
    let headers = [("x-sandkeep-metadata-token", session.expose())];
    let response = room.ask("GET", "/v1/token?name=vault", &headers);
    assert_eq!(response.status, 200, "{}", response.body);
    assert_eq!(*room.asked.borrow(), ["https://vault.test"]);
    for (query, status) in [
        ("name=other", 404),
        ("name=vault&audience=x", 400),
        ("name=a&name=b", 400),
        ("", 400),
    ] {
        let response = room.ask("GET", &format!("/v1/token?{query}"), &headers);
        assert_eq!(response.status, status, "{query}");
    }
    assert_eq!(room.asked.borrow().len(), 1);
}
