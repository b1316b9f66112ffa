//! Building templates as the SDKs do it: a name first, then files, then the steps, then questions.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    Json,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use http::{HeaderMap, HeaderValue, StatusCode, header, request::Parts};
use sandkeep_keeper::{BuildWish, EgressWish};
use sandkeep_model::{
    BuildId, Code, Error, IsolationWish, LONGEST_READY, LimitsWish, Ready, ReadyCheck, Recipe,
    Result, Step, TemplateName, build_not_found, check_files_key, random_token,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::Instant;

use super::{dockerfile::Dockerfile, templates::TemplateBody, types::TemplateRef};
use crate::{
    error::E2bError,
    extract::{E2bJson, path_part},
    query::shown,
    state::Shared,
    v1::take_files,
};

/// Names that wait for their build, and uploads that were announced.
const MOST_WAITING: usize = 256;
/// How long an announced upload may take to begin.
const UPLOAD_TIME: Duration = Duration::from_secs(3600);
/// The image of whoever names none; ours is the template the server comes with.
const DEFAULT_IMAGE: &str = "e2bdev/base";
pub(super) const BASE: &str = "base";

/// What the SDKs tell in one call and mean in the next.
#[derive(Debug, Default)]
pub struct Waiting(Mutex<Queues>);

#[derive(Debug, Default)]
struct Queues {
    drafts: VecDeque<Draft>,
    uploads: VecDeque<Upload>,
}

#[derive(Debug, Clone)]
struct Draft {
    build: BuildId,
    template: TemplateName,
    names: Vec<TemplateName>,
    limits: LimitsWish,
    /// What is built, where the first call says it.
    said: Option<StartBuild>,
}

#[derive(Debug)]
struct Upload {
    token: String,
    key: String,
    until: Instant,
}

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        // Both lists are whole after every step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, draft: Draft) {
        let drafts = &mut self.lock().drafts;
        drafts.truncate(MOST_WAITING - 1);
        drafts.push_front(draft);
    }

    pub(super) fn holds(&self, build: &BuildId) -> bool {
        self.draft(build).is_some()
    }

    fn draft(&self, build: &BuildId) -> Option<Draft> {
        let queues = self.lock();
        queues.drafts.iter().find(|d| d.build == *build).cloned()
    }

    fn done(&self, build: &BuildId) {
        self.lock().drafts.retain(|draft| draft.build != *build);
    }

    /// A word that lets whoever has it send these files.
    fn announce(&self, key: &str) -> String {
        let token = random_token(40);
        let uploads = &mut self.lock().uploads;
        uploads.retain(|upload| upload.until > Instant::now());
        uploads.truncate(MOST_WAITING - 1);
        uploads.push_front(Upload {
            token: token.clone(),
            key: key.to_owned(),
            until: Instant::now() + UPLOAD_TIME,
        });
        token
    }

    fn announced(&self, token: &str) -> Option<String> {
        let queues = self.lock();
        let mut live = queues.uploads.iter().filter(|u| u.until > Instant::now());
        live.find(|upload| upload.token == token)
            .map(|upload| upload.key.clone())
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NewTemplate {
    name: Option<String>,
    alias: Option<String>,
    tags: Option<Vec<String>>,
    #[serde(flatten)]
    size: Size,
}

/// What its boxes get that ask for nothing.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Size {
    cpu_count: Option<u32>,
    #[serde(rename = "memoryMB")]
    memory_mb: Option<u64>,
    min_free_disk_mb: Option<u64>,
}

impl From<Size> for LimitsWish {
    fn from(size: Size) -> Self {
        Self {
            cpu_millis: size.cpu_count.map(|cores| cores.saturating_mul(1000)),
            memory_mib: size.memory_mb,
            disk_mib: size.min_free_disk_mb,
            ..Self::default()
        }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Requested {
    #[serde(rename = "templateID")]
    template_id: TemplateName,
    #[serde(rename = "buildID")]
    build_id: BuildId,
    public: bool,
    names: Vec<TemplateName>,
    tags: Vec<String>,
    aliases: Vec<TemplateName>,
}

/// Announces a build.
pub(crate) async fn request(
    State(state): State<Shared>,
    E2bJson(request): E2bJson<NewTemplate>,
) -> Result<(StatusCode, Json<Requested>), E2bError> {
    let name = request
        .name
        .or(request.alias)
        .ok_or_else(|| Error::invalid("name", "name is missing"))?;
    let named = TemplateRef::parse(&name).map_err(|error| error.field("name"))?;
    let mut tags: Vec<String> = named.tag.clone().into_iter().collect();
    tags.extend(request.tags.unwrap_or_default());
    if tags.is_empty() {
        tags.push("default".to_owned());
    }
    let names: Vec<TemplateName> = tags
        .iter()
        .map(|tag| TemplateRef::parse(&format!("{}:{tag}", named.name))?.local())
        .collect::<Result<_>>()
        .map_err(|error| error.field("tags"))?;
    let before = state.keeper.template(&named.name).await?;
    let draft = Draft {
        build: BuildId::random(),
        template: named.name.clone(),
        names,
        limits: request.size.into(),
        said: None,
    };
    let answer = Requested {
        template_id: named.name.clone(),
        build_id: draft.build.clone(),
        public: before.is_some_and(|template| template.public),
        names: vec![named.name.clone()],
        tags,
        aliases: vec![named.name],
    };
    state.waiting.add(draft);
    Ok((StatusCode::ACCEPTED, Json(answer)))
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NewTemplateV2 {
    alias: String,
    #[serde(flatten)]
    size: Size,
}

/// As SDKs up to 2.5 announce a build; they go on as later ones do.
pub(crate) async fn request_v2(
    State(state): State<Shared>,
    E2bJson(request): E2bJson<NewTemplateV2>,
) -> Result<(StatusCode, Json<TemplateBody>), E2bError> {
    let named = TemplateRef::parse(&request.alias).map_err(|error| error.field("alias"))?;
    announce(&state, named, request.size.into(), None).await
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NewTemplateV1 {
    alias: Option<String>,
    dockerfile: String,
    start_cmd: Option<String>,
    ready_cmd: Option<String>,
    #[serde(flatten)]
    size: Size,
}

/// As the first clients do it, with all that is to be built in a Dockerfile.
pub(crate) async fn request_v1(
    State(state): State<Shared>,
    E2bJson(request): E2bJson<NewTemplateV1>,
) -> Result<(StatusCode, Json<TemplateBody>), E2bError> {
    let named = match &request.alias {
        Some(alias) => TemplateRef::parse(alias).map_err(|error| error.field("alias"))?,
        None => TemplateRef::parse(&random_token(20))?,
    };
    from_dockerfile(&state, named, request).await
}

/// The same for a template that has its name.
pub(crate) async fn rebuild_v1(
    State(state): State<Shared>,
    mut parts: Parts,
    E2bJson(request): E2bJson<NewTemplateV1>,
) -> Result<(StatusCode, Json<TemplateBody>), E2bError> {
    let text = path_part(&mut parts, &state, "id").await?;
    let named = TemplateRef::parse(&text)?;
    named.clone().existing(&state).await?;
    from_dockerfile(&state, named, request).await
}

async fn from_dockerfile(
    state: &Shared,
    named: TemplateRef,
    request: NewTemplateV1,
) -> Result<(StatusCode, Json<TemplateBody>), E2bError> {
    let parsed = Dockerfile::parse(&request.dockerfile)?;
    // Told now rather than when the build is begun.
    local_image(state, &parsed.image, false)
        .await
        .map_err(|error| error.field("dockerfile"))?;
    let said = StartBuild {
        from_image: Some(parsed.image),
        from_template: None,
        from_image_registry: None,
        force: false,
        steps: parsed.steps,
        start_cmd: request.start_cmd,
        ready_cmd: request.ready_cmd,
    };
    announce(state, named, request.size.into(), Some(said)).await
}

async fn announce(
    state: &Shared,
    named: TemplateRef,
    limits: LimitsWish,
    said: Option<StartBuild>,
) -> Result<(StatusCode, Json<TemplateBody>), E2bError> {
    let draft = Draft {
        build: BuildId::random(),
        template: named.name.clone(),
        names: vec![named.clone().local()?],
        limits,
        said,
    };
    let before = state.keeper.template(&named.name).await?;
    let limits = state.keeper.limits_for(&draft.limits)?;
    let answer = TemplateBody::announced(&named.name, &draft.build, before, &limits);
    state.waiting.add(draft);
    Ok((StatusCode::ACCEPTED, Json(answer)))
}

#[derive(Debug, Serialize)]
pub(crate) struct FileUpload {
    present: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
}

/// Whether files are here already, and where to send them if not.
pub(crate) async fn files(
    State(state): State<Shared>,
    headers: HeaderMap,
    mut parts: Parts,
) -> Result<(StatusCode, Json<FileUpload>), E2bError> {
    let key = path_part(&mut parts, &state, "hash").await?;
    check_files_key(&key)?;
    let present = state.keeper.has_build_files(&key).await?;
    // Always with an address: a client may insist on sending them again.
    let token = state.waiting.announce(&key);
    let url = format!("{}/build-files/{token}", own_address(&headers));
    Ok((
        StatusCode::CREATED,
        Json(FileUpload {
            present,
            url: Some(url),
        }),
    ))
}

/// This server as the client reached it.
fn own_address(headers: &HeaderMap) -> String {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let scheme = match text("x-forwarded-proto") {
        Some("https") => "https",
        _ => "http",
    };
    let host = text("x-forwarded-host").or_else(|| text("host"));
    format!("{scheme}://{}", host.unwrap_or("localhost"))
}

/// The upload itself: the word in its address is all the client has to show.
pub(crate) async fn upload(
    State(state): State<Shared>,
    request: Request,
) -> Result<Response, E2bError> {
    let (mut parts, body) = request.into_parts();
    let token = path_part(&mut parts, &state, "token").await?;
    let Some(key) = state.waiting.announced(&token) else {
        return Err(Error::new(Code::Unauthenticated, "this upload was not announced").into());
    };
    take_files(&state, &key, body, false).await?;
    Ok(empty(StatusCode::OK))
}

/// An empty answer that says so: clients would wait for a body else.
fn empty(status: StatusCode) -> Response {
    let length = [(header::CONTENT_LENGTH, HeaderValue::from_static("0"))];
    (status, length).into_response()
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StartBuild {
    from_image: Option<String>,
    from_template: Option<String>,
    from_image_registry: Option<Value>,
    #[serde(default)]
    force: bool,
    #[serde(default)]
    steps: Vec<StepBody>,
    start_cmd: Option<String>,
    ready_cmd: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StepBody {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    force: Option<bool>,
    files_hash: Option<String>,
}

impl StepBody {
    pub(super) fn new(kind: &str, args: Vec<String>) -> Self {
        Self {
            kind: kind.to_owned(),
            args,
            force: None,
            files_hash: None,
        }
    }

    fn step(&self) -> Result<Step> {
        let arg = |at: usize| self.args.get(at).cloned();
        let given = |at: usize| arg(at).filter(|text| !text.is_empty());
        let needed = |at: usize| {
            given(at).ok_or_else(|| {
                Error::invalid("steps", format!("a {} step lacks an argument", self.kind))
            })
        };
        match self.kind.to_ascii_uppercase().as_str() {
            "RUN" => Ok(Step::Run {
                command: needed(0)?,
                user: given(1),
            }),
            "COPY" => Ok(Step::Copy {
                from: needed(0)?,
                to: needed(1)?,
                user: given(2),
                mode: given(3),
                files: self
                    .files_hash
                    .clone()
                    .ok_or_else(|| Error::invalid("steps", "a COPY step lacks its filesHash"))?,
            }),
            "ENV" => {
                let pairs = self.args.chunks(2).map(|pair| match pair {
                    [name, value] => Ok((name.clone(), value.clone())),
                    _ => Err(Error::invalid(
                        "steps",
                        "an ENV step has a name without a value",
                    )),
                });
                Ok(Step::Env(pairs.collect::<Result<BTreeMap<_, _>>>()?))
            }
            "USER" => Ok(Step::User(needed(0)?)),
            "WORKDIR" => Ok(Step::Workdir(needed(0)?)),
            other => Err(
                super::absent::not_yet(&format!("a step of type {}", shown(other))).field("steps"),
            ),
        }
    }
}

/// Begins a build that was announced.
pub(crate) async fn start(
    State(state): State<Shared>,
    mut parts: Parts,
    E2bJson(body): E2bJson<StartBuild>,
) -> Result<Response, E2bError> {
    let draft = announced(&state, &mut parts).await?;
    begin(&state, draft, body).await
}

/// Begins a build whose announcement said everything.
pub(crate) async fn start_v1(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<Response, E2bError> {
    let mut draft = announced(&state, &mut parts).await?;
    let said = draft.said.take().ok_or_else(|| {
        Error::conflict("what this build consists of was not said yet")
            .hint("send it with POST /v2/templates/{templateID}/builds/{buildID}")
    })?;
    begin(&state, draft, said).await
}

async fn announced(state: &Shared, parts: &mut Parts) -> Result<Draft> {
    let (template, build) = named(state, parts).await?;
    let draft = state.waiting.draft(&build);
    draft
        .filter(|draft| draft.template == template)
        .ok_or_else(|| build_not_found(&build))
}

async fn begin(state: &Shared, draft: Draft, body: StartBuild) -> Result<Response, E2bError> {
    let wish = wish(state, body, &draft).await?;
    state.keeper.build_template(&draft.template, wish)?;
    state.waiting.done(&draft.build);
    Ok(empty(StatusCode::ACCEPTED))
}

pub(super) async fn named(state: &Shared, parts: &mut Parts) -> Result<(TemplateName, BuildId)> {
    let template = path_part(parts, state, "id").await?;
    let template = TemplateRef::parse(&template)?.name;
    let build = path_part(parts, state, "build").await?.parse()?;
    Ok((template, build))
}

async fn wish(state: &Shared, body: StartBuild, draft: &Draft) -> Result<BuildWish> {
    let from = match (&body.from_template, &body.from_image) {
        (Some(template), _) if !template.is_empty() => TemplateRef::parse(template)
            .and_then(TemplateRef::local)
            .map_err(|error| error.field("fromTemplate"))?,
        (_, image) => {
            let image = image.as_deref().unwrap_or(DEFAULT_IMAGE);
            local_image(state, image, body.from_image_registry.is_some()).await?
        }
    };
    let forced = body.steps.iter().position(|step| step.force == Some(true));
    let steps: Vec<Step> = body
        .steps
        .iter()
        .map(StepBody::step)
        .collect::<Result<_>>()?;
    let given = |text: Option<String>| text.filter(|text| !text.trim().is_empty());
    let ready = given(body.ready_cmd).map(|command| Ready {
        check: ReadyCheck::Command(command),
        timeout_seconds: LONGEST_READY.as_secs(),
    });
    let start = match (given(body.start_cmd), &ready) {
        // Something to wait for, and nothing to start.
        (None, Some(_)) => Some("true".to_owned()),
        (start, _) => start,
    };
    Ok(BuildWish {
        recipe: Recipe {
            from,
            steps,
            start,
            ready,
            after_restore: None,
            limits: draft.limits,
            isolation: vec![IsolationWish::Auto],
            isolation_minimum: None,
        },
        network: EgressWish::default(),
        cached_until: if body.force {
            0
        } else {
            forced.unwrap_or(usize::MAX)
        },
        names: draft.names.clone(),
        id: Some(draft.build.clone()),
    })
}

/// The template an image was imported as: `python:3.12` as `python-3-12`, `python` and
/// `python:latest` as `python`. Nothing is fetched.
async fn local_image(state: &Shared, image: &str, with_login: bool) -> Result<TemplateName> {
    let (path, tag) = match image.rsplit_once(':') {
        Some((path, tag)) if !tag.contains('/') => (path, tag),
        _ => (image, "latest"),
    };
    if path == DEFAULT_IMAGE {
        return Ok(BASE.parse()?);
    }
    let last = path.rsplit('/').next().unwrap_or(path);
    let plain = |text: &str| -> String {
        let kept = |c: char| {
            if c.is_ascii_alphanumeric() || c == '_' {
                c
            } else {
                '-'
            }
        };
        text.to_ascii_lowercase().chars().map(kept).collect()
    };
    let wanted = match tag {
        "latest" => plain(last),
        tag => plain(&format!("{last}-{tag}")),
    };
    let found = match wanted.parse::<TemplateName>() {
        Ok(name) => state.keeper.template(&name).await?.map(|found| found.name),
        Err(_) => None,
    };
    found.ok_or_else(|| {
        let login = if with_login { ", with a login or without" } else { "" };
        Error::new(
            Code::NotImplemented,
            format!("image {} is not here, and this server fetches none from a registry{login}", shown(image)),
        )
        .field("fromImage")
        .hint(format!(
            "build on a template with fromTemplate (e.g. \"base\"), or export the image and import it: `sandkeep template import {wanted} ROOT.tar`"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(json: &str) -> Result<Step> {
        serde_json::from_str::<StepBody>(json).unwrap().step()
    }

    #[test]
    fn steps_of_the_sdks_are_understood() {
        assert_eq!(
            step(r#"{"type":"RUN","args":["make","root"],"force":false}"#).unwrap(),
            Step::Run {
                command: "make".to_owned(),
                user: Some("root".to_owned())
            }
        );
        let hash = "a".repeat(64);
        let copy = format!(r#"{{"type":"COPY","args":["a","/b","",""],"filesHash":"{hash}"}}"#);
        assert!(matches!(
            step(&copy).unwrap(),
            Step::Copy {
                user: None,
                mode: None,
                ..
            }
        ));
        let env = step(r#"{"type":"ENV","args":["A","1","B","2"]}"#).unwrap();
        assert!(matches!(env, Step::Env(map) if map["B"] == "2"));
        for bad in [
            r#"{"type":"ENV","args":["A"]}"#,
            r#"{"type":"COPY","args":["a","b"]}"#,
            r#"{"type":"RUN","args":[]}"#,
            r#"{"type":"VOLUME","args":["/x"]}"#,
        ] {
            assert_eq!(
                step(bad).unwrap_err().field.as_deref(),
                Some("steps"),
                "{bad}"
            );
        }
    }

    #[test]
    fn an_upload_needs_its_word() {
        let waiting = Waiting::default();
        let token = waiting.announce("k");
        assert_eq!(waiting.announced(&token).as_deref(), Some("k"));
        assert_eq!(waiting.announced("x"), None);
        for _ in 0..2 * MOST_WAITING {
            waiting.announce("other");
        }
        assert_eq!(waiting.announced(&token), None);
    }
}
