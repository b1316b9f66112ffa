//! Signed file URLs: who holds one may read or write one path, without the token.

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use percent_encoding::percent_decode;
use sandkeep_model::{SandboxId, Secret};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// What the URL allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
}

impl Operation {
    const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// The parts of a `/files` query that are signed, decoded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileQuery {
    pub path: Vec<u8>,
    pub username: Vec<u8>,
    pub signature: Option<Vec<u8>>,
    /// As it came: it is signed as text.
    pub expiration: Option<Vec<u8>>,
    /// One of these came twice. The agent could read another one than is checked here, so
    /// such a query is never validly signed.
    pub ambiguous: bool,
}

impl FileQuery {
    pub fn parse(query: &str) -> Self {
        let mut found = Self::default();
        let (mut path, mut username) = (None, None);
        for (name, value) in pairs(query) {
            let slot = match name.as_slice() {
                b"path" => &mut path,
                b"username" => &mut username,
                b"signature" => &mut found.signature,
                b"signature_expiration" => &mut found.expiration,
                _ => continue,
            };
            found.ambiguous |= slot.replace(value).is_some();
        }
        found.path = path.unwrap_or_default();
        found.username = username.unwrap_or_default();
        found
    }

    /// Whether the signature was made with this token. Constant time.
    pub fn signed_with(&self, operation: Operation, token: &Secret) -> bool {
        let Some(given) = &self.signature else {
            return false;
        };
        let made = self.digest(operation, token);
        let equal: bool = made.as_bytes().ct_eq(given).into();
        equal && !self.ambiguous
    }

    /// The box whose token made the signature. Every token is tried, so the time tells nothing.
    pub fn signer(
        &self,
        operation: Operation,
        tokens: Vec<(SandboxId, Secret)>,
    ) -> Option<SandboxId> {
        let mut found = None;
        for (id, token) in tokens {
            if self.signed_with(operation, &token) {
                found = Some(id);
            }
        }
        found
    }

    /// Whether the time it was made for is over. A time nobody can read is over.
    pub fn expired(&self, now_seconds: i64) -> bool {
        match &self.expiration {
            None => false,
            Some(text) => std::str::from_utf8(text)
                .ok()
                .and_then(|text| text.parse::<i64>().ok())
                .is_none_or(|end| end < now_seconds),
        }
    }

    fn digest(&self, operation: Operation, token: &Secret) -> String {
        let mut hash = Sha256::new();
        hash.update(&self.path);
        hash.update(":");
        hash.update(operation.name());
        hash.update(":");
        hash.update(&self.username);
        hash.update(":");
        hash.update(token.expose());
        if let Some(expiration) = &self.expiration {
            hash.update(":");
            hash.update(expiration);
        }
        format!("v1_{}", STANDARD_NO_PAD.encode(hash.finalize()))
    }
}

/// The signature for a file URL.
pub fn sign(
    path: &str,
    operation: Operation,
    username: Option<&str>,
    token: &Secret,
    expiration: Option<i64>,
) -> String {
    let query = FileQuery {
        path: path.into(),
        username: username.unwrap_or_default().into(),
        signature: None,
        expiration: expiration.map(|end| end.to_string().into_bytes()),
        ambiguous: false,
    };
    query.digest(operation, token)
}

/// `+` and `%20` are both a space.
fn pairs(query: &str) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> {
    query.split('&').filter(|p| !p.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(name), decoded(value))
    })
}

fn decoded(text: &str) -> Vec<u8> {
    let spaced = text.replace('+', " ");
    percent_decode(spaced.as_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> Secret {
        Secret::new("tok123")
    }

    /// Made with `printf '%s' RAW | openssl dgst -sha256 -binary | base64`.
    #[test]
    fn known_signatures() {
        for (path, operation, user, end, signature) in VECTORS {
            assert_eq!(sign(path, *operation, *user, &token(), *end), *signature);
        }
    }

    type Vector = (
        &'static str,
        Operation,
        Option<&'static str>,
        Option<i64>,
        &'static str,
    );

    const VECTORS: &[Vector] = &[
        (
            "/home/user/a.txt",
            Operation::Read,
            None,
            None,
            "v1_byj2OB/vujgbES/1KAKCaR27E+9eOrB6PzeTnIL8L6M",
        ),
        (
            "a b.txt",
            Operation::Write,
            Some("root"),
            Some(1700000000),
            "v1_GXVKSvOkNEILvQpoMxkbW6Y46bUsBGtP9uYCTzdL6Sw",
        ),
        (
            "",
            Operation::Write,
            None,
            None,
            "v1_IRUdH3q1eblRa51Oe8cPYb6nPrDFzSdh3EscgPkD+YA",
        ),
        (
            "/ü",
            Operation::Read,
            Some("user"),
            Some(-5),
            "v1_tmsRAlipCcBjXAjMeLAe40i+iRflctrqdDGAZt2EP+w",
        ),
    ];

    fn url(path: &str, user: Option<&str>, end: Option<i64>) -> String {
        let signature = sign(path, Operation::Read, user, &token(), end);
        let coded = |text: &str| {
            percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC)
                .to_string()
        };
        let mut url = format!("path={}", coded(path));
        if let Some(user) = user {
            url += &format!("&username={}", coded(user));
        }
        url += &format!("&signature={}", coded(&signature));
        if let Some(end) = end {
            url += &format!("&signature_expiration={end}");
        }
        url
    }

    #[test]
    fn what_is_signed_is_accepted_and_nothing_else() {
        let good = FileQuery::parse(&url("/home/user/a b+c.txt", Some("root"), Some(99)));
        assert_eq!(good.path, b"/home/user/a b+c.txt");
        assert!(good.signed_with(Operation::Read, &token()));
        assert!(!good.signed_with(Operation::Write, &token()));
        assert!(!good.signed_with(Operation::Read, &Secret::new("tok124")));
        for change in [
            FileQuery {
                path: b"/etc/shadow".to_vec(),
                ..good.clone()
            },
            FileQuery {
                username: b"user".to_vec(),
                ..good.clone()
            },
            FileQuery {
                expiration: Some(b"999999".to_vec()),
                ..good.clone()
            },
            FileQuery {
                expiration: None,
                ..good.clone()
            },
            FileQuery {
                signature: None,
                ..good.clone()
            },
            FileQuery {
                signature: Some(Vec::new()),
                ..good
            },
        ] {
            assert!(!change.signed_with(Operation::Read, &token()), "{change:?}");
        }
    }

    #[test]
    fn a_plus_is_a_space() {
        assert_eq!(FileQuery::parse("path=a+b").path, b"a b");
        assert_eq!(FileQuery::parse("path=a%20b").path, b"a b");
        assert_eq!(FileQuery::parse("path=a%2Bb").path, b"a+b");
        assert_eq!(FileQuery::parse("path=%ff%").path, b"\xff%");
    }

    #[test]
    fn what_comes_twice_is_not_signed() {
        let good = url("/a", None, None);
        for (more, valid) in [("x=1&x=2", true), ("path=/a", false), ("p%61th=/b", false)] {
            for query in [format!("{good}&{more}"), format!("{more}&{good}")] {
                let query = FileQuery::parse(&query);
                assert_eq!(
                    query.signed_with(Operation::Read, &token()),
                    valid,
                    "{more}"
                );
            }
        }
    }

    #[test]
    fn the_signer_is_found_among_many() {
        let mut tokens: Vec<_> = (0..1000)
            .map(|_| (SandboxId::random(), Secret::random()))
            .collect();
        let wanted = SandboxId::random();
        tokens.insert(500, (wanted.clone(), token()));
        let query = FileQuery::parse(&url("x", None, None));
        assert_eq!(query.signer(Operation::Read, tokens.clone()), Some(wanted));
        assert_eq!(query.signer(Operation::Write, tokens), None);
    }

    #[test]
    fn times_end() {
        let at = |text: Option<&str>| FileQuery {
            expiration: text.map(|t| t.as_bytes().to_vec()),
            ..FileQuery::default()
        };
        assert!(!at(None).expired(100));
        assert!(!at(Some("100")).expired(100));
        assert!(at(Some("99")).expired(100));
        assert!(at(Some("soon")).expired(100));
        assert!(at(Some("")).expired(100));
    }
}
