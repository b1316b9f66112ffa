use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, jwk::JwkSet};

use super::*;
use crate::{Lifetime, Scopes};

struct Room {
    _dir: tempfile::TempDir,
    issuer: Issuer,
}

fn room(algorithm: SigningAlgorithm) -> Room {
    let dir = tempfile::tempdir().unwrap();
    let issuer = Issuer::open(
        &dir.path().join("identity"),
        IssuerConfig {
            url: "https://keep.test".parse().unwrap(),
            trust_domain: "keep.test".parse().unwrap(),
            algorithm,
        },
    )
    .unwrap();
    Room { _dir: dir, issuer }
}

fn claims() -> Claims {
    Claims {
        sandbox: SandboxId::random(),
        template: "base".parse().unwrap(),
        org: Some("acme".parse().unwrap()),
        task: Some("fix-42".parse().unwrap()),
        scopes: Scopes::new(vec!["repo:acme/web:read".into(), "ci".into()]).unwrap(),
        parent: Some(SandboxId::random()),
        audience: audience(),
        lifetime: Lifetime::from_seconds(600).unwrap(),
    }
}

fn audience() -> Audience {
    "https://vault.test".parse().unwrap()
}

fn alive(_: &SandboxId) -> bool {
    true
}

/// A token of our payload, with a header and signature of the attacker's choice.
fn forged(genuine: &str, header: &Value, sign: impl Fn(&str) -> String) -> String {
    let payload = genuine.split('.').nth(1).unwrap();
    let message = format!("{}.{payload}", URL_SAFE_NO_PAD.encode(header.to_string()));
    let signature = sign(&message);
    format!("{message}.{signature}")
}

#[test]
fn minted_and_verified_with_each_algorithm() {
    for algorithm in [
        SigningAlgorithm::Es256,
        SigningAlgorithm::EdDsa,
        SigningAlgorithm::Rs256,
    ] {
        let room = room(algorithm);
        let made = claims();
        let minted = room.issuer.mint(&made).unwrap();
        let read = room
            .issuer
            .verify(
                minted.token.expose(),
                &audience(),
                Some(&made.sandbox),
                alive,
            )
            .unwrap();
        assert_eq!(read.claims, made);
        assert_eq!(read.jti, minted.jti);
        assert_eq!(read.expires.seconds(), minted.expires.seconds());
        let anybody = room
            .issuer
            .verify(minted.token.expose(), &audience(), None, alive);
        assert_eq!(anybody.unwrap(), read);
    }
}

/// What a verifier elsewhere does, with nothing but our two documents.
#[test]
fn a_stranger_can_verify_by_the_documents() {
    for algorithm in [
        SigningAlgorithm::Es256,
        SigningAlgorithm::EdDsa,
        SigningAlgorithm::Rs256,
    ] {
        let room = room(algorithm);
        let made = claims();
        let token = room.issuer.mint(&made).unwrap().token;
        let configuration = room.issuer.openid_configuration();
        assert_eq!(
            configuration["jwks_uri"],
            "https://keep.test/.well-known/jwks.json"
        );
        assert_eq!(
            configuration["id_token_signing_alg_values_supported"],
            json!([algorithm.name()])
        );
        let set: JwkSet = serde_json::from_value(room.issuer.jwks()).unwrap();
        let header = decode_header(token.expose()).unwrap();
        let key = set.find(&header.kid.unwrap()).unwrap();
        let mut rules = Validation::new(header.alg);
        rules.set_audience(&["https://vault.test"]);
        rules.set_issuer(&["https://keep.test"]);
        let payload = decode::<Value>(token.expose(), &DecodingKey::from_jwk(key).unwrap(), &rules)
            .unwrap()
            .claims;
        assert_eq!(
            payload["sub"],
            format!("spiffe://keep.test/box/{}", made.sandbox)
        );
        assert_eq!(payload["scope"], "repo:acme/web:read ci");
        assert_eq!(
            payload["exp"].as_u64().unwrap() - payload["iat"].as_u64().unwrap(),
            600
        );
        let object = payload.as_object().unwrap();
        assert!(
            object
                .keys()
                .all(|name| Payload::NAMES.contains(&name.as_str()))
        );
        assert_eq!(object.len(), Payload::NAMES.len());
    }
}

#[test]
fn every_token_has_its_own_id() {
    let room = room(SigningAlgorithm::EdDsa);
    let made = claims();
    let (a, b) = (
        room.issuer.mint(&made).unwrap(),
        room.issuer.mint(&made).unwrap(),
    );
    assert_ne!(a.jti, b.jti);
    assert_ne!(a.token, b.token);
}

#[test]
fn a_token_of_one_box_is_refused_from_another() {
    let room = room(SigningAlgorithm::Es256);
    let token = room.issuer.mint(&claims()).unwrap().token;
    let error = room
        .issuer
        .verify(
            token.expose(),
            &audience(),
            Some(&SandboxId::random()),
            alive,
        )
        .unwrap_err();
    assert_eq!(error.code, Code::PermissionDenied);
}

#[test]
fn a_token_ends_with_its_box() {
    let room = room(SigningAlgorithm::Es256);
    let made = claims();
    let token = room.issuer.mint(&made).unwrap().token;
    let error = room
        .issuer
        .verify(token.expose(), &audience(), Some(&made.sandbox), |_| false)
        .unwrap_err();
    assert!(error.message.contains("gone"), "{error}");
}

#[test]
fn wrong_audience_expired_and_early_are_refused() {
    let room = room(SigningAlgorithm::Es256);
    let made = claims();
    let check = |token: &Secret, audience: &Audience| {
        room.issuer
            .verify(token.expose(), audience, Some(&made.sandbox), alive)
            .unwrap_err()
            .message
    };
    let token = room.issuer.mint(&made).unwrap().token;
    let other = "https://other.test".parse().unwrap();
    assert!(check(&token, &other).contains("another audience"));

    let now = Timestamp::now();
    let past = Timestamp::from_millis(now.millis() - 3_600_000);
    let token = room.issuer.mint_at(&made, past).unwrap().token;
    assert!(check(&token, &audience()).contains("expired"));

    let future = now.plus(Duration::from_secs(3600));
    let token = room.issuer.mint_at(&made, future).unwrap().token;
    assert!(check(&token, &audience()).contains("not valid yet"));
}

#[test]
fn another_issuers_token_is_refused() {
    let (ours, theirs) = (room(SigningAlgorithm::Es256), room(SigningAlgorithm::Es256));
    let made = claims();
    let token = theirs.issuer.mint(&made).unwrap().token;
    let error = ours
        .issuer
        .verify(token.expose(), &audience(), Some(&made.sandbox), alive)
        .unwrap_err();
    assert!(error.message.contains("unknown"), "{error}");
}

#[test]
fn algorithm_confusion_is_refused() {
    for algorithm in [
        SigningAlgorithm::Es256,
        SigningAlgorithm::EdDsa,
        SigningAlgorithm::Rs256,
    ] {
        let room = room(algorithm);
        let made = claims();
        let genuine = room.issuer.mint(&made).unwrap().token;
        let kid = decode_header(genuine.expose()).unwrap().kid.unwrap();
        let jwk = room.issuer.jwks()["keys"][0].clone();
        let mut forgeries = vec![
            forged(
                genuine.expose(),
                &json!({"alg": "none", "kid": kid}),
                |_| String::new(),
            ),
            forged(
                genuine.expose(),
                &json!({"alg": "None", "kid": kid}),
                |_| String::new(),
            ),
        ];
        // The public key, in every form an attacker could write it, as the HMAC secret.
        for secret in [jwk.to_string(), jwk["x"].to_string(), jwk["n"].to_string()] {
            let key = EncodingKey::from_secret(secret.as_bytes());
            let mut header = Header::new(Algorithm::HS256);
            header.kid = Some(kid.clone());
            let payload: Value = serde_json::from_slice(
                &URL_SAFE_NO_PAD
                    .decode(genuine.expose().split('.').nth(1).unwrap())
                    .unwrap(),
            )
            .unwrap();
            forgeries.push(encode(&header, &payload, &key).unwrap());
        }
        // The genuine signature under a header that names another algorithm or brings a key.
        let own = genuine.expose().rsplit('.').next().unwrap().to_owned();
        for header in [
            json!({"alg": "ES384", "kid": kid}),
            json!({"alg": "HS256", "kid": kid}),
            json!({"alg": algorithm.name()}),
            json!({"alg": algorithm.name(), "kid": "../keys", "jwk": jwk}),
        ] {
            forgeries.push(forged(genuine.expose(), &header, |_| own.clone()));
        }
        for forgery in forgeries {
            let verdict = room
                .issuer
                .verify(&forgery, &audience(), Some(&made.sandbox), alive);
            assert_eq!(
                verdict.unwrap_err().code,
                Code::Unauthenticated,
                "{forgery}"
            );
        }
    }
}

/// A key the attacker made and put into the header changes nothing.
#[test]
fn a_key_that_comes_with_the_token_is_not_used() {
    let (ours, theirs) = (room(SigningAlgorithm::Es256), room(SigningAlgorithm::Es256));
    let made = claims();
    let genuine = ours.issuer.mint(&made).unwrap().token;
    let kid = decode_header(genuine.expose()).unwrap().kid.unwrap();
    let evil = theirs.issuer.keys();
    let evil = evil.signing().unwrap();
    let mut header = Header::new(Algorithm::ES256);
    header.kid = Some(kid);
    header.jwk = Some(evil.public.clone());
    let payload: Value = serde_json::from_slice(
        &URL_SAFE_NO_PAD
            .decode(genuine.expose().split('.').nth(1).unwrap())
            .unwrap(),
    )
    .unwrap();
    let token = encode(&header, &payload, &evil.signs).unwrap();
    assert!(
        ours.issuer
            .verify(&token, &audience(), Some(&made.sandbox), alive)
            .is_err()
    );
}

#[test]
fn a_change_of_any_byte_of_a_token_is_noticed() {
    let room = room(SigningAlgorithm::EdDsa);
    let made = claims();
    let token = room.issuer.mint(&made).unwrap().token;
    for at in 0..token.expose().len() {
        for change in [1_u8, 2, 32] {
            let mut bytes = token.expose().as_bytes().to_vec();
            bytes[at] ^= change;
            let Ok(text) = String::from_utf8(bytes) else {
                continue;
            };
            let verdict = room
                .issuer
                .verify(&text, &audience(), Some(&made.sandbox), alive);
            assert!(verdict.is_err(), "byte {at} changed by {change}");
        }
    }
    for end in 0..token.expose().len() {
        let cut = &token.expose()[..end];
        assert!(
            room.issuer
                .verify(cut, &audience(), Some(&made.sandbox), alive)
                .is_err()
        );
    }
    let long = "a".repeat(MAX_TOKEN_BYTES + 1);
    assert!(
        room.issuer
            .verify(&long, &audience(), Some(&made.sandbox), alive)
            .is_err()
    );
}

#[test]
fn tokens_outlive_a_rotation_and_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("identity");
    let open = || {
        Issuer::open(
            &path,
            IssuerConfig {
                url: "https://keep.test".parse().unwrap(),
                trust_domain: "keep.test".parse().unwrap(),
                algorithm: SigningAlgorithm::Es256,
            },
        )
        .unwrap()
    };
    let made = claims();
    let issuer = open();
    let before = issuer.mint(&made).unwrap().token;
    let kid = issuer.rotate().unwrap();
    let after = issuer.mint(&made).unwrap().token;
    assert_eq!(decode_header(after.expose()).unwrap().kid.unwrap(), kid);
    drop(issuer);
    let issuer = open();
    for token in [before, after] {
        issuer
            .verify(token.expose(), &audience(), Some(&made.sandbox), alive)
            .unwrap();
    }
    assert_eq!(issuer.jwks()["keys"].as_array().unwrap().len(), 2);
    let hour = Duration::from_secs(3600);
    assert_eq!(issuer.rotate_when_older(hour).unwrap(), None);
    assert!(issuer.rotate_when_older(Duration::ZERO).unwrap().is_some());
    assert_eq!(issuer.jwks()["keys"].as_array().unwrap().len(), 3);
}

#[test]
fn a_token_is_not_printed() {
    let room = room(SigningAlgorithm::Es256);
    let minted = room.issuer.mint(&claims()).unwrap();
    let shown = format!("{minted:?} {:?}", room.issuer);
    assert!(!shown.contains(&minted.token.expose()[..20]));
}
