//! Messages of `filesystem.Filesystem` and of `/files`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::json::{int64, null_is_default};
use crate::{Timestamp, process::Empty};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileType {
    #[default]
    #[serde(rename = "FILE_TYPE_UNSPECIFIED")]
    Unspecified,
    #[serde(rename = "FILE_TYPE_FILE")]
    File,
    #[serde(rename = "FILE_TYPE_DIRECTORY")]
    Directory,
    #[serde(rename = "FILE_TYPE_SYMLINK")]
    Symlink,
}

/// What there is to know about a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryInfo {
    #[serde(default)]
    pub name: String,
    #[serde(default, rename = "type")]
    pub file_type: FileType,
    /// Absolute.
    #[serde(default)]
    pub path: String,
    #[serde(default, with = "int64")]
    pub size: i64,
    /// Permission bits only.
    #[serde(default)]
    pub mode: u32,
    /// As `ls -l` shows them, except that a link starts with `L`.
    #[serde(default)]
    pub permissions: String,
    #[serde(default)]
    pub owner: String,
    #[serde(default)]
    pub group: String,
    #[serde(
        default,
        alias = "modified_time",
        skip_serializing_if = "Option::is_none"
    )]
    pub modified_time: Option<Timestamp>,
    #[serde(
        default,
        alias = "symlink_target",
        skip_serializing_if = "Option::is_none"
    )]
    pub symlink_target: Option<String>,
    /// A link that leads nowhere; any other is described by what it leads to.
    #[serde(
        default,
        deserialize_with = "null_is_default",
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub is_symlink: bool,
    #[serde(
        default,
        deserialize_with = "null_is_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub metadata: BTreeMap<String, String>,
}

/// `Stat`, `MakeDir`, `Remove`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathRequest {
    #[serde(default, deserialize_with = "null_is_default")]
    pub path: String,
}

/// Answer of `Stat`, `MakeDir` and `Move`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryResponse {
    pub entry: EntryInfo,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveRequest {
    #[serde(default, deserialize_with = "null_is_default")]
    pub source: String,
    #[serde(default, deserialize_with = "null_is_default")]
    pub destination: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListDirRequest {
    #[serde(default, deserialize_with = "null_is_default")]
    pub path: String,
    /// 0 means 1.
    #[serde(default, deserialize_with = "null_is_default")]
    pub depth: u32,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListDirResponse {
    #[serde(default, deserialize_with = "null_is_default")]
    pub entries: Vec<EntryInfo>,
}

/// `WatchDir` and `CreateWatcher`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchRequest {
    #[serde(default, deserialize_with = "null_is_default")]
    pub path: String,
    #[serde(default, deserialize_with = "null_is_default")]
    pub recursive: bool,
    #[serde(default, deserialize_with = "null_is_default", alias = "include_entry")]
    pub include_entry: bool,
    #[serde(
        default,
        deserialize_with = "null_is_default",
        alias = "allow_network_mounts"
    )]
    pub allow_network_mounts: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum EventType {
    #[default]
    #[serde(rename = "EVENT_TYPE_UNSPECIFIED")]
    Unspecified,
    #[serde(rename = "EVENT_TYPE_CREATE")]
    Create,
    #[serde(rename = "EVENT_TYPE_WRITE")]
    Write,
    #[serde(rename = "EVENT_TYPE_REMOVE")]
    Remove,
    #[serde(rename = "EVENT_TYPE_RENAME")]
    Rename,
    #[serde(rename = "EVENT_TYPE_CHMOD")]
    Chmod,
}

/// Something that happened under a watched directory; the name is relative to it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemEvent {
    #[serde(default)]
    pub name: String,
    #[serde(default, rename = "type")]
    pub event_type: EventType,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

/// What `WatchDir` streams.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::large_enum_variant)] // One at a time, written to the wire and dropped.
#[serde(rename_all = "camelCase")]
pub enum WatchDirResponse {
    Start(Empty),
    Filesystem(FilesystemEvent),
    Keepalive(Empty),
}

/// Answer of `CreateWatcher`, and the request of `GetWatcherEvents` and `RemoveWatcher`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatcherRef {
    #[serde(default, deserialize_with = "null_is_default", alias = "watcher_id")]
    pub watcher_id: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatcherEventsResponse {
    #[serde(default, deserialize_with = "null_is_default")]
    pub events: Vec<FilesystemEvent>,
}

/// One written file in the answer of `POST /files`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteInfo {
    pub path: String,
    pub name: String,
    /// Always `file`.
    #[serde(rename = "type")]
    pub file_type: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_is_a_string_out_and_either_in() {
        let entry = EntryInfo {
            size: 1 << 40,
            ..Default::default()
        };
        let json = serde_json::to_string(&entry).unwrap();
        assert!(json.contains(r#""size":"1099511627776""#), "{json}");
        for json in [r#"{"size":7}"#, r#"{"size":"7"}"#] {
            assert_eq!(serde_json::from_str::<EntryInfo>(json).unwrap().size, 7);
        }
    }

    #[test]
    fn both_spellings_of_a_field_are_read() {
        for json in [r#"{"includeEntry":true}"#, r#"{"include_entry":true}"#] {
            assert!(
                serde_json::from_str::<WatchRequest>(json)
                    .unwrap()
                    .include_entry
            );
        }
    }

    #[test]
    fn watch_messages_have_the_shape_the_sdks_expect() {
        let text = |message| serde_json::to_string(&message).unwrap();
        assert_eq!(text(WatchDirResponse::Start(Empty {})), r#"{"start":{}}"#);
        let event = FilesystemEvent {
            name: "a".into(),
            event_type: EventType::Create,
            entry: None,
        };
        assert_eq!(
            text(WatchDirResponse::Filesystem(event)),
            r#"{"filesystem":{"name":"a","type":"EVENT_TYPE_CREATE"}}"#
        );
    }
}
