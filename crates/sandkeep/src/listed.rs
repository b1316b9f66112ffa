//! Settings that are lists: comma-separated on the command line, an array in the file.

use std::{
    fmt,
    marker::PhantomData,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use serde::{
    Deserialize, Deserializer,
    de::{self, SeqAccess, Visitor},
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed<T>(pub Vec<T>);

impl<T: FromStr<Err: fmt::Display>> FromStr for Listed<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty())
            .map(|part| {
                part.parse()
                    .map_err(|error| format!("\"{}\": {error}", part.escape_debug()))
            })
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl<'de, T: FromStr<Err: fmt::Display>> Deserialize<'de> for Listed<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Parts<T>(PhantomData<T>);
        impl<'de, T: FromStr<Err: fmt::Display>> Visitor<'de> for Parts<T> {
            type Value = Listed<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of texts, or one text with commas")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Listed<T>, E> {
                text.parse().map_err(E::custom)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Listed<T>, A::Error> {
                let mut all = Vec::new();
                while let Some(part) = parts.next_element::<String>()? {
                    let parsed: Listed<T> = part.parse().map_err(de::Error::custom)?;
                    all.extend(parsed.0);
                }
                Ok(Listed(all))
            }
        }
        deserializer.deserialize_any(Parts(PhantomData))
    }
}

/// A DNS server: an address, and a port where it is not the usual one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resolver(pub SocketAddr);

impl FromStr for Resolver {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse()
            .or_else(|_| text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, 53)))
            .map(Self)
            .map_err(|_| "write an address like 192.0.2.53 or 192.0.2.53:5353".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct File {
        dns: Listed<Resolver>,
    }

    #[test]
    fn flags_and_files_say_the_same() {
        let flag: Listed<Resolver> = "192.0.2.53, [2001:db8::1]:5353".parse().unwrap();
        let file: File = toml::from_str("dns = [\"192.0.2.53\", \"[2001:db8::1]:5353\"]").unwrap();
        assert_eq!(flag, file.dns);
        assert_eq!(flag.0[0].0.port(), 53);
        assert!("192.0.2.53,nowhere".parse::<Listed<Resolver>>().is_err());
    }
}
