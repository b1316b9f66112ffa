//! How a build stands, and what it says.

use axum::{Json, extract::State};
use http::request::Parts;
use sandkeep_keeper::{BuildLine, BuildStatus, BuildView, LineLevel};
use sandkeep_model::{BuildId, Code, Result, Template, TemplateName, Timestamp, build_not_found};
use serde::Serialize;

use super::{
    builds::named,
    lines::{LogLine, Loudness, Wanted, least},
    tags::tag_of,
};
use crate::{error::E2bError, query::E2bQuery, state::Shared};

/// Lines in one answer about a build.
const LINES: usize = 100;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StatusBody {
    #[serde(rename = "templateID")]
    template_id: TemplateName,
    #[serde(rename = "buildID")]
    build_id: BuildId,
    status: &'static str,
    /// The same lines, for clients that know no others.
    logs: Vec<String>,
    log_entries: Vec<LogBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<Reason>,
}

#[derive(Debug, Serialize)]
pub(crate) struct LogBody {
    timestamp: Timestamp,
    level: LineLevel,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Reason {
    message: String,
    step: String,
}

impl From<BuildLine> for LogBody {
    fn from(line: BuildLine) -> Self {
        Self {
            timestamp: line.at,
            level: line.level,
            message: line.message,
            step: line.step,
        }
    }
}

impl LogLine for BuildLine {
    fn at(&self) -> i64 {
        self.at.millis()
    }

    fn loudness(&self) -> Loudness {
        match self.level {
            LineLevel::Info => Loudness::Info,
            LineLevel::Warn => Loudness::Warn,
            LineLevel::Error => Loudness::Error,
        }
    }

    fn message(&self) -> &str {
        &self.message
    }
}

/// What is known of a build.
enum Known {
    /// Announced, not begun.
    Waiting,
    /// One of this run of the server.
    Here(BuildView),
    /// One of an earlier run, whose template is there.
    Before(TemplateName),
}

async fn known(state: &Shared, template: &TemplateName, id: &BuildId) -> Result<Known> {
    match state.keeper.template_build(id) {
        Ok(build) if build.template == *template => return Ok(Known::Here(build)),
        Err(error) if error.code != Code::NotFound => return Err(error),
        _ => {}
    }
    if state.waiting.holds(id) {
        return Ok(Known::Waiting);
    }
    let templates = state.keeper.templates().await?;
    let made = |found: &Template| {
        let built = found.built.as_ref();
        built.is_some_and(|built| built.build == *id) && tag_of(template, &found.name).is_some()
    };
    let found = templates.into_iter().find(made);
    found
        .map(|found| Known::Before(found.name))
        .ok_or_else(|| build_not_found(id))
}

/// How a build stands, with the next lines of its log.
pub(crate) async fn status(
    State(state): State<Shared>,
    E2bQuery(mut query): E2bQuery,
    mut parts: Parts,
) -> Result<Json<StatusBody>, E2bError> {
    let after = query.parsed::<usize>("logsOffset")?.unwrap_or(0);
    let most = query.parsed::<usize>("limit")?.unwrap_or(LINES).min(LINES);
    let wanted = Wanted {
        least: least(&mut query)?,
        ..Wanted::default()
    };
    let (template, id) = named(&state, &mut parts).await?;
    // Lines after the state: once it is over there come no more.
    let (status, reason, lines) = match known(&state, &template, &id).await? {
        Known::Waiting => ("waiting", None, Vec::new()),
        Known::Here(build) => {
            let (status, reason) = standing(build);
            (status, reason, state.keeper.build_lines(&id, after, most)?)
        }
        Known::Before(found) => {
            let lines = state.keeper.template_log(&found).await?;
            let lines = lines.into_iter().skip(after).take(most).collect();
            ("ready", None, lines)
        }
    };
    // Some may be left out; how far the reader is counts all of them.
    let lines = wanted.pick(lines, LINES);
    Ok(Json(StatusBody {
        template_id: template,
        build_id: id,
        status,
        logs: lines.iter().map(|line| line.message.clone()).collect(),
        log_entries: lines.into_iter().map(LogBody::from).collect(),
        reason,
    }))
}

#[derive(Debug, Serialize)]
pub(crate) struct LogsBody {
    logs: Vec<LogBody>,
}

/// Lines of a build from a moment on, or back from it.
pub(crate) async fn logs(
    State(state): State<Shared>,
    E2bQuery(mut query): E2bQuery,
    mut parts: Parts,
) -> Result<Json<LogsBody>, E2bError> {
    let wanted = Wanted::of(&mut query)?;
    // There is one place they are kept in; which one is meant makes no difference.
    query.take("source")?;
    let (template, id) = named(&state, &mut parts).await?;
    let lines = match known(&state, &template, &id).await? {
        Known::Waiting => Vec::new(),
        Known::Here(_) => state.keeper.build_lines(&id, 0, usize::MAX)?,
        Known::Before(found) => state.keeper.template_log(&found).await?,
    };
    let picked = wanted.pick(lines, LINES).into_iter();
    Ok(Json(LogsBody {
        logs: picked.map(LogBody::from).collect(),
    }))
}

pub(super) const fn status_name(status: BuildStatus) -> &'static str {
    match status {
        BuildStatus::Waiting => "waiting",
        BuildStatus::Building => "building",
        BuildStatus::Ready => "ready",
        BuildStatus::Failed | BuildStatus::Cancelled => "error",
    }
}

fn standing(build: BuildView) -> (&'static str, Option<Reason>) {
    let reason = build.fault.map(|fault| Reason {
        message: fault.error.to_string(),
        step: fault.step,
    });
    (status_name(build.status), reason)
}
