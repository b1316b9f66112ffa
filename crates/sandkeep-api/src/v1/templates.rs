//! What boxes are made from.

use axum::{
    Json,
    body::Body,
    extract::{Request, State},
};
use http::{StatusCode, request::Parts};
use sandkeep_keeper::LevelView;
use sandkeep_model::{
    BuildId, Code, Error, Isolation, NameError, Template, TemplateName, Timestamp,
};
use serde::Serialize;
use tokio::sync::Semaphore;
use utoipa::ToSchema;

use super::{exec_ws::stopping, files::steady, upload::upload};
use crate::{error::NativeError, extract::path_part, query::shown, state::Shared};

/// Imports at once: each keeps a thread waiting for its client.
static IMPORTS: Semaphore = Semaphore::const_new(2);

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TemplateView {
    #[schema(value_type = String, example = "base")]
    name: TemplateName,
    #[schema(value_type = String, format = DateTime)]
    created_at: Timestamp,
    size_bytes: u64,
    /// Where it came from, in words.
    origin: String,
    /// Set when it was built from a recipe.
    #[schema(required)]
    built: Option<BuiltView>,
}

/// What a template built from a recipe remembers of it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct BuiltView {
    /// The build that made it.
    #[schema(value_type = String)]
    build: BuildId,
    #[schema(value_type = String)]
    from: TemplateName,
    steps: Vec<String>,
    /// Names of the variables its sandboxes have.
    env: Vec<String>,
    #[schema(required)]
    user: Option<String>,
    #[schema(required)]
    workdir: Option<String>,
    /// What runs in every sandbox of it.
    #[schema(required)]
    start: Option<String>,
    /// What runs in every copy of a sandbox of it.
    #[schema(required)]
    after_restore: Option<String>,
    /// How its sandboxes begin, by isolation level.
    levels: Vec<LevelBody>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LevelBody {
    #[schema(value_type = String, example = "gvisor")]
    isolation: Isolation,
    /// A new sandbox is a restore with its processes already running.
    warm: bool,
    memory_bytes: u64,
    #[schema(required)]
    engine: Option<String>,
    /// Why it is not warm. The start command then runs at create.
    #[schema(required)]
    why: Option<String>,
}

impl From<LevelView> for LevelBody {
    fn from(level: LevelView) -> Self {
        Self {
            isolation: level.level,
            warm: level.warm,
            memory_bytes: level.memory_bytes,
            engine: level.engine.map(|engine| engine.to_string()),
            why: level.why,
        }
    }
}

async fn view(state: &Shared, template: Template) -> Result<TemplateView, Error> {
    let built = match template.built {
        None => None,
        Some(built) => Some(BuiltView {
            levels: state
                .keeper
                .template_levels(&template.name)
                .await?
                .into_iter()
                .map(LevelBody::from)
                .collect(),
            build: built.build,
            from: built.from,
            steps: built.steps,
            env: built.env.into_keys().collect(),
            user: built.defaults.user,
            workdir: built.defaults.workdir,
            after_restore: built.defaults.after_restore,
            start: built.start,
        }),
    };
    Ok(TemplateView {
        name: template.name,
        created_at: template.created_at,
        size_bytes: template.size_bytes,
        origin: template.origin,
        built,
    })
}

pub(super) fn missing(name: &str) -> Error {
    Error::not_found(format!("template {} was not found", shown(name)))
        .hint("list the templates with GET /v1/templates")
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TemplateList {
    templates: Vec<TemplateView>,
}

/// All templates.
#[utoipa::path(get, path = "/v1/templates", tag = "templates",
    responses((status = 200, body = TemplateList)))]
pub(crate) async fn list(State(state): State<Shared>) -> Result<Json<TemplateList>, NativeError> {
    let mut templates = Vec::new();
    for template in state.keeper.templates().await? {
        templates.push(view(&state, template).await?);
    }
    Ok(Json(TemplateList { templates }))
}

/// One template.
#[utoipa::path(get, path = "/v1/templates/{name}", tag = "templates",
    params(("name" = String, Path, description = "Its name")),
    responses((status = 200, body = TemplateView)))]
pub(crate) async fn get(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<Json<TemplateView>, NativeError> {
    let name = path_part(&mut parts, &state, "name").await?;
    let found = match name.parse::<TemplateName>() {
        Ok(name) => state.keeper.template(&name).await?,
        Err(_) => None,
    };
    let template = found.ok_or_else(|| missing(&name))?;
    Ok(Json(view(&state, template).await?))
}

/// Makes a template from a tar archive of a root file system.
///
/// The body is the archive: plain, gzip or zstd, at most 32 GiB unpacked. An upload that
/// breaks off leaves nothing.
#[utoipa::path(post, path = "/v1/templates/{name}", tag = "templates",
    params(("name" = String, Path, description = "Its name; must be free")),
    request_body(content = String, content_type = "application/octet-stream"),
    responses((status = 201, body = TemplateView)))]
pub(crate) async fn import(
    State(state): State<Shared>,
    request: Request,
) -> Result<(StatusCode, Json<TemplateView>), NativeError> {
    let (mut parts, body) = request.into_parts();
    let name = name_in(&mut parts, &state).await?;
    let _slot = IMPORTS.try_acquire().map_err(|_| {
        Error::new(
            Code::ResourceExhausted,
            "other templates are being imported already",
        )
        .hint("try again when they are done")
    })?;
    let made = import_body(&state, &name, body).await?;
    Ok((StatusCode::CREATED, Json(view(&state, made).await?)))
}

/// Removes a template; sandboxes made from it live on.
#[utoipa::path(delete, path = "/v1/templates/{name}", tag = "templates",
    params(("name" = String, Path, description = "Its name")),
    responses((status = 204, description = "It is gone")))]
pub(crate) async fn remove(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<StatusCode, NativeError> {
    let name = name_in(&mut parts, &state).await?;
    state.keeper.remove_template(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn name_in(
    parts: &mut Parts,
    state: &Shared,
) -> Result<TemplateName, NativeError> {
    let name = path_part(parts, state, "name").await?;
    name.parse()
        .map_err(|error: NameError| Error::from(error).field("name").into())
}

async fn import_body(state: &Shared, name: &TemplateName, body: Body) -> Result<Template, Error> {
    let (feed, reader) = upload();
    let feeding = async {
        tokio::select! {
            () = feed.pump(steady(body)) => Ok(()),
            // The reader finds its upload broken off.
            () = state.shutdown.cancelled() => Err(stopping()),
        }
    };
    let (fed, made) = tokio::join!(feeding, state.keeper.import_template(name, reader));
    fed?;
    made
}
