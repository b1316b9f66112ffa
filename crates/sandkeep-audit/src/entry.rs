//! What is written down. No field can hold the value of a secret: there are only names.

use std::fmt;

use sandkeep_model::{SandboxId, Timestamp};
use serde::{Deserialize, Serialize};

/// A text of bounded length without control characters. Much of it comes from boxes: what is too
/// long is cut, what could steer a terminal is replaced.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String")]
pub struct Text(String);

impl Text {
    pub const LONGEST: usize = 512;

    pub fn new(text: &str) -> Self {
        let mut kept = String::with_capacity(text.len().min(Self::LONGEST));
        for c in text.chars() {
            let c = if c.is_control() { '\u{fffd}' } else { c };
            if kept.len() + c.len_utf8() > Self::LONGEST {
                break;
            }
            kept.push(c);
        }
        Self(kept)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self::new(&text)
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Self::new(text)
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Who did it: `server`, `box:<id>`, `key:<id of an API key>`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Actor(Text);

impl Actor {
    pub fn server() -> Self {
        Self("server".into())
    }

    pub fn sandbox(id: &SandboxId) -> Self {
        Self(Text::new(&format!("box:{id}")))
    }

    /// The id of the key, never the key.
    pub fn key(id: &str) -> Self {
        Self(Text::new(&format!("key:{id}")))
    }

    /// As the ledger has it; nobody means the server itself.
    pub fn named(by: Option<&str>) -> Self {
        by.map_or_else(Self::server, |by| Self(by.into()))
    }

    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub at: Timestamp,
    pub actor: Actor,
    /// The box it is about, if it is about one.
    pub sandbox: Option<SandboxId>,
    pub action: Action,
}

impl Entry {
    /// Something that happens now.
    pub fn now(actor: Actor, sandbox: Option<SandboxId>, action: Action) -> Self {
        Self {
            at: Timestamp::now(),
            actor,
            sandbox,
            action,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "action", content = "detail", rename_all = "snake_case")]
pub enum Action {
    /// Written before its first byte passes, so that a connection that is open when the server
    /// is killed is known, too.
    ConnectionOpened {
        host: Text,
        port: u16,
        rule: Text,
    },
    /// Written when the connection ends, so that its bytes are known.
    ConnectionAllowed {
        host: Text,
        port: u16,
        rule: Text,
        bytes_out: u64,
        bytes_in: u64,
        duration_ms: u64,
    },
    ConnectionDenied {
        host: Text,
        port: u16,
        reason: Text,
        /// The kind of refusal, for programs. Not in records of older servers.
        #[serde(default)]
        code: Text,
    },
    NameDenied {
        host: Text,
        /// Not in records of older servers, nor is the code.
        #[serde(default)]
        reason: Text,
        #[serde(default)]
        code: Text,
    },
    /// Refusals of one box that came faster than they are written one by one.
    DenialsSummed {
        count: u64,
    },
    SecretUsed {
        name: Text,
        host: Text,
    },
    SecretCreated {
        name: Text,
    },
    SecretChanged {
        name: Text,
        version: u64,
    },
    SecretDeleted {
        name: Text,
    },
    TokenIssued {
        audience: Text,
        jti: Text,
        expires: Timestamp,
    },
    SigningKeyRotated {
        kid: Text,
    },
    /// The policy itself is not here: its transforms may hold credentials.
    PolicyChanged {
        rules: u32,
        /// The number of the event in the ledger it is taken from, here and below.
        event: i64,
    },
    ProfileChanged {
        name: Text,
        version: u32,
    },
    ProfileRemoved {
        name: Text,
    },
    SandboxCreated {
        template: Text,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        parent: Option<SandboxId>,
        event: i64,
    },
    SandboxKilled {
        reason: Text,
        event: i64,
    },
    /// The server's API key came in a request for a port of a sandbox, and was not passed on.
    ApiKeyRefused {
        port: u16,
        event: i64,
    },
    SnapshotTaken {
        snapshot: Text,
    },
    /// A point came in a file from elsewhere.
    PointImported {
        point: Text,
        /// The key of the server that signed the file, if one did.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signer: Option<Text>,
        /// Whether its memory was taken, too.
        memory: bool,
    },
    /// A crash left half a line at the end of the log; it was cut off.
    LogRepaired {
        segment: Text,
        bytes_cut: u64,
    },
    /// Events that could not be written down, because the disk or the queue was full.
    EntriesLost {
        count: u64,
    },
}

impl Action {
    /// All names, for those who write filters.
    pub const NAMES: [&'static str; 21] = [
        "connection_opened",
        "connection_allowed",
        "connection_denied",
        "name_denied",
        "denials_summed",
        "secret_used",
        "secret_created",
        "secret_changed",
        "secret_deleted",
        "token_issued",
        "signing_key_rotated",
        "policy_changed",
        "profile_changed",
        "profile_removed",
        "sandbox_created",
        "sandbox_killed",
        "api_key_refused",
        "snapshot_taken",
        "point_imported",
        "log_repaired",
        "entries_lost",
    ];

    /// The event of the ledger it tells of, if it is taken from one.
    pub const fn event(&self) -> Option<i64> {
        match self {
            Self::PolicyChanged { event, .. }
            | Self::SandboxCreated { event, .. }
            | Self::SandboxKilled { event, .. }
            | Self::ApiKeyRefused { event, .. } => Some(*event),
            _ => None,
        }
    }

    /// The wire name, as filters know it.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::ConnectionOpened { .. } => "connection_opened",
            Self::ConnectionAllowed { .. } => "connection_allowed",
            Self::ConnectionDenied { .. } => "connection_denied",
            Self::NameDenied { .. } => "name_denied",
            Self::DenialsSummed { .. } => "denials_summed",
            Self::SecretUsed { .. } => "secret_used",
            Self::SecretCreated { .. } => "secret_created",
            Self::SecretChanged { .. } => "secret_changed",
            Self::SecretDeleted { .. } => "secret_deleted",
            Self::TokenIssued { .. } => "token_issued",
            Self::SigningKeyRotated { .. } => "signing_key_rotated",
            Self::PolicyChanged { .. } => "policy_changed",
            Self::ProfileChanged { .. } => "profile_changed",
            Self::ProfileRemoved { .. } => "profile_removed",
            Self::SandboxCreated { .. } => "sandbox_created",
            Self::SandboxKilled { .. } => "sandbox_killed",
            Self::ApiKeyRefused { .. } => "api_key_refused",
            Self::SnapshotTaken { .. } => "snapshot_taken",
            Self::PointImported { .. } => "point_imported",
            Self::LogRepaired { .. } => "log_repaired",
            Self::EntriesLost { .. } => "entries_lost",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_and_cleaned() {
        assert_eq!(Text::new("a\x1b[31m\nb").as_str(), "a\u{fffd}[31m\u{fffd}b");
        assert_eq!(Text::new(&"é".repeat(500)).as_str().len(), Text::LONGEST);
        let read: Text = serde_json::from_str("\"a\\u0000b\"").unwrap();
        assert_eq!(read.as_str(), "a\u{fffd}b");
    }

    #[test]
    fn names_match_the_wire() {
        for action in [
            Action::NameDenied {
                host: "a".into(),
                reason: "r".into(),
                code: "no_rule".into(),
            },
            Action::SigningKeyRotated { kid: "k".into() },
            Action::EntriesLost { count: 1 },
            Action::PointImported {
                point: "p".into(),
                signer: None,
                memory: true,
            },
            Action::SandboxKilled {
                reason: "r".into(),
                event: 7,
            },
        ] {
            let wire = serde_json::to_value(&action).unwrap();
            assert_eq!(wire["action"], action.name());
            assert!(Action::NAMES.contains(&action.name()));
        }
    }
}
