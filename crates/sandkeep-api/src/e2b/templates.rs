//! What there is to make boxes from.

use axum::{Json, extract::State};
use http::request::Parts;
use sandkeep_model::{Error, Template, TemplateName, Timestamp};
use serde::Serialize;

use super::types::TemplateRef;
use crate::{error::E2bError, extract::path_part, query::shown, state::Shared};

/// `Template` as the CLI and the dashboard of E2B list it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TemplateBody {
    #[serde(rename = "templateID")]
    template_id: TemplateName,
    #[serde(rename = "buildID")]
    build_id: &'static str,
    aliases: [TemplateName; 1],
    names: [TemplateName; 1],
    public: bool,
    build_status: &'static str,
    build_count: u32,
    spawn_count: u32,
    last_spawned_at: Option<Timestamp>,
    created_at: Timestamp,
    updated_at: Timestamp,
    created_by: Option<String>,
    envd_version: &'static str,
}

impl From<Template> for TemplateBody {
    fn from(template: Template) -> Self {
        Self {
            // Clients parse it as a UUID; there is only ever one build of a template here.
            build_id: "00000000-0000-0000-0000-000000000000",
            aliases: [template.name.clone()],
            names: [template.name.clone()],
            template_id: template.name,
            public: false,
            build_status: "ready",
            build_count: 1,
            spawn_count: 0,
            last_spawned_at: None,
            created_at: template.created_at,
            updated_at: template.created_at,
            created_by: None,
            envd_version: sandkeep_model::ENVD_VERSION,
        }
    }
}

pub(crate) async fn list(State(state): State<Shared>) -> Result<Json<Vec<TemplateBody>>, E2bError> {
    let templates = state.keeper.templates().await?;
    Ok(Json(
        templates.into_iter().map(TemplateBody::from).collect(),
    ))
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
    let wanted = TemplateRef::parse(&name)?.default_only()?;
    let templates = state.keeper.templates().await?;
    if templates.iter().any(|template| template.name == wanted) {
        return Ok(Json(AliasBody {
            template_id: wanted,
            public: false,
        }));
    }
    Err(Error::not_found(format!("template {} was not found", shown(&name))).into())
}
