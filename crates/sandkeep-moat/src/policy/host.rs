//! The name or address of a destination, in one spelling.
//!
//! Parser confusion (one part of a program reads `evil.test` where another reads
//! `good.test`) is ruled out by making this type once and letting only it travel.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use serde::{Deserialize, Serialize};

/// A canonical destination: a lower-case ASCII name without a trailing dot, or an address.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Host {
    Name(String),
    Address(IpAddr),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostError {
    shown: String,
    why: &'static str,
}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\" is no host name: {}", self.shown, self.why)
    }
}

impl std::error::Error for HostError {}

impl Host {
    pub const MAX_LENGTH: usize = 253;

    /// The name, when it is one.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Name(name) => Some(name),
            Self::Address(_) => None,
        }
    }

    /// The address, when it is one.
    pub const fn address(&self) -> Option<IpAddr> {
        match self {
            Self::Address(address) => Some(*address),
            Self::Name(_) => None,
        }
    }

    /// Whether this is `domain` itself or below it, by whole labels.
    pub fn is_below(&self, domain: &str) -> bool {
        self.name().is_some_and(|name| {
            name.strip_suffix(domain)
                .is_some_and(|rest| rest.ends_with('.'))
        })
    }

    /// Parses the authority of a URL or a `Host` header: `host`, `host:port`, `[v6]:port`. User
    /// information is refused: it exists to confuse.
    pub fn parse_authority(text: &str) -> Result<(Self, Option<u16>), HostError> {
        let bad = |why| HostError::new(text, why);
        if text.contains('@') {
            return Err(bad("it holds user information"));
        }
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let (inner, after) = rest
                .split_once(']')
                .ok_or_else(|| bad("a bracket is not closed"))?;
            if inner.parse::<Ipv6Addr>().is_err() {
                return Err(bad("only an IPv6 address stands in brackets"));
            }
            let port = match after {
                "" => None,
                _ => Some(
                    after
                        .strip_prefix(':')
                        .ok_or_else(|| bad("something follows the bracket"))?,
                ),
            };
            (inner, port)
        } else if let Some((host, port)) = text.rsplit_once(':') {
            if host.contains(':') {
                return Err(bad("an IPv6 address needs brackets"));
            }
            (host, Some(port))
        } else {
            (text, None)
        };
        let port = match port {
            None => None,
            Some(digits) => {
                let plain = !digits.is_empty()
                    && digits.len() <= 5
                    && digits.bytes().all(|b| b.is_ascii_digit());
                let number = digits
                    .parse::<u16>()
                    .ok()
                    .filter(|port| plain && *port != 0);
                Some(number.ok_or_else(|| bad("the port is no number from 1 to 65535"))?)
            }
        };
        Ok((host.parse()?, port))
    }
}

impl HostError {
    fn new(text: &str, why: &'static str) -> Self {
        Self {
            shown: text.chars().filter(|c| !c.is_control()).take(80).collect(),
            why,
        }
    }
}

impl FromStr for Host {
    type Err = HostError;

    fn from_str(text: &str) -> Result<Self, HostError> {
        let bad = |why| HostError::new(text, why);
        if text.is_empty() || text.len() > 4 * Self::MAX_LENGTH {
            return Err(bad("it is empty or too long"));
        }
        if let Some(found) = text
            .chars()
            .find(|c| c.is_control() || c.is_whitespace() || "%/\\@?#[]<>^|`{}\"'".contains(*c))
        {
            return Err(bad(if found == '%' {
                "it holds a percent sign or a zone"
            } else {
                "it holds a character no host name has"
            }));
        }
        if text.contains(':') {
            return text
                .parse::<Ipv6Addr>()
                .map(|v6| Self::Address(plain_address(v6)))
                .map_err(|_| bad("it is no IPv6 address"));
        }
        let ascii = idna::domain_to_ascii_cow(text.as_bytes(), idna::AsciiDenyList::URL)
            .map_err(|_| bad("it is no valid international name"))?;
        let name = ascii.strip_suffix('.').unwrap_or(&ascii);
        if name.is_empty() || name.len() > Self::MAX_LENGTH {
            return Err(bad("it is empty or longer than 253 characters"));
        }
        if let Some(last) = name.rsplit('.').next()
            && looks_like_a_number(last)
        {
            // Browsers and libc read `0x7f.1`, `017700000001` and `2130706433` as addresses. Only
            // the one plain spelling is taken; the others are refused rather than guessed.
            return name
                .parse::<Ipv4Addr>()
                .map(|v4| Self::Address(v4.into()))
                .map_err(|_| bad("it is a number, but no address in the plain form 192.0.2.1"));
        }
        for label in name.split('.') {
            let good = !label.is_empty()
                && label.len() <= 63
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
            if !good {
                return Err(bad(
                    "a label is empty, longer than 63 characters or holds a wrong character",
                ));
            }
        }
        Ok(Self::Name(name.to_ascii_lowercase()))
    }
}

/// An IPv4 address dressed as IPv6 is the IPv4 address.
fn plain_address(v6: Ipv6Addr) -> IpAddr {
    v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
}

/// The WHATWG rule: a last label that is a number makes the whole an address.
fn looks_like_a_number(label: &str) -> bool {
    let hex = label
        .strip_prefix("0x")
        .or_else(|| label.strip_prefix("0X"));
    match hex {
        Some(digits) => digits.bytes().all(|b| b.is_ascii_hexdigit()),
        None => !label.is_empty() && label.bytes().all(|b| b.is_ascii_digit()),
    }
}

impl From<IpAddr> for Host {
    fn from(address: IpAddr) -> Self {
        Self::Address(match address {
            IpAddr::V6(v6) => plain_address(v6),
            v4 @ IpAddr::V4(_) => v4,
        })
    }
}

impl TryFrom<String> for Host {
    type Error = HostError;
    fn try_from(text: String) -> Result<Self, HostError> {
        text.parse()
    }
}

impl From<Host> for String {
    fn from(host: Host) -> Self {
        host.to_string()
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(address) => address.fmt(f),
        }
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> String {
        text.parse::<Host>().unwrap().to_string()
    }

    #[test]
    fn one_spelling() {
        assert_eq!(name("Example.ORG."), "example.org");
        assert_eq!(name("bücher.example"), "xn--bcher-kva.example");
        assert_eq!(name("xn--bcher-kva.example"), "xn--bcher-kva.example");
        assert_eq!(name("ＥＸＡＭＰＬＥ.org"), "example.org");
        assert_eq!(name("::ffff:192.0.2.7"), "192.0.2.7");
        assert_eq!(name("192.0.2.7"), "192.0.2.7");
    }

    #[test]
    fn host_parser_confusion_is_refused() {
        for bad in [
            "",
            ".",
            "..",
            "a..b",
            "good.test\0.evil.test",
            "good.test%00",
            "good.test\n",
            "user@good.test",
            "good.test/evil",
            "fe80::1%eth0",
            "good.test#evil",
            "good.test?evil",
            "good.test\\evil",
            " good.test",
            "good.test ",
            "-a.test",
            "a-.test",
            "[::1]",
            "good.test:80",
            &"a".repeat(64),
            &format!("{}test", "a.".repeat(140)),
        ] {
            assert!(bad.parse::<Host>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn ip_literals_in_odd_spellings_are_refused() {
        for bad in [
            "2130706433",
            "0x7f000001",
            "017700000001",
            "127.1",
            "0x7f.1",
            "127.0.0.0x1",
            "0177.0.0.1",
            "1.2.3.4.5",
            "127.0.0.1.",
            "256.1.1.1",
        ] {
            let parsed = bad.parse::<Host>();
            // A trailing dot on a plain address is the address; everything else is refused.
            assert!(
                parsed.is_err() || parsed.unwrap() == Host::from(IpAddr::from([127, 0, 0, 1])),
                "{bad}"
            );
        }
        assert!("2130706433".parse::<Host>().is_err());
        assert!("0x7f000001".parse::<Host>().is_err());
    }

    #[test]
    fn authorities() {
        assert_eq!(
            Host::parse_authority("a.test:8080").unwrap(),
            ("a.test".parse().unwrap(), Some(8080))
        );
        assert_eq!(
            Host::parse_authority("[2001:db8::1]:443").unwrap().1,
            Some(443)
        );
        for bad in [
            "a@b", "a:b", "a:0", "a:65536", "a:+80", "::1", "[::1", "[::1]x", "[a.test]",
            "a.test:", "a:80:90",
        ] {
            assert!(Host::parse_authority(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn below_counts_whole_labels() {
        let host: Host = "api.example.org".parse().unwrap();
        assert!(host.is_below("example.org"));
        assert!(!host.is_below("ample.org"));
        assert!(
            !"example.org"
                .parse::<Host>()
                .unwrap()
                .is_below("example.org")
        );
    }
}
