//! Tags: other names for builds of a template. A tag is a template of its own, `NAME--TAG`.

use axum::{Json, extract::State};
use http::{StatusCode, request::Parts};
use sandkeep_model::{Error, Result, Template, TemplateName, Timestamp};
use serde::{Deserialize, Serialize};

use super::types::TemplateRef;
use crate::{
    error::E2bError,
    extract::{E2bJson, path_part},
    state::Shared,
};

const DEFAULT: &str = "default";

#[derive(Debug, Deserialize)]
pub(crate) struct Assign {
    target: String,
    tags: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Assigned {
    #[serde(rename = "buildID")]
    build_id: String,
    tags: Vec<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Remove {
    name: String,
    tags: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TagBody {
    tag: String,
    #[serde(rename = "buildID")]
    build_id: String,
    created_at: Timestamp,
}

/// Clients parse it as a UUID; a template that was not built has none.
pub(super) fn build_id(template: &Template) -> String {
    match &template.built {
        Some(built) => built.build.to_string(),
        None => "00000000-0000-0000-0000-000000000000".to_owned(),
    }
}

fn tagged(name: &TemplateName, tag: &str) -> Result<TemplateName> {
    TemplateRef::parse(&format!("{name}:{tag}"))
        .and_then(TemplateRef::local)
        .map_err(|error| error.field("tags"))
}

/// Gives a build more tags; one that another build has moves.
pub(crate) async fn assign(
    State(state): State<Shared>,
    E2bJson(request): E2bJson<Assign>,
) -> Result<(StatusCode, Json<Assigned>), E2bError> {
    let target = TemplateRef::parse(&request.target).map_err(|error| error.field("target"))?;
    let name = target.name.clone();
    let source = target.existing(&state).await?;
    let names: Vec<TemplateName> = request
        .tags
        .iter()
        .map(|tag| tagged(&name, tag))
        .collect::<Result<_>>()?;
    for to in names {
        state.keeper.copy_template(&source.name, &to).await?;
    }
    Ok((
        StatusCode::CREATED,
        Json(Assigned {
            build_id: build_id(&source),
            tags: request.tags,
        }),
    ))
}

pub(crate) async fn remove(
    State(state): State<Shared>,
    E2bJson(request): E2bJson<Remove>,
) -> Result<StatusCode, E2bError> {
    let name = TemplateRef::parse(&request.name)
        .map_err(|error| error.field("name"))?
        .name;
    if request.tags.iter().any(|tag| tag == DEFAULT) {
        return Err(
            Error::invalid("tags", "the tag \"default\" is the template itself")
                .hint("delete the template")
                .into(),
        );
    }
    for tag in &request.tags {
        state.keeper.remove_template(&tagged(&name, tag)?).await?;
    }
    Ok(StatusCode::NO_CONTENT)
}

/// All tags of a template, its own among them.
pub(crate) async fn list(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<Json<Vec<TagBody>>, E2bError> {
    let text = path_part(&mut parts, &state, "id").await?;
    let name = TemplateRef::parse(&text)?.name;
    let mut tags = Vec::new();
    for template in state.keeper.templates().await? {
        if let Some(tag) = tag_of(&name, &template.name) {
            tags.push(TagBody {
                tag,
                build_id: build_id(&template),
                created_at: template.created_at,
            });
        }
    }
    if tags.is_empty() {
        return Err(Error::not_found(format!("template '{name}' not found")).into());
    }
    Ok(Json(tags))
}

/// The tag a template is of another, if it is one.
pub(super) fn tag_of(name: &TemplateName, of: &TemplateName) -> Option<String> {
    if name == of {
        return Some(DEFAULT.to_owned());
    }
    let written = of
        .as_str()
        .strip_prefix(name.as_str())?
        .strip_prefix("--")?;
    Some(
        written
            .replace("__", "\0")
            .replace('_', ".")
            .replace('\0', "_"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_found_again() {
        let name: TemplateName = "web".parse().unwrap();
        for tag in ["v1", "v1.2.3", "a_b", "x-y"] {
            let stored = tagged(&name, tag).unwrap();
            assert_eq!(tag_of(&name, &stored).as_deref(), Some(tag), "{stored}");
        }
        assert_eq!(tagged(&name, DEFAULT).unwrap(), name);
        assert_eq!(tag_of(&name, &"website".parse().unwrap()), None);
        assert!(tagged(&name, "").is_err());
    }
}
