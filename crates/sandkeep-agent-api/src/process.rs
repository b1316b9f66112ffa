//! Messages of `process.Process`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::json::{Blob, null_is_default};

/// What to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessConfig {
    #[serde(default, deserialize_with = "null_is_default")]
    pub cmd: String,
    #[serde(
        default,
        deserialize_with = "null_is_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub args: Vec<String>,
    #[serde(
        default,
        deserialize_with = "null_is_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub envs: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// Which process is meant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Selector {
    Pid(u32),
    Tag(String),
}

/// A terminal's size in characters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PtySize {
    #[serde(default)]
    pub cols: u32,
    #[serde(default)]
    pub rows: u32,
}

/// A terminal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pty {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<PtySize>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Absent means true: old clients write to stdin without asking for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<bool>,
}

/// `Connect`, `CloseStdin` and others that only name a process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SelectRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Selector>,
}

/// What `Start` and `Connect` stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventResponse {
    pub event: ProcessEvent,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ProcessEvent {
    Start(StartEvent),
    Data(Output),
    End(EndEvent),
    Keepalive(Empty),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartEvent {
    pub pid: u32,
}

/// Bytes the process wrote, by where it wrote them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Output {
    Stdout(Blob),
    Stderr(Blob),
    Pty(Blob),
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndEvent {
    #[serde(default, alias = "exit_code")]
    pub exit_code: i32,
    #[serde(default)]
    pub exited: bool,
    #[serde(default)]
    pub status: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A message without fields.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Empty {}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListResponse {
    #[serde(default, deserialize_with = "null_is_default")]
    pub processes: Vec<ProcessInfo>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessInfo {
    pub config: ProcessConfig,
    pub pid: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Selector>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
}

/// Bytes for the process, by where they go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Input {
    Stdin(Blob),
    Pty(Blob),
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendInputRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Selector>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<Input>,
}

/// One message of the request stream of `StreamInput`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StreamInputRequest {
    Start(SelectRequest),
    Data(InputData),
    Keepalive(Empty),
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputData {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<Input>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Signal {
    #[default]
    #[serde(rename = "SIGNAL_UNSPECIFIED")]
    Unspecified,
    #[serde(rename = "SIGNAL_SIGTERM")]
    Term,
    #[serde(rename = "SIGNAL_SIGKILL")]
    Kill,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendSignalRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Selector>,
    #[serde(default, deserialize_with = "null_is_default")]
    pub signal: Signal,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sdks_start_request_is_read() {
        let json = r#"{"process":{"cmd":"/bin/bash","args":["-l","-c","echo hi"],"envs":{"X":"1"},
            "cwd":"/tmp"},"stdin":false,"somethingNew":1}"#;
        let request: StartRequest = serde_json::from_str(json).unwrap();
        let process = request.process.unwrap();
        assert_eq!(process.args.len(), 3);
        assert_eq!(process.cwd.as_deref(), Some("/tmp"));
        assert_eq!(request.stdin, Some(false));
        assert!(request.pty.is_none());
    }

    #[test]
    fn events_have_the_shape_the_sdks_expect() {
        let text = |event| serde_json::to_string(&EventResponse { event }).unwrap();
        assert_eq!(
            text(ProcessEvent::Start(StartEvent { pid: 42 })),
            r#"{"event":{"start":{"pid":42}}}"#
        );
        assert_eq!(
            text(ProcessEvent::Data(Output::Stdout(Blob::from(
                &b"hello\n"[..]
            )))),
            r#"{"event":{"data":{"stdout":"aGVsbG8K"}}}"#
        );
        assert_eq!(
            text(ProcessEvent::Keepalive(Empty {})),
            r#"{"event":{"keepalive":{}}}"#
        );
    }

    #[test]
    fn exit_code_is_read_in_both_spellings() {
        for json in [r#"{"exit_code":-1}"#, r#"{"exitCode":-1}"#] {
            assert_eq!(
                serde_json::from_str::<EndEvent>(json).unwrap().exit_code,
                -1
            );
        }
    }

    #[test]
    fn a_selector_is_a_pid_or_a_tag() {
        let request: SendSignalRequest =
            serde_json::from_str(r#"{"process":{"tag":"t"},"signal":"SIGNAL_SIGKILL"}"#).unwrap();
        assert_eq!(request.process, Some(Selector::Tag("t".into())));
        assert_eq!(request.signal, Signal::Kill);
    }
}
