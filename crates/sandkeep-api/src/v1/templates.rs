//! What boxes are made from.

use axum::{
    Json,
    body::Body,
    extract::{Request, State},
};
use http::{StatusCode, request::Parts};
use sandkeep_model::{Code, Error, NameError, Template, TemplateName, Timestamp};
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
}

impl From<Template> for TemplateView {
    fn from(template: Template) -> Self {
        Self {
            name: template.name,
            created_at: template.created_at,
            size_bytes: template.size_bytes,
            origin: template.origin,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TemplateList {
    templates: Vec<TemplateView>,
}

/// All templates.
#[utoipa::path(get, path = "/v1/templates", tag = "templates",
    responses((status = 200, body = TemplateList)))]
pub(crate) async fn list(State(state): State<Shared>) -> Result<Json<TemplateList>, NativeError> {
    let templates = state.keeper.templates().await?;
    Ok(Json(TemplateList {
        templates: templates.into_iter().map(TemplateView::from).collect(),
    }))
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
    let wanted = name.parse::<TemplateName>().ok();
    state
        .keeper
        .templates()
        .await?
        .into_iter()
        .find(|template| Some(&template.name) == wanted.as_ref())
        .map(|template| Json(template.into()))
        .ok_or_else(|| {
            Error::not_found(format!("template {} was not found", shown(&name)))
                .hint("list the templates with GET /v1/templates")
                .into()
        })
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
    Ok((StatusCode::CREATED, Json(made.into())))
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

async fn name_in(parts: &mut Parts, state: &Shared) -> Result<TemplateName, NativeError> {
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
