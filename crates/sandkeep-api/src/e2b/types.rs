//! Bodies as the E2B SDKs read and write them. Field names are theirs.

use std::{borrow::Cow, collections::BTreeMap};

use sandkeep_keeper::PointUse;
use sandkeep_moat::policy::Policy;
use sandkeep_model::{
    Code, ENVD_VERSION, Error, OnTimeout, PauseMode, Point, Result, Sample, Sandbox, SandboxId,
    State, Template, TemplateName, Timestamp,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::network;
use crate::{query::shown, state::ApiState};

/// Old clients look at it, nobody uses it.
const CLIENT_ID: &str = "sandkeep";
/// The SDKs insist on an end; a box without one gets the last year calendars know.
const NO_END: Timestamp = Timestamp::from_millis(253_370_764_800_000);

/// The body of create, both generations.
#[derive(Debug, Deserialize)]
pub(crate) struct NewSandbox {
    #[serde(rename = "templateID")]
    pub template_id: String,
    pub timeout: Option<i64>,
    #[serde(rename = "autoPause")]
    pub auto_pause: Option<bool>,
    #[serde(rename = "autoPauseMemory")]
    pub auto_pause_memory: Option<bool>,
    #[serde(rename = "autoResume")]
    pub auto_resume: Option<AutoResume>,
    /// Every box has a token, whatever is said here.
    #[serde(rename = "secure")]
    pub _secure: Option<bool>,
    #[serde(rename = "allow_internet_access")]
    pub allow_internet_access: Option<bool>,
    pub network: Option<Map<String, Value>>,
    pub metadata: Option<BTreeMap<String, String>>,
    #[serde(rename = "envVars")]
    pub env_vars: Option<BTreeMap<String, String>>,
    pub mcp: Option<Value>,
    pub iam: Option<Value>,
    #[serde(rename = "volumeMounts")]
    pub volume_mounts: Option<Vec<Value>>,
    /// What we do not know could be meant to protect somebody.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, Value>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct AutoResume {
    #[serde(default)]
    pub enabled: bool,
}

#[derive(Debug, Deserialize)]
pub(crate) struct TimeoutBody {
    pub timeout: i64,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct RefreshBody {
    pub duration: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct ConnectBody {
    pub timeout: Option<i64>,
    pub memory: Option<bool>,
}

/// `Sandbox`: the answer of create and connect.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SandboxBody {
    #[serde(rename = "templateID")]
    template_id: TemplateName,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    alias: TemplateName,
    envd_version: &'static str,
    envd_access_token: String,
    traffic_access_token: Option<String>,
    domain: Option<String>,
}

impl SandboxBody {
    pub(crate) fn new(sandbox: &Sandbox, state: &ApiState) -> Self {
        Self {
            template_id: sandbox.template.clone(),
            sandbox_id: sandbox.id.to_string(),
            client_id: CLIENT_ID,
            alias: sandbox.template.clone(),
            envd_version: ENVD_VERSION,
            envd_access_token: sandbox.access_token.expose().to_owned(),
            traffic_access_token: sandbox
                .traffic_token()
                .map(|token| token.expose().to_owned()),
            domain: state.e2b_domain(),
        }
    }
}

/// `ListedSandbox`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ListedBody {
    #[serde(rename = "templateID")]
    template_id: TemplateName,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    alias: TemplateName,
    started_at: Timestamp,
    end_at: Timestamp,
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u64,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u64,
    state: &'static str,
    envd_version: &'static str,
    metadata: BTreeMap<String, String>,
    volume_mounts: [(); 0],
}

impl From<&Sandbox> for ListedBody {
    fn from(sandbox: &Sandbox) -> Self {
        Self {
            template_id: sandbox.template.clone(),
            sandbox_id: sandbox.id.to_string(),
            client_id: CLIENT_ID,
            alias: sandbox.template.clone(),
            started_at: sandbox.started_at,
            end_at: sandbox.end_at.unwrap_or(NO_END),
            cpu_count: sandbox.limits.cpu_count(),
            memory_mb: sandbox.limits.memory_mib,
            disk_size_mb: sandbox.limits.disk_mib,
            state: state_name(sandbox.state),
            envd_version: ENVD_VERSION,
            metadata: sandbox.metadata.clone(),
            volume_mounts: [],
        }
    }
}

/// E2B knows two states; a box on its way into or out of a pause counts as paused.
fn state_name(state: State) -> &'static str {
    match state {
        State::Pausing | State::Paused | State::Resuming => "paused",
        State::Creating | State::Running | State::Stopping | State::Gone => "running",
    }
}

/// `SandboxDetail`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DetailBody {
    #[serde(flatten)]
    listed: ListedBody,
    envd_access_token: String,
    domain: Option<String>,
    allow_internet_access: Option<bool>,
    network: Value,
    lifecycle: Lifecycle,
    #[serde(skip_serializing_if = "Option::is_none")]
    pause_mode: Option<&'static str>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Lifecycle {
    auto_resume: bool,
    on_timeout: OnTimeout,
}

impl DetailBody {
    pub(crate) fn new(sandbox: &Sandbox, policy: &Policy, state: &ApiState) -> Self {
        Self {
            listed: sandbox.into(),
            envd_access_token: sandbox.access_token.expose().to_owned(),
            domain: state.e2b_domain(),
            allow_internet_access: network::internet_access(policy),
            network: network::of(sandbox, policy),
            lifecycle: Lifecycle {
                auto_resume: sandbox.time.auto_resume,
                on_timeout: sandbox.on_timeout,
            },
            pause_mode: sandbox.time.pause.as_ref().map(|pause| match pause.mode {
                PauseMode::Disk | PauseMode::Ram => "full",
                PauseMode::Filesystem => "filesystem",
            }),
        }
    }
}

/// `SandboxMetric`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MetricBody {
    timestamp: Timestamp,
    timestamp_unix: i64,
    cpu_count: u32,
    cpu_used_pct: f64,
    mem_used: u64,
    mem_total: u64,
    mem_cache: u64,
    disk_used: u64,
    disk_total: u64,
}

impl From<&Sample> for MetricBody {
    fn from(sample: &Sample) -> Self {
        Self {
            timestamp: sample.at,
            timestamp_unix: sample.at.seconds(),
            cpu_count: sample.cpu_count,
            cpu_used_pct: sample.cpu_used_pct,
            mem_used: sample.memory_used,
            mem_total: sample.memory_total,
            mem_cache: sample.memory_cache,
            disk_used: sample.disk_used,
            disk_total: sample.disk_total,
        }
    }
}

/// `[team/]name[:tag]`, as clients name templates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TemplateRef {
    pub name: TemplateName,
    pub tag: Option<String>,
}

impl TemplateRef {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let (path, tag) = match text.split_once(':') {
            Some((path, tag)) => (path, Some(tag)),
            None => (text, None),
        };
        let mut parts = path.rsplit('/');
        let name = parts.next().unwrap_or_default();
        let team = parts.next();
        let too_many = parts.next().is_some();
        let good_tag = |tag: &str| {
            !tag.is_empty()
                && tag.len() <= 128
                && tag
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        };
        let wrong = too_many
            || team.is_some_and(|team| team.parse::<TemplateName>().is_err())
            || tag.is_some_and(|tag| !good_tag(tag));
        let name = name.parse::<TemplateName>();
        match name {
            Ok(name) if !wrong => Ok(Self {
                name,
                tag: tag.map(str::to_ascii_lowercase),
            }),
            _ => Err(Error::invalid(
                "templateID",
                format!("{} does not name a template", shown(text)),
            )
            .hint("use NAME, TEAM/NAME or NAME:TAG of a-z, 0-9, - and _")),
        }
    }

    /// As the name of a snapshot: it has no tags but the one of every template, and
    /// `SANDBOX:NAME` means one of one sandbox.
    pub(crate) fn as_snapshot(&self) -> Option<String> {
        match self.tag.as_deref() {
            None | Some("default") => Some(self.name.to_string()),
            Some(tag) => {
                let of: SandboxId = self.name.as_str().parse().ok()?;
                Some(format!("{of}:{tag}"))
            }
        }
    }

    /// The snapshot this means, if no template has the name.
    pub(crate) async fn snapshot(&self, state: &ApiState) -> Result<Option<Point>> {
        let Some(text) = self.as_snapshot() else {
            return Ok(None);
        };
        match self.clone().existing(state).await {
            Ok(_) => return Ok(None),
            Err(error) if error.code != Code::NotFound => return Err(error),
            Err(_) => {}
        }
        match state.keeper.named_point(&text, None, PointUse::Read).await {
            Ok(point) => Ok(Some(point)),
            Err(error) if error.code == Code::NotFound => Ok(None),
            Err(error) => Err(error.field("templateID")),
        }
    }

    /// The template that has this tag here: a tag is one of its own.
    pub(crate) fn local(self) -> Result<TemplateName> {
        match self.tag.as_deref() {
            None | Some("default") => Ok(self.name),
            Some(tag) => {
                // What a tag may hold and a name may not.
                let written = tag.replace('_', "__").replace('.', "_");
                Ok(format!("{}--{written}", self.name).parse()?)
            }
        }
    }

    /// The same, if it is there.
    pub(crate) async fn existing(self, state: &ApiState) -> Result<Template> {
        let (name, tag) = (self.name.clone(), self.tag.clone());
        let there = match self.local() {
            Ok(local) => state.keeper.template(&local).await?,
            Err(_) => None,
        };
        there.ok_or_else(|| {
            Error::not_found(match tag.as_deref() {
                None | Some("default") => format!("template '{name}' not found"),
                Some(tag) => format!("tag '{tag}' does not exist for template '{name}'"),
            })
        })
    }

    /// The name, if the tag is the one every template has.
    pub(crate) fn default_only(self) -> Result<TemplateName> {
        match self.tag.as_deref() {
            None | Some("default") => Ok(self.name),
            Some(tag) => Err(Error::new(
                Code::NotFound,
                format!("tag '{tag}' does not exist for template '{}'", self.name),
            )),
        }
    }
}

/// RFC 3339 to our milliseconds, rounded up: nothing that started before it is inside.
pub(crate) fn started_after(text: &str) -> Result<Timestamp> {
    // A `+` of the zone may have become a space on its way.
    let text: Cow<'_, str> = if text.contains(' ') {
        text.replace(' ', "+").into()
    } else {
        text.into()
    };
    let time: jiff::Timestamp = text.parse().map_err(|_| {
        Error::invalid(
            "startedAfter",
            format!("startedAfter is {}, which is no time", shown(&text)),
        )
        .hint("use RFC 3339, e.g. 2026-01-31T12:00:00Z")
    })?;
    let micros = time.as_microsecond();
    let millis = micros.div_euclid(1000) + i64::from(micros.rem_euclid(1000) != 0);
    Ok(Timestamp::from_millis(millis))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_names_in_all_forms() {
        let parse = |text: &str| TemplateRef::parse(text).and_then(TemplateRef::default_only);
        for good in [
            "base",
            "BASE",
            "team/base",
            "base:default",
            "t/base:Default",
        ] {
            assert_eq!(parse(good).unwrap().as_str(), "base", "{good}");
        }
        let error = parse("base:v2").unwrap_err();
        assert_eq!(error.code, Code::NotFound);
        assert_eq!(error.message, "tag 'v2' does not exist for template 'base'");
        for bad in [
            "", ":", "base:", ":default", "a/b/c", "/base", "../base", "a b", "base:x y",
        ] {
            let error = parse(bad).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument, "{bad:?}");
            assert_eq!(error.field.as_deref(), Some("templateID"), "{bad:?}");
        }
    }

    #[test]
    fn times_are_not_widened() {
        let at = |text: &str| started_after(text).unwrap().millis();
        assert_eq!(at("1970-01-01T00:00:01Z"), 1000);
        assert_eq!(at("1970-01-01T00:00:01.000001Z"), 1001);
        assert_eq!(at("1970-01-01T00:00:01.002000Z"), 1002);
        assert_eq!(at("1970-01-01T01:00:01+01:00"), 1000);
        assert_eq!(at("1970-01-01T01:00:01 01:00"), 1000);
        assert!(started_after("yesterday").is_err());
        assert!(started_after("").is_err());
    }

    #[test]
    fn a_box_without_an_end_has_a_date_clients_can_read() {
        assert_eq!(NO_END.to_string(), "9999-01-01T00:00:00.000Z");
    }
}
