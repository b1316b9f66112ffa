//! Templates made from recipes.

use std::{collections::BTreeMap, convert::Infallible, time::Duration};

use axum::{
    Json,
    extract::{Request, State},
    response::{
        IntoResponse, Response,
        sse::{Event as SseEvent, KeepAlive, Sse},
    },
};
use futures_util::{Stream, stream};
use http::{HeaderValue, StatusCode, request::Parts};
use sandkeep_keeper::{BuildLine, BuildView as Building, BuildWish, EgressWish};
use sandkeep_model::{
    BuildId, Error, Isolation, IsolationWish, Ready, ReadyCheck, Recipe, Result, Step,
    TemplateName, Timestamp, build_not_found,
};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use utoipa::ToSchema;

use super::{
    exec_ws::stopping,
    files::steady,
    templates::name_in,
    types::{LimitsBody, base},
    upload::upload,
};
use crate::{
    error::NativeError,
    extract::{NativeJson, object, path_part},
    network::egress,
    query::NativeQuery,
    state::Shared,
};

/// A comment after so much silence shows both sides that the other is there.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// Lines of the log that are sent at once.
const PAGE: usize = 256;

/// How a template is made.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct BuildRequest {
    /// The template it is built on.
    #[serde(default = "base")]
    #[schema(default = "base")]
    from: String,
    #[serde(default)]
    steps: Vec<StepBody>,
    /// A command that runs in every sandbox of it.
    #[serde(default)]
    start: Option<String>,
    /// When the start command counts as started.
    #[serde(default)]
    ready: Option<ReadyBody>,
    /// A command that runs in every copy of a sandbox of it, and after a rollback, before it is given to anybody.
    #[serde(default)]
    after_restore: Option<String>,
    /// What its sandboxes get that ask for nothing; the build itself, too.
    #[serde(default, deserialize_with = "object")]
    limits: LimitsBody,
    /// Levels to warm it for; the steps run at the first.
    #[serde(default)]
    #[schema(value_type = Vec<String>, example = json!(["gvisor"]))]
    isolation: Vec<IsolationWish>,
    /// No sandbox of it, and of no template built on it, is isolated less.
    #[serde(default)]
    #[schema(value_type = Option<String>, example = "gvisor")]
    isolation_minimum: Option<Isolation>,
    /// What the build may reach, as in create.
    #[serde(default)]
    #[schema(value_type = Option<Object>, example = json!({"profile": "package-registries"}))]
    network: Option<serde_json::Value>,
    /// Run every step, whatever earlier builds left.
    #[serde(default)]
    no_cache: bool,
}

/// One step: `run`, `copy`, `env`, `workdir`, or `user` alone.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct StepBody {
    /// A command for `bash -l -c`.
    run: Option<String>,
    /// A path or glob in the archive `files`.
    copy: Option<String>,
    /// Where the copy goes: a file, or with a slash at its end a directory.
    to: Option<String>,
    /// Octal, for what is copied.
    mode: Option<String>,
    /// The key of an archive sent with `PUT /v1/templates/{name}/files/{sha256}`.
    files: Option<String>,
    /// Variables for later steps, the start command and the sandboxes.
    env: Option<BTreeMap<String, String>>,
    /// Where later steps, the start command and commands of the sandboxes run.
    workdir: Option<String>,
    /// Who runs the command or owns the copy; alone, who does from now on.
    user: Option<String>,
}

/// `command` or `port`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReadyBody {
    /// Tried until it succeeds.
    #[serde(default)]
    command: Option<String>,
    /// Waited for until somebody listens.
    #[serde(default)]
    port: Option<u16>,
    #[serde(default)]
    #[schema(default = 60, minimum = 1, maximum = 600)]
    timeout_seconds: Option<u64>,
}

impl StepBody {
    fn check(self) -> Result<Step> {
        let wrong = |message: &str| {
            Error::invalid("", message)
                .hint("a step is one of run, copy with to and files, env, workdir, or user")
        };
        let kinds = [
            self.run.is_some(),
            self.copy.is_some(),
            self.env.is_some(),
            self.workdir.is_some(),
        ];
        if kinds.iter().filter(|given| **given).count() > 1 {
            return Err(wrong("a step does one thing"));
        }
        let plain = self.to.is_none() && self.mode.is_none() && self.files.is_none();
        match self {
            Self {
                copy: Some(from),
                to: Some(to),
                files: Some(files),
                user,
                mode,
                ..
            } => Ok(Step::Copy {
                from,
                to,
                user,
                mode,
                files,
            }),
            Self { copy: Some(_), .. } => Err(wrong("a copy needs `to` and `files`")),
            _ if !plain => Err(wrong("`to`, `mode` and `files` belong to a copy")),
            Self {
                run: Some(command),
                user,
                ..
            } => Ok(Step::Run { command, user }),
            Self {
                user: None,
                env: Some(env),
                ..
            } => Ok(Step::Env(env)),
            Self {
                user: None,
                workdir: Some(path),
                ..
            } => Ok(Step::Workdir(path)),
            Self {
                user: Some(name),
                env: None,
                workdir: None,
                ..
            } => Ok(Step::User(name)),
            _ => Err(wrong("this is no step")),
        }
    }
}

impl ReadyBody {
    fn check(self) -> Result<Ready> {
        let check = match (self.command, self.port) {
            (Some(command), None) => ReadyCheck::Command(command),
            (None, Some(port)) if port > 0 => ReadyCheck::Port(port),
            _ => {
                return Err(Error::invalid("ready", "ready is a command or a port")
                    .hint("{\"port\": 8000} or {\"command\": \"curl -f localhost:8000\"}"));
            }
        };
        let mut ready = Ready::of(check);
        if let Some(seconds) = self.timeout_seconds {
            ready.timeout_seconds = seconds;
        }
        Ok(ready)
    }
}

impl BuildRequest {
    fn check(self) -> Result<(Recipe, Option<serde_json::Value>, bool)> {
        let steps = self.steps.into_iter().enumerate().map(|(at, step)| {
            step.check()
                .map_err(|error| error.field(format!("steps[{at}]")))
        });
        let recipe = Recipe {
            from: self
                .from
                .parse()
                .map_err(|error| Error::from(error).field("from"))?,
            steps: steps.collect::<Result<_>>()?,
            start: self.start,
            ready: self.ready.map(ReadyBody::check).transpose()?,
            after_restore: self.after_restore,
            limits: self.limits.into(),
            isolation: self.isolation,
            isolation_minimum: self.isolation_minimum,
        };
        recipe.check()?;
        Ok((recipe, self.network, self.no_cache))
    }
}

/// A build of a template.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct BuildView {
    #[schema(value_type = String)]
    id: BuildId,
    #[schema(value_type = String)]
    template: TemplateName,
    /// `waiting`, `building`, `ready`, `failed` or `cancelled`.
    #[schema(example = "building")]
    status: &'static str,
    /// Why it failed.
    #[schema(required)]
    error: Option<BuildFaultView>,
    #[schema(value_type = String, format = DateTime)]
    begun_at: Timestamp,
    #[schema(value_type = Option<String>, format = DateTime, required)]
    ended_at: Option<Timestamp>,
    /// How many lines its log has.
    lines: usize,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct BuildFaultView {
    /// `base`, the number of the step from 1, or `finalize`.
    step: String,
    code: &'static str,
    message: String,
    #[schema(required)]
    hint: Option<String>,
}

impl From<Building> for BuildView {
    fn from(build: Building) -> Self {
        Self {
            id: build.id,
            template: build.template,
            status: build.status.name(),
            error: build.fault.map(|fault| BuildFaultView {
                step: fault.step,
                code: fault.error.code.name(),
                message: fault.error.message,
                hint: fault.error.hint,
            }),
            begun_at: build.begun_at,
            ended_at: build.ended_at,
            lines: build.lines,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct BuildList {
    builds: Vec<BuildView>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct BuildLog {
    #[schema(value_type = Vec<Object>)]
    lines: Vec<BuildLine>,
}

/// Begins to build a template from a recipe.
///
/// Answers at once; the build goes on when the client is gone. A template of the name stays
/// until the new one is ready. One build of a name runs at a time.
#[utoipa::path(post, path = "/v1/templates/{name}/builds", tag = "templates",
    params(("name" = String, Path, description = "The template to make")),
    request_body = BuildRequest,
    responses((status = 202, body = BuildView)))]
pub(crate) async fn build(
    State(state): State<Shared>,
    mut parts: Parts,
    NativeJson(request): NativeJson<BuildRequest>,
) -> Result<(StatusCode, Json<BuildView>), NativeError> {
    let name = name_in(&mut parts, &state).await?;
    let (recipe, network, no_cache) = request.check()?;
    let network = match &network {
        Some(wish) => egress(&state, wish, state.keeper.build_policy())?,
        None => EgressWish::default(),
    };
    let wish = BuildWish {
        cached_until: if no_cache { 0 } else { usize::MAX },
        recipe,
        network,
        names: Vec::new(),
        id: None,
    };
    let begun = state.keeper.build_template(&name, wish)?;
    Ok((StatusCode::ACCEPTED, Json(begun.into())))
}

/// The builds of a template since the server started, oldest first.
#[utoipa::path(get, path = "/v1/templates/{name}/builds", tag = "templates",
    params(("name" = String, Path, description = "Its name")),
    responses((status = 200, body = BuildList)))]
pub(crate) async fn builds(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<Json<BuildList>, NativeError> {
    let name = name_in(&mut parts, &state).await?;
    let builds = state.keeper.builds(&name);
    Ok(Json(BuildList {
        builds: builds.into_iter().map(BuildView::from).collect(),
    }))
}

async fn found(state: &Shared, parts: &mut Parts) -> Result<Building> {
    let name = name_in(parts, state).await.map_err(|error| error.0)?;
    let id: BuildId = path_part(parts, state, "build").await?.parse()?;
    let build = state.keeper.template_build(&id)?;
    if build.template != name {
        return Err(build_not_found(&id));
    }
    Ok(build)
}

/// How a build stands.
#[utoipa::path(get, path = "/v1/templates/{name}/builds/{build}", tag = "templates",
    operation_id = "build_status",
    params(("name" = String, Path, description = "The template"),
        ("build" = String, Path, description = "The build")),
    responses((status = 200, body = BuildView)))]
pub(crate) async fn status(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<Json<BuildView>, NativeError> {
    Ok(Json(found(&state, &mut parts).await?.into()))
}

/// Ends a build; the template stays as it was.
#[utoipa::path(delete, path = "/v1/templates/{name}/builds/{build}", tag = "templates",
    operation_id = "build_cancel",
    params(("name" = String, Path, description = "The template"),
        ("build" = String, Path, description = "The build")),
    responses((status = 202, body = BuildView)))]
pub(crate) async fn cancel(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<(StatusCode, Json<BuildView>), NativeError> {
    let build = found(&state, &mut parts).await?;
    let now = state.keeper.cancel_build(&build.id)?;
    Ok((StatusCode::ACCEPTED, Json(now.into())))
}

/// The log of a build as it grows (Server-Sent Events).
///
/// Each `line` is one JSON object with the number of the line as its id; `after` begins after
/// that many lines. When the build is over an event `end` tells how it stands.
#[utoipa::path(get, path = "/v1/templates/{name}/builds/{build}/log", tag = "templates",
    operation_id = "build_log",
    params(("name" = String, Path, description = "The template"),
        ("build" = String, Path, description = "The build"),
        ("after" = Option<usize>, Query, description = "Begin after so many lines")),
    responses((status = 200, description = "Lines", content((String = "text/event-stream")))))]
pub(crate) async fn log(
    State(state): State<Shared>,
    NativeQuery(mut query): NativeQuery,
    mut parts: Parts,
) -> Result<Response, NativeError> {
    let after = query.parsed::<usize>("after")?.unwrap_or(0);
    query.finish("after")?;
    let build = found(&state, &mut parts).await?;
    let bell = state.keeper.follow_build(&build.id)?;
    let teller = Teller {
        state,
        id: build.id,
        told: after,
        waiting: Vec::new(),
        bell,
        over: false,
    };
    let mut response = Sse::new(teller.events())
        .keep_alive(KeepAlive::new().interval(KEEPALIVE))
        .into_response();
    let headers = response.headers_mut();
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

/// What the build of a template said.
#[utoipa::path(get, path = "/v1/templates/{name}/log", tag = "templates",
    operation_id = "template_log",
    params(("name" = String, Path, description = "The template")),
    responses((status = 200, body = BuildLog)))]
pub(crate) async fn template_log(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<Json<BuildLog>, NativeError> {
    let name = name_in(&mut parts, &state).await?;
    if state.keeper.template(&name).await?.is_none() {
        return Err(super::templates::missing(name.as_str()).into());
    }
    let lines = state.keeper.template_log(&name).await?;
    Ok(Json(BuildLog { lines }))
}

/// Sends files for the copy steps of builds: a tar archive, plain, gzip or zstd.
#[utoipa::path(put, path = "/v1/templates/{name}/files/{sha256}", tag = "templates",
    operation_id = "template_files",
    params(("name" = String, Path, description = "The template"),
        ("sha256" = String, Path, description = "The SHA-256 of the archive, in hex")),
    request_body(content = String, content_type = "application/octet-stream"),
    responses((status = 204, description = "They are here")))]
pub(crate) async fn files(
    State(state): State<Shared>,
    request: Request,
) -> Result<StatusCode, NativeError> {
    let (mut parts, body) = request.into_parts();
    name_in(&mut parts, &state).await?;
    let key = path_part(&mut parts, &state, "sha256").await?;
    sandkeep_model::check_files_key(&key)?;
    take_files(&state, &key, body, true).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Takes the body of a request as files for builds.
pub(crate) async fn take_files(
    state: &Shared,
    key: &str,
    body: axum::body::Body,
    verify: bool,
) -> Result<()> {
    let (feed, reader) = upload();
    let feeding = async {
        tokio::select! {
            () = feed.pump(steady(body)) => Ok(()),
            () = state.shutdown.cancelled() => Err(stopping()),
        }
    };
    let (fed, taken) = tokio::join!(feeding, state.keeper.put_build_files(key, reader, verify));
    fed?;
    taken.map(drop)
}

struct Teller {
    state: Shared,
    id: BuildId,
    told: usize,
    waiting: Vec<BuildLine>,
    bell: watch::Receiver<u64>,
    over: bool,
}

impl Teller {
    fn events(self) -> impl Stream<Item = Result<SseEvent, Infallible>> + Send {
        stream::unfold(self, |mut teller| async move {
            let event = teller.next().await?;
            Some((Ok(event), teller))
        })
    }

    async fn next(&mut self) -> Option<SseEvent> {
        loop {
            if self.over {
                return None;
            }
            self.bell.borrow_and_update();
            // Asked first: what comes after it is over is nothing.
            let build = self.state.keeper.template_build(&self.id).ok()?;
            if self.waiting.is_empty() {
                let page = self.state.keeper.build_lines(&self.id, self.told, PAGE);
                self.waiting = page.ok()?;
                self.waiting.reverse();
            }
            if let Some(line) = self.waiting.pop() {
                self.told += 1;
                let data = serde_json::to_string(&line).ok()?;
                return Some(
                    SseEvent::default()
                        .id(self.told.to_string())
                        .event("line")
                        .data(data),
                );
            }
            if build.status.is_over() {
                self.over = true;
                let data = serde_json::to_string(&BuildView::from(build)).ok()?;
                return Some(SseEvent::default().event("end").data(data));
            }
            tokio::select! {
                changed = self.bell.changed() => changed.ok()?,
                () = self.state.shutdown.cancelled() => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extract::parse_json;

    fn recipe(json: &str) -> Result<Recipe> {
        parse_json::<BuildRequest>(json.as_bytes())?
            .check()
            .map(|(recipe, _, _)| recipe)
    }

    #[test]
    fn a_recipe_is_read() {
        let made = recipe(
            r#"{"from":"base","steps":[{"run":"make","user":"root"},{"user":"app"},
            {"env":{"A":"b"}},{"workdir":"/srv"}],"start":"./serve","isolation":["gvisor"],
            "ready":{"port":8000,"timeout_seconds":5},"limits":{"memory_mib":512}}"#,
        )
        .unwrap();
        assert_eq!(made.steps.len(), 4);
        assert_eq!(made.steps[1], Step::User("app".to_owned()));
        assert_eq!(made.ready.unwrap().timeout_seconds, 5);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (json, field) in [
            (r#"{"steps":[{}]}"#, "steps[0]"),
            (
                r#"{"steps":[{"run":"a"},{"run":"a","env":{}}]}"#,
                "steps[1]",
            ),
            (r#"{"steps":[{"copy":"a"}]}"#, "steps[0]"),
            (r#"{"steps":[{"run":"a","mode":"0755"}]}"#, "steps[0]"),
            (r#"{"start":"x","ready":{}}"#, "ready"),
            (r#"{"from":"a b"}"#, "from"),
            (r#"{"from_":"a"}"#, "from_"),
        ] {
            let error = recipe(json).unwrap_err();
            assert_eq!(error.field.as_deref(), Some(field), "{json}: {error}");
        }
    }
}
