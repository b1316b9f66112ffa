//! What the native API reads and writes about boxes.

use std::{collections::BTreeMap, fmt};

use sandkeep_model::{
    Expiry, Isolation, IsolationWish, Limits, LimitsWish, OnTimeout, PointId, PortAccess, Result,
    Sample, Sandbox, SandboxId, Secret, State, TemplateName, Timestamp, Usage,
};
use sandkeep_ward::Acceleration;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{self, Visitor},
};
use utoipa::ToSchema;

use super::auto_points::AutoPoints;
use super::identity::IdentityBody;
use super::time::PauseView;
use crate::{create::expiry_after, extract::object};

/// How long a box lives that was created without a word about it.
pub(crate) const DEFAULT_TIMEOUT_SECONDS: u64 = 300;

/// A time to live: seconds, or `null` or `"never"` for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TimeoutWish {
    Never,
    Seconds(u64),
}

impl Default for TimeoutWish {
    fn default() -> Self {
        Self::Seconds(DEFAULT_TIMEOUT_SECONDS)
    }
}

impl TimeoutWish {
    pub(crate) fn expiry(self) -> Result<Expiry> {
        match self {
            Self::Never => Ok(Expiry::Never),
            Self::Seconds(seconds) => expiry_after("timeout_seconds", seconds),
        }
    }
}

impl<'de> Deserialize<'de> for TimeoutWish {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Wish;
        impl Visitor<'_> for Wish {
            type Value = TimeoutWish;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of seconds, or null or \"never\" for a box without an end")
            }
            fn visit_unit<E: de::Error>(self) -> Result<TimeoutWish, E> {
                Ok(TimeoutWish::Never)
            }
            fn visit_u64<E: de::Error>(self, seconds: u64) -> Result<TimeoutWish, E> {
                Ok(TimeoutWish::Seconds(seconds))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<TimeoutWish, E> {
                match text {
                    "never" => Ok(TimeoutWish::Never),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }
        }
        deserializer.deserialize_any(Wish)
    }
}

/// A sandbox to be made. Everything may be left out.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateRequest {
    /// What to make it from; `GET /v1/templates` lists them.
    #[serde(default = "base")]
    #[schema(default = "base", example = "base")]
    pub template: String,
    /// The isolation level: `auto` takes the strongest this host runs well.
    #[serde(default)]
    #[schema(value_type = String, default = "auto", example = "container")]
    pub isolation: IsolationWish,
    #[serde(default, deserialize_with = "object")]
    pub limits: LimitsBody,
    /// Seconds until it is ended; `null` or `"never"` for a sandbox without an end.
    #[serde(default)]
    #[schema(value_type = Option<u64>, default = 300, minimum = 1)]
    pub timeout_seconds: TimeoutWish,
    /// Environment of every command.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Your own words about it; lists can be filtered by them.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// Who reaches its ports through the gateway: `private` (requests with its traffic token) or
    /// `public`.
    #[serde(default)]
    #[schema(value_type = PortAccessWord, default = "private")]
    pub ports: PortAccess,
    /// Who it is to be in its tokens.
    #[serde(default, deserialize_with = "object")]
    pub identity: IdentityBody,
    /// What it may reach: a policy document, or `{"profile": NAME}`; the server's default
    /// when left out. Beside it, `credentials`: which secret is added to requests to which
    /// host, e.g. `{"secret": "github", "host": "api.example.org", "header": {"name":
    /// "Authorization", "format": "Bearer {}"}}`. A credential opens nothing.
    #[serde(default)]
    #[schema(value_type = Option<Object>,
        example = json!({"default": "deny", "allow": ["example.org:443", "*.example.net"]}))]
    pub network: Option<serde_json::Value>,
    /// A point, by its id or name, to make it from instead of the template.
    #[serde(default)]
    pub from_point: Option<String>,
    /// What happens at its timeout: `kill` or `pause`.
    #[serde(default)]
    #[schema(value_type = String, default = "kill", example = "pause")]
    pub on_timeout: OnTimeout,
    /// Whether a request to it while it is paused wakes it; `true` when left out.
    #[serde(default)]
    pub auto_resume: Option<bool>,
    /// It is paused when nothing was asked of it for so many seconds.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub idle_seconds: Option<u64>,
    /// It is ended when it was paused for so many seconds; the server may have a shorter limit.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub paused_limit_seconds: Option<u64>,
    /// `false`: a pause at its timeout or when idle keeps the files only.
    #[serde(default = "yes")]
    #[schema(default = true)]
    pub pause_memory: bool,
    /// When points are made of it by themselves; as the server does for all when left out.
    #[serde(default)]
    pub auto_points: Option<AutoPoints>,
}

/// [`PortAccess`], for the description.
#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
#[expect(dead_code, reason = "only described")]
pub(crate) enum PortAccessWord {
    Private,
    Public,
}

pub(crate) const fn yes() -> bool {
    true
}

pub(crate) fn base() -> String {
    "base".to_owned()
}

/// Limits asked for; what is left out comes from the server's defaults.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitsBody {
    /// Thousandths of a core.
    pub cpu_millis: Option<u32>,
    pub memory_mib: Option<u64>,
    /// Processes and threads together.
    pub pids: Option<u32>,
    /// What may be written beyond the template.
    pub disk_mib: Option<u64>,
    /// Open files per process.
    pub open_files: Option<u32>,
}

impl From<LimitsBody> for LimitsWish {
    fn from(body: LimitsBody) -> Self {
        Self {
            cpu_millis: body.cpu_millis,
            memory_mib: body.memory_mib,
            pids: body.pids,
            disk_mib: body.disk_mib,
            open_files: body.open_files,
        }
    }
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TimeoutRequest {
    /// Seconds from now (0 ends it at once); `null` or `"never"` for no end.
    #[schema(value_type = Option<u64>, required)]
    pub timeout_seconds: TimeoutWish,
    /// Only ever move the end later, never earlier.
    #[serde(default)]
    pub extend_only: bool,
}

/// A sandbox: what was asked for and what became of it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SandboxView {
    #[schema(value_type = String, example = "i4f2k8s0qwertyuiop123")]
    pub id: SandboxId,
    #[schema(value_type = String)]
    pub template: TemplateName,
    #[schema(value_type = String, example = "container")]
    pub isolation: Isolation,
    /// What runs its machine: `kvm` (the processor itself) or `emulated` (many times slower).
    /// Only in answers about one running sandbox that is a machine.
    #[schema(value_type = Option<String>, example = "emulated")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub acceleration: Option<Acceleration>,
    pub limits: LimitsView,
    /// `creating`, `running`, `pausing`, `paused`, `resuming`, `stopping` or `gone`.
    #[schema(value_type = String, example = "running")]
    pub state: State,
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    /// When it will be ended; `null`: it has no end of its own.
    #[schema(value_type = Option<String>, format = DateTime, required)]
    pub end_at: Option<Timestamp>,
    /// What happens then.
    #[schema(value_type = String, example = "kill")]
    pub on_timeout: OnTimeout,
    pub metadata: BTreeMap<String, String>,
    /// Who reaches its ports: `private` or `public`.
    #[schema(value_type = PortAccessWord)]
    pub ports: PortAccess,
    /// A request to it while it is paused wakes it.
    pub auto_resume: bool,
    #[schema(required)]
    pub idle_seconds: Option<u64>,
    /// It is ended when it was paused for so many seconds.
    #[schema(required)]
    pub paused_limit_seconds: Option<u64>,
    /// When points are made of it by themselves; `null`: never.
    #[schema(required)]
    pub auto_points: Option<AutoPoints>,
    /// The point it came from or went through last.
    #[schema(value_type = Option<String>, required)]
    pub point: Option<PointId>,
    /// How it rests, while it is paused.
    #[schema(required)]
    pub pause: Option<PauseView>,
    /// Since when it stands still because it wrote while the storage of the server was nearly
    /// full. Only in answers about one sandbox that is held so.
    #[schema(value_type = Option<String>, format = DateTime)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held: Option<Timestamp>,
    /// Why it is gone, once it is.
    #[schema(required)]
    pub gone: Option<GoneView>,
    /// How often the kernel killed processes of it for want of memory.
    pub oom_kills: u64,
    /// What clients of its agent (envd) must show. Only in answers about one sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub access_token: Option<String>,
    /// What clients of its private ports must show in header `e2b-traffic-access-token`. Only in
    /// answers about one sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub traffic_token: Option<String>,
    /// What it uses now. Only in answers about one running sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<UsageView>,
}

impl From<Sandbox> for SandboxView {
    fn from(sandbox: Sandbox) -> Self {
        let gone = sandbox.gone.map(|reason| GoneView {
            message: reason.to_string(),
            reason: serde_json::to_value(&reason)
                .ok()
                .and_then(|value| value["reason"].as_str().map(str::to_owned))
                .unwrap_or_default(),
            at: sandbox.gone_at,
        });
        Self {
            id: sandbox.id,
            template: sandbox.template,
            isolation: sandbox.isolation,
            acceleration: None,
            limits: sandbox.limits.into(),
            state: sandbox.state,
            created_at: sandbox.created_at,
            started_at: sandbox.started_at,
            end_at: sandbox.end_at,
            on_timeout: sandbox.on_timeout,
            metadata: sandbox.metadata,
            ports: sandbox.ports,
            auto_resume: sandbox.time.auto_resume,
            idle_seconds: sandbox.time.idle_seconds,
            paused_limit_seconds: sandbox.time.paused_limit_seconds,
            auto_points: sandbox.time.points.map(Into::into),
            point: sandbox.time.head,
            pause: sandbox.time.pause.map(Into::into),
            held: None,
            gone,
            oom_kills: sandbox.oom_kills,
            access_token: None,
            traffic_token: None,
            usage: None,
        }
    }
}

impl SandboxView {
    /// With the token, as long as it opens anything.
    pub(crate) fn with_token(sandbox: Sandbox) -> Self {
        if sandbox.state == State::Gone {
            return sandbox.into();
        }
        let shown = |token: &Secret| Some(token.expose().to_owned());
        Self {
            access_token: shown(&sandbox.access_token),
            traffic_token: sandbox.traffic_token().as_ref().and_then(shown),
            ..sandbox.into()
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LimitsView {
    pub cpu_millis: u32,
    pub memory_mib: u64,
    pub pids: u32,
    /// 0: unlimited.
    pub disk_mib: u64,
    pub open_files: u32,
}

impl From<Limits> for LimitsView {
    fn from(limits: Limits) -> Self {
        Self {
            cpu_millis: limits.cpu_millis,
            memory_mib: limits.memory_mib,
            pids: limits.pids,
            disk_mib: limits.disk_mib,
            open_files: limits.open_files,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GoneView {
    /// Stable: `killed`, `expired`, `exited`, `out_of_memory`, …
    #[schema(example = "expired")]
    pub reason: String,
    pub message: String,
    #[schema(value_type = Option<String>, format = DateTime, required)]
    pub at: Option<Timestamp>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct UsageView {
    pub cpu_usec: u64,
    /// Page cache included.
    pub memory_bytes: u64,
    pub cache_bytes: u64,
    pub pids: u64,
    pub oom_kills: u64,
    /// Written beyond the template.
    pub disk_bytes: u64,
}

impl From<Usage> for UsageView {
    fn from(usage: Usage) -> Self {
        Self {
            cpu_usec: usage.cpu_usec,
            memory_bytes: usage.memory_bytes,
            cache_bytes: usage.cache_bytes,
            pids: usage.pids,
            oom_kills: usage.oom_kills,
            disk_bytes: usage.disk_bytes,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SandboxPage {
    pub sandboxes: Vec<SandboxView>,
    /// Give it back as `next_token` for the next page; `null` on the last.
    #[schema(required)]
    pub next_token: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MetricsView {
    /// Oldest first.
    pub samples: Vec<SampleView>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SampleView {
    #[schema(value_type = String, format = DateTime)]
    pub at: Timestamp,
    pub cpu_count: u32,
    /// 100 is one core busy all the time.
    pub cpu_used_pct: f64,
    pub memory_used: u64,
    pub memory_cache: u64,
    pub memory_total: u64,
    pub disk_used: u64,
    pub disk_total: u64,
}

impl From<Sample> for SampleView {
    fn from(sample: Sample) -> Self {
        Self {
            at: sample.at,
            cpu_count: sample.cpu_count,
            cpu_used_pct: sample.cpu_used_pct,
            memory_used: sample.memory_used,
            memory_cache: sample.memory_cache,
            memory_total: sample.memory_total,
            disk_used: sample.disk_used,
            disk_total: sample.disk_total,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extract::parse_json;

    fn timeout(json: &str) -> Result<TimeoutWish> {
        parse_json::<CreateRequest>(json.as_bytes()).map(|request| request.timeout_seconds)
    }

    #[test]
    fn a_timeout_is_a_number_or_never() {
        assert_eq!(timeout("{}").unwrap(), TimeoutWish::Seconds(300));
        let never = TimeoutWish::Never;
        assert_eq!(timeout(r#"{"timeout_seconds":null}"#).unwrap(), never);
        assert_eq!(timeout(r#"{"timeout_seconds":"never"}"#).unwrap(), never);
        assert_eq!(
            timeout(r#"{"timeout_seconds":7}"#).unwrap(),
            TimeoutWish::Seconds(7)
        );
        for bad in ["-1", "1.5", "\"soon\"", "true", "[]", "1e99"] {
            let error = timeout(&format!("{{\"timeout_seconds\":{bad}}}")).unwrap_err();
            assert_eq!(error.field.as_deref(), Some("timeout_seconds"), "{bad}");
        }
    }

    #[test]
    fn unknown_fields_are_named() {
        let error = parse_json::<CreateRequest>(br#"{"limits":{"memory":1}}"#).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("limits.memory"));
        let error = parse_json::<CreateRequest>(br#"{"limits":[1]}"#).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("limits"));
        let error = parse_json::<CreateRequest>(br#"{"isolation":"vm"}"#).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("isolation"));
        assert!(error.message.contains("microvm"), "{error}");
    }
}
