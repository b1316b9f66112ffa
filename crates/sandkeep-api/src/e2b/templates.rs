//! What there is to make boxes from.

use axum::{Json, extract::State};
use http::{StatusCode, request::Parts};
use sandkeep_model::{Code, Error, Template, TemplateName, Timestamp};
use serde::Serialize;

use super::{
    tags::{build_id, tag_of},
    types::TemplateRef,
};
use crate::{error::E2bError, extract::path_part, query::shown, state::Shared};

/// `Template` as the CLI and the dashboard of E2B list it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TemplateBody {
    #[serde(rename = "templateID")]
    template_id: TemplateName,
    #[serde(rename = "buildID")]
    build_id: String,
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
            build_id: build_id(&template),
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
    let found = TemplateRef::parse(&name)?.existing(&state).await?;
    Ok(Json(AliasBody {
        template_id: found.name,
        public: false,
    }))
}

pub(crate) async fn get(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<Json<TemplateBody>, E2bError> {
    let name = path_part(&mut parts, &state, "id").await?;
    let found = TemplateRef::parse(&name)?.existing(&state).await?;
    Ok(Json(found.into()))
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
    let found = match wanted.existing(&state).await {
        Ok(found) => found.name,
        Err(error) if error.code != Code::NotFound => return Err(error.into()),
        Err(_) => {
            let Some(point) = state.keeper.point_called(name.as_str()).await? else {
                return Err(Error::not_found(format!("{} was not found", shown(&text))).into());
            };
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
