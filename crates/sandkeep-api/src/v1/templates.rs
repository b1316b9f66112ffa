//! What boxes are made from.

use axum::{Json, extract::State};
use http::request::Parts;
use sandkeep_model::{Error, Template, TemplateName, Timestamp};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{error::NativeError, extract::path_part, query::shown, state::Shared};

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
