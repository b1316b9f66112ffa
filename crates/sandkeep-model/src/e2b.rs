//! What clients of E2B ask for that has no word in the native API.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

const LONGEST_MASK: usize = 255;
const PORT: &str = "${PORT}";

/// Kept with the sandbox, and copied with it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct E2bSettings {
    /// For the gateway to MCP servers, which the client starts itself in a template that has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mcp: Option<serde_json::Value>,
    /// The host that programs in the sandbox are asked by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_request_host: Option<HostMask>,
}

impl E2bSettings {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A value of `Host`, in which `${PORT}` stands for the port that is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostMask(String);

impl HostMask {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn host(&self, port: u16) -> String {
        self.0.replace(PORT, &port.to_string())
    }
}

impl TryFrom<String> for HostMask {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        let of_a_host = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte);
        let rest = text.replace(PORT, "1");
        if rest.is_empty() || text.len() > LONGEST_MASK || !rest.bytes().all(of_a_host) {
            return Err(
                Error::invalid("maskRequestHost", "maskRequestHost is not a host name")
                    .hint("write a host with or without a port, e.g. localhost:${PORT}"),
            );
        }
        Ok(Self(text))
    }
}

impl From<HostMask> for String {
    fn from(mask: HostMask) -> Self {
        mask.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_is_a_host_with_room_for_the_port() {
        let mask = |text: &str| HostMask::try_from(text.to_owned());
        assert_eq!(
            mask("localhost:${PORT}").unwrap().host(8080),
            "localhost:8080"
        );
        assert_eq!(mask("app.example.org").unwrap().host(1), "app.example.org");
        assert_eq!(mask("[::1]:${PORT}").unwrap().host(80), "[::1]:80");
        for bad in ["", "a b", "a\r\nx: y", "${HOST}", "a/b", &"a".repeat(256)] {
            assert!(mask(bad).is_err(), "{bad:?}");
        }
    }
}
