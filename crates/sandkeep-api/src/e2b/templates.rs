//! What there is to make boxes from.

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, request::Parts};
use sandkeep_keeper::PointUse;
use sandkeep_model::{BuildId, Code, Error, Limits, Result, Template, TemplateName, Timestamp};
use serde::{Deserialize, Serialize};

use super::{
    build_status::status_name,
    builds::BASE,
    tags::{build_id, tag_of},
    types::TemplateRef,
};
use crate::{
    error::E2bError,
    extract::{E2bJson, path_part},
    query::{E2bQuery, Query, shown},
    state::{ApiState, Shared},
};

/// `Template` as the SDKs, the CLI and the dashboard of E2B list it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TemplateBody {
    #[serde(rename = "templateID")]
    template_id: TemplateName,
    #[serde(rename = "buildID")]
    build_id: String,
    #[serde(flatten)]
    size: SizeBody,
    aliases: [TemplateName; 1],
    names: [TemplateName; 1],
    public: bool,
    is_default: bool,
    build_status: &'static str,
    build_count: usize,
    spawn_count: u32,
    last_spawned_at: Option<Timestamp>,
    created_at: Timestamp,
    updated_at: Timestamp,
    created_by: Option<String>,
}

/// What a box of it gets that asks for nothing.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SizeBody {
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u64,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u64,
    envd_version: &'static str,
}

impl From<&Limits> for SizeBody {
    fn from(limits: &Limits) -> Self {
        Self {
            cpu_count: limits.cpu_count(),
            memory_mb: limits.memory_mib,
            disk_size_mb: limits.disk_mib,
            envd_version: sandkeep_model::ENVD_VERSION,
        }
    }
}

impl TemplateBody {
    fn of(state: &ApiState, template: Template) -> Self {
        let limits = state.keeper.limits_of(&template);
        Self {
            build_id: build_id(&template),
            size: SizeBody::from(&limits),
            aliases: [template.name.clone()],
            names: [template.name.clone()],
            public: template.public,
            is_default: template.name.as_str() == BASE,
            build_status: "ready",
            build_count: builds_of(state, &template).len(),
            spawn_count: 0,
            last_spawned_at: None,
            created_at: template.created_at,
            updated_at: template.created_at,
            created_by: None,
            template_id: template.name,
        }
    }

    /// One whose build was announced; `before` has the name now.
    pub(super) fn announced(
        name: &TemplateName,
        build: &BuildId,
        before: Option<Template>,
        limits: &Limits,
    ) -> Self {
        let now = Timestamp::now();
        Self {
            template_id: name.clone(),
            build_id: build.to_string(),
            size: SizeBody::from(limits),
            aliases: [name.clone()],
            names: [name.clone()],
            public: before.as_ref().is_some_and(|before| before.public),
            is_default: name.as_str() == BASE,
            build_status: "waiting",
            build_count: 0,
            spawn_count: 0,
            last_spawned_at: None,
            created_at: before.map_or(now, |before| before.created_at),
            updated_at: now,
            created_by: None,
        }
    }
}

pub(crate) async fn list(State(state): State<Shared>) -> Result<Json<Vec<TemplateBody>>, E2bError> {
    let templates = state.keeper.templates().await?.into_iter();
    Ok(Json(
        templates.map(|one| TemplateBody::of(&state, one)).collect(),
    ))
}

/// The same in pages.
pub(crate) async fn list_v2(
    State(state): State<Shared>,
    E2bQuery(mut query): E2bQuery,
) -> Result<Response, E2bError> {
    let templates = state.keeper.templates().await?;
    let (page, next) = page(&mut query, templates, |one| one.name.to_string())?;
    let page: Vec<_> = page
        .into_iter()
        .map(|one| TemplateBody::of(&state, one))
        .collect();
    Ok(paged(Json(page), next))
}

/// What a server comes with.
pub(crate) async fn defaults(
    State(state): State<Shared>,
) -> Result<Json<Vec<TemplateBody>>, E2bError> {
    let base = state.keeper.template(&BASE.parse()?).await?;
    Ok(Json(
        base.into_iter()
            .map(|one| TemplateBody::of(&state, one))
            .collect(),
    ))
}

/// One page of a list, and the word for the next one: the name of the last.
fn page<T>(
    query: &mut Query,
    all: Vec<T>,
    name: impl Fn(&T) -> String,
) -> Result<(Vec<T>, Option<String>)> {
    let most = usize::try_from(crate::v1::limit(query)?).unwrap_or(usize::MAX);
    let after = query.take("nextToken")?.filter(|token| !token.is_empty());
    let begin = match &after {
        None => 0,
        Some(token) => {
            let last = all.iter().position(|one| name(one) == *token);
            last.map(|at| at + 1).ok_or_else(|| {
                Error::invalid("nextToken", "the page before this one has changed")
                    .hint("begin again, without nextToken")
            })?
        }
    };
    let more = all.len() > begin.saturating_add(most);
    let page: Vec<T> = all.into_iter().skip(begin).take(most).collect();
    let next = page.last().filter(|_| more).map(name);
    Ok((page, next))
}

fn paged(body: impl IntoResponse, next: Option<String>) -> Response {
    let mut response = body.into_response();
    if let Some(token) = next.and_then(|next| HeaderValue::from_str(&next).ok()) {
        response.headers_mut().insert("x-next-token", token);
    }
    response
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct BuildBody {
    #[serde(rename = "buildID")]
    build_id: String,
    status: &'static str,
    created_at: Timestamp,
    updated_at: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    finished_at: Option<Timestamp>,
    #[serde(flatten)]
    size: SizeBody,
}

/// Builds of a template that are known, newest first: those of this run of the server, and
/// the one it came from.
fn builds_of(state: &ApiState, template: &Template) -> Vec<BuildBody> {
    let size = || SizeBody::from(&state.keeper.limits_of(template));
    let made = build_id(template);
    let mut builds: Vec<BuildBody> = state
        .keeper
        .builds(&template.name)
        .into_iter()
        .map(|build| BuildBody {
            build_id: build.id.to_string(),
            status: status_name(build.status),
            created_at: build.begun_at,
            updated_at: build.ended_at.unwrap_or(build.begun_at),
            finished_at: build.ended_at,
            size: size(),
        })
        .collect();
    builds.reverse();
    if builds.iter().all(|build| build.build_id != made) {
        builds.push(BuildBody {
            build_id: made,
            status: "ready",
            created_at: template.created_at,
            updated_at: template.created_at,
            finished_at: Some(template.created_at),
            size: size(),
        });
    }
    builds
}

#[derive(Debug, Serialize)]
struct WithBuilds {
    #[serde(flatten)]
    template: TemplateBody,
    builds: Vec<BuildBody>,
}

/// A template with its builds.
pub(crate) async fn get(
    State(state): State<Shared>,
    E2bQuery(mut query): E2bQuery,
    mut parts: Parts,
) -> Result<Response, E2bError> {
    let name = path_part(&mut parts, &state, "id").await?;
    let found = TemplateRef::parse(&name)?.existing(&state).await?;
    let builds = builds_of(&state, &found);
    let (builds, next) = page(&mut query, builds, |build| build.build_id.clone())?;
    let template = TemplateBody::of(&state, found);
    Ok(paged(Json(WithBuilds { template, builds }), next))
}

#[derive(Debug, Deserialize)]
pub(crate) struct Change {
    public: Option<bool>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Changed {
    names: [TemplateName; 1],
}

/// Marks a template as public or not. There is one team here and whoever has a key belongs to
/// it, so the mark opens and closes nothing; it is kept with the template.
pub(crate) async fn change(
    State(state): State<Shared>,
    mut parts: Parts,
    E2bJson(change): E2bJson<Change>,
) -> Result<Json<Changed>, E2bError> {
    let text = path_part(&mut parts, &state, "id").await?;
    let found = TemplateRef::parse(&text)?.existing(&state).await?;
    if let Some(public) = change.public {
        state.keeper.mark_template(&found.name, public).await?;
    }
    Ok(Json(Changed {
        names: [found.name],
    }))
}

#[derive(Debug, Serialize)]
pub(crate) struct AliasBody {
    #[serde(rename = "templateID")]
    template_id: TemplateName,
    public: bool,
}

/// How the SDKs ask whether a template exists.
pub(crate) async fn alias(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<Json<AliasBody>, E2bError> {
    let name = path_part(&mut parts, &state, "name").await?;
    let found = TemplateRef::parse(&name)?.existing(&state).await?;
    Ok(Json(AliasBody {
        template_id: found.name,
        public: found.public,
    }))
}

/// Deletes a template with its tags, one tag of it, or a snapshot.
pub(crate) async fn delete(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<StatusCode, E2bError> {
    let text = path_part(&mut parts, &state, "id").await?;
    let wanted = TemplateRef::parse(&text)?;
    let whole = wanted.tag.as_deref().is_none_or(|tag| tag == "default");
    let name = wanted.name.clone();
    let found = match wanted.clone().existing(&state).await {
        Ok(found) => found.name,
        Err(error) if error.code != Code::NotFound => return Err(error.into()),
        Err(_) => {
            let point = match wanted.as_snapshot() {
                Some(text) => {
                    state
                        .keeper
                        .named_point(&text, None, PointUse::Change)
                        .await
                }
                None => Err(Error::not_found("")),
            };
            let point = point.map_err(|error| match error.code {
                Code::NotFound => Error::not_found(format!("{} was not found", shown(&text))),
                _ => error,
            })?;
            state.keeper.delete_point(&point.id).await?;
            return Ok(StatusCode::NO_CONTENT);
        }
    };
    state.keeper.remove_template(&found).await?;
    if whole {
        for template in state.keeper.templates().await? {
            if tag_of(&name, &template.name).is_some() {
                state.keeper.remove_template(&template.name).await?;
            }
        }
    }
    Ok(StatusCode::NO_CONTENT)
}
