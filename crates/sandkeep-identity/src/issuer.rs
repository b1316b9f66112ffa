//! Making tokens, checking them, and the documents others check them with.

use std::{
    path::Path,
    sync::{PoisonError, RwLock, RwLockReadGuard},
    time::Duration,
};

use jsonwebtoken::{Header, Validation, decode, decode_header, encode, errors::ErrorKind};
use sandkeep_model::{Code, Error, Result, SandboxId, Secret, Timestamp, random_token};
use serde_json::{Value, json};

use crate::{
    Audience, Claims, IssuerUrl, SigningAlgorithm, TrustDomain,
    claims::Payload,
    key_ring::{KeyRing, LEEWAY_SECONDS},
};

/// Where verifiers find the keys, below the issuer URL.
pub const JWKS_PATH: &str = "/.well-known/jwks.json";
/// Where they begin to look.
pub const OPENID_CONFIGURATION_PATH: &str = "/.well-known/openid-configuration";
/// Our longest token, with every field at its bound and an RSA signature, is below 10 KiB.
const MAX_TOKEN_BYTES: usize = 16 * 1024;

#[derive(Debug, Clone)]
pub struct IssuerConfig {
    pub url: IssuerUrl,
    pub trust_domain: TrustDomain,
    pub algorithm: SigningAlgorithm,
}

/// A token just made. Its id and end go into the audit, its text only to the box.
#[derive(Debug, Clone)]
pub struct Minted {
    pub token: Secret,
    pub jti: String,
    pub expires: Timestamp,
}

/// A token that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    pub claims: Claims,
    pub subject: String,
    pub jti: String,
    pub expires: Timestamp,
}

/// The OIDC issuer of this server.
pub struct Issuer {
    config: IssuerConfig,
    keys: RwLock<KeyRing>,
}

impl Issuer {
    /// `dir` is `identity/` in the state directory.
    pub fn open(dir: &Path, config: IssuerConfig) -> Result<Self> {
        let keys = KeyRing::open(dir, config.algorithm, Timestamp::now())
            .map_err(|error| error.context("opening the identity keys"))?;
        Ok(Self {
            config,
            keys: RwLock::new(keys),
        })
    }

    pub fn config(&self) -> &IssuerConfig {
        &self.config
    }

    /// The subject of this box's tokens.
    pub fn subject(&self, id: &SandboxId) -> String {
        self.config.trust_domain.subject(id)
    }

    pub fn mint(&self, claims: &Claims) -> Result<Minted> {
        self.mint_at(claims, Timestamp::now())
    }

    fn mint_at(&self, claims: &Claims, now: Timestamp) -> Result<Minted> {
        let issued = u64::try_from(now.seconds()).unwrap_or(0);
        let expires = now.plus(claims.lifetime.duration());
        let payload = Payload {
            iss: self.config.url.as_str().to_owned(),
            sub: self.subject(&claims.sandbox),
            aud: claims.audience.clone(),
            iat: issued,
            nbf: issued,
            exp: issued + claims.lifetime.seconds(),
            jti: random_token(24),
            sandbox: claims.sandbox.clone(),
            template: claims.template.clone(),
            org: claims.org.clone(),
            task: claims.task.clone(),
            scope: claims.scopes.to_claim(),
            parent: claims.parent.clone(),
        };
        let keys = self.keys();
        let key = keys.signing()?;
        let mut header = Header::new(key.algorithm.jose());
        header.kid = Some(key.kid.clone());
        let token = encode(&header, &payload, &key.signs)
            .map_err(|error| Error::internal(format!("signing a token: {error}")))?;
        Ok(Minted {
            token: Secret::new(token),
            jti: payload.jti,
            expires,
        })
    }

    /// Checks a token that was presented to us, by box `expected` if that is known.
    ///
    /// `is_alive` tells whether a box still exists: its tokens end with it.
    pub fn verify(
        &self,
        token: &str,
        audience: &Audience,
        expected: Option<&SandboxId>,
        is_alive: impl Fn(&SandboxId) -> bool,
    ) -> Result<Verified> {
        let payload = self.read(token, audience)?;
        let another = expected.is_some_and(|expected| payload.sandbox != *expected);
        if another || payload.sub != self.subject(&payload.sandbox) {
            return Err(
                Error::new(Code::PermissionDenied, "this token belongs to another box")
                    .hint("each box asks for tokens of its own, also after a fork"),
            );
        }
        if !is_alive(&payload.sandbox) {
            return Err(refused("the box this token belongs to is gone"));
        }
        Ok(Verified {
            subject: payload.sub.clone(),
            jti: payload.jti.clone(),
            expires: Timestamp::from_millis(
                i64::try_from(payload.exp.saturating_mul(1000)).unwrap_or(i64::MAX),
            ),
            claims: payload.into_claims()?,
        })
    }

    /// Signature, issuer, audience and time.
    fn read(&self, token: &str, audience: &Audience) -> Result<Payload> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(refused("the token is too long"));
        }
        let kid = decode_header(token)
            .map_err(|_| refused("this is no token of ours"))?
            .kid
            .ok_or_else(|| refused("the token names no key"))?;
        let keys = self.keys();
        let key = keys
            .find(&kid, Timestamp::now())
            .ok_or_else(|| refused("the token is signed with a key that is unknown or retired"))?;
        // The algorithm is the key's, never the token's own word.
        let mut rules = Validation::new(key.algorithm.jose());
        rules.leeway = LEEWAY_SECONDS;
        rules.validate_nbf = true;
        rules.set_audience(&[audience]);
        rules.set_issuer(&[self.config.url.as_str()]);
        rules.set_required_spec_claims(&["exp", "nbf", "aud", "iss", "sub"]);
        decode::<Payload>(token, &key.verifies, &rules)
            .map(|read| read.claims)
            .map_err(|error| match error.kind() {
                ErrorKind::ExpiredSignature => refused("the token has expired"),
                ErrorKind::ImmatureSignature => refused("the token is not valid yet"),
                ErrorKind::InvalidAudience => refused("the token is for another audience"),
                ErrorKind::InvalidIssuer => refused("the token is of another issuer"),
                _ => refused("the signature of the token is wrong"),
            })
    }

    /// A new key signs from now on; the old one verifies until its last token has ended. Returns
    /// the id of the new key.
    pub fn rotate(&self) -> Result<String> {
        self.keys
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .rotate(self.config.algorithm, Timestamp::now())
    }

    /// Rotates if the signing key has signed for this long. Returns the id of the new key.
    pub fn rotate_when_older(&self, age: Duration) -> Result<Option<String>> {
        let made = self.keys().signing()?.created;
        if made.plus(age) > Timestamp::now() {
            return Ok(None);
        }
        self.rotate().map(Some)
    }

    /// The key set, as served at `/.well-known/jwks.json`.
    pub fn jwks(&self) -> Value {
        let keys = self.keys();
        let list: Vec<_> = keys.live(Timestamp::now()).map(|key| &key.public).collect();
        json!({ "keys": list })
    }

    /// As served at `/.well-known/openid-configuration`.
    pub fn openid_configuration(&self) -> Value {
        let keys = self.keys();
        let mut algorithms: Vec<_> = keys
            .live(Timestamp::now())
            .map(|key| key.algorithm.name())
            .collect();
        algorithms.sort_unstable();
        algorithms.dedup();
        json!({
            "issuer": self.config.url.as_str(),
            "jwks_uri": self.config.url.join(JWKS_PATH),
            "response_types_supported": ["id_token"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": algorithms,
            "scopes_supported": ["openid"],
            "claims_supported": Payload::NAMES,
        })
    }

    fn keys(&self) -> RwLockReadGuard<'_, KeyRing> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Issuer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Issuer")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

fn refused(why: &str) -> Error {
    Error::new(Code::Unauthenticated, why).hint("ask the metadata service of the box for a new one")
}

#[cfg(test)]
mod tests;
