//! The two names of an issuer: the URL verifiers fetch from, and the trust domain in subjects.

use std::{fmt, str::FromStr};

use sandkeep_model::{Error, Result, SandboxId};

/// `https://host[:port][/path]`, without a slash at the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssuerUrl(String);

impl IssuerUrl {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The address of a document below the issuer; `path` starts with a slash.
    pub fn join(&self, path: &str) -> String {
        format!("{}{path}", self.0)
    }

    /// The host alone: a fine trust domain when nobody chose one.
    pub fn host(&self) -> &str {
        let rest = self.0.split_once("://").map_or("", |(_, rest)| rest);
        let authority = rest.split('/').next().unwrap_or_default();
        if authority.starts_with('[') {
            return authority.split_inclusive(']').next().unwrap_or_default();
        }
        authority.split(':').next().unwrap_or_default()
    }
}

impl FromStr for IssuerUrl {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| {
            Error::invalid("issuer", format!("the issuer URL {why}"))
                .hint("write it like https://sandkeep.example.org")
        };
        let rest = text
            .strip_prefix("https://")
            .or_else(|| text.strip_prefix("http://"))
            .ok_or_else(|| bad("does not start with https:// or http://"))?;
        if text.len() > 512 || !text.chars().all(|c| c.is_ascii_graphic()) {
            return Err(bad("is too long or holds characters a URL does not have"));
        }
        if rest.contains(['?', '#', '@', '"', '\\', '<', '>']) {
            return Err(bad(
                "holds a query, a fragment, user information or a quote",
            ));
        }
        let url = Self(text.trim_end_matches('/').to_owned());
        if url.host().is_empty() {
            return Err(bad("names no host"));
        }
        Ok(url)
    }
}

impl fmt::Display for IssuerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The first part of a SPIFFE id: `[a-z0-9._-]`, at most 255 characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustDomain(String);

impl TrustDomain {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The subject of every token of this box.
    pub fn subject(&self, id: &SandboxId) -> String {
        format!("spiffe://{}/box/{id}", self.0)
    }
}

impl FromStr for TrustDomain {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let lower = text.to_ascii_lowercase();
        let good = (1..=255).contains(&lower.len())
            && lower
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b));
        if good {
            return Ok(Self(lower));
        }
        Err(Error::invalid(
            "trust_domain",
            "a trust domain is 1 to 255 of a-z, 0-9, dot, dash and underscore",
        )
        .hint("a host name of yours is a good one, e.g. sandkeep.example.org"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn issuer_urls() {
        let url: IssuerUrl = "https://keep.test:8443/sk/".parse().unwrap();
        assert_eq!(url.as_str(), "https://keep.test:8443/sk");
        assert_eq!(url.host(), "keep.test");
        assert_eq!(url.join("/jwks"), "https://keep.test:8443/sk/jwks");
        let six: IssuerUrl = "http://[::1]:3000".parse().unwrap();
        assert_eq!(six.host(), "[::1]");
        for bad in [
            "",
            "keep.test",
            "ftp://keep.test",
            "https://",
            "https:///x",
            "https://a@b",
            "https://a?b",
            "https://a b",
            "https://a/#",
        ] {
            assert!(bad.parse::<IssuerUrl>().is_err(), "{bad}");
        }
    }

    #[test]
    fn subjects_are_spiffe_ids() {
        let domain: TrustDomain = "Keep.test".parse().unwrap();
        let id = SandboxId::random();
        assert_eq!(domain.subject(&id), format!("spiffe://keep.test/box/{id}"));
        for bad in ["", "a/b", "a:1", "[::1]", "é", "a b"] {
            assert!(bad.parse::<TrustDomain>().is_err(), "{bad}");
        }
    }
}
