//! What happened, in order.

use serde::{Deserialize, Serialize};

use crate::{GoneReason, PauseMode, PointId, PointKind, PointReason, SandboxId, State, Timestamp};

/// One line of the event stream. `seq` grows without gaps being promised, never shrinks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    pub seq: i64,
    pub at: Timestamp,
    pub sandbox_id: SandboxId,
    #[serde(flatten)]
    pub kind: EventKind,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum EventKind {
    /// A lifecycle step; `why` is set when the box is gone.
    State {
        from: Option<State>,
        to: State,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<GoneReason>,
        /// Who asked for it; nobody did when the server did it by itself.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        by: Option<String>,
    },
    /// The server came back and found the box alive.
    Adopted,
    /// The kernel killed processes of the box because its memory was used up.
    OutOfMemory {
        kills: u64,
    },
    /// The end of its time was moved; `None` means it has none.
    ExpiryChanged {
        end_at: Option<Timestamp>,
    },
    /// It is paused: how deep that went, and why not deeper.
    Paused {
        mode: PauseMode,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
    /// What it is now has been kept.
    PointMade {
        point: PointId,
        kind: PointKind,
        memory: bool,
        /// Why, when nobody asked for it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<PointReason>,
    },
    /// The rule of the box wanted a point and there is none. The command ran all the same.
    PointNotMade {
        reason: PointReason,
        message: String,
    },
    /// When points are made of it by themselves is another from now on.
    PointPolicyChanged,
    PointDeleted {
        point: PointId,
    },
    /// It was made what it was at this point.
    RolledBack {
        to: PointId,
    },
    /// It began as a copy of another box.
    ForkedFrom {
        source: SandboxId,
    },
    /// What the box may reach is another from now on.
    NetworkChanged {
        /// How many rules allow something.
        #[serde(default)]
        rules: u32,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        by: Option<String>,
    },
    /// The box wanted to go where its policy does not let it: told the first time and then at
    /// each doubling, and of a box that tries very much not every time.
    EgressDenied {
        host: String,
        port: u16,
        /// The kind of it, for programs: `no_rule`, `closed_range` and others.
        #[serde(default)]
        reason: String,
        why: String,
    },
    /// It wrote while the storage of the server was nearly full: it stands still until there is
    /// room again.
    StorageLow {
        free_bytes: u64,
        /// What it took itself of late, images of its memory included.
        #[serde(default)]
        took_bytes: u64,
        /// The images in that.
        #[serde(default)]
        image_bytes: u64,
    },
    /// There is room again, and it goes on.
    StorageBack,
    /// A client sent the server's API key to this port of the sandbox; the request was refused.
    ApiKeyRefused {
        port: u16,
    },
}

impl EventKind {
    pub const fn name(&self) -> &'static str {
        match self {
            Self::State { .. } => "state",
            Self::Adopted => "adopted",
            Self::OutOfMemory { .. } => "out_of_memory",
            Self::ExpiryChanged { .. } => "expiry_changed",
            Self::Paused { .. } => "paused",
            Self::PointMade { .. } => "point_made",
            Self::PointNotMade { .. } => "point_not_made",
            Self::PointPolicyChanged => "point_policy_changed",
            Self::PointDeleted { .. } => "point_deleted",
            Self::RolledBack { .. } => "rolled_back",
            Self::ForkedFrom { .. } => "forked_from",
            Self::NetworkChanged { .. } => "network_changed",
            Self::EgressDenied { .. } => "egress_denied",
            Self::StorageLow { .. } => "storage_low",
            Self::StorageBack => "storage_back",
            Self::ApiKeyRefused { .. } => "api_key_refused",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_as_one_flat_object() {
        let event = Event {
            seq: 7,
            at: Timestamp::from_millis(0),
            sandbox_id: "i01234567890123456789".parse().unwrap(),
            kind: EventKind::State {
                from: Some(State::Stopping),
                to: State::Gone,
                why: Some(GoneReason::Killed),
                by: None,
            },
        };
        let json = serde_json::to_value(&event).unwrap();
        assert_eq!(json["event"], "state");
        assert_eq!(json["why"]["reason"], "killed");
        assert_eq!(serde_json::from_value::<Event>(json).unwrap(), event);
    }
}
