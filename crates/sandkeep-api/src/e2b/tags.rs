//! Tags: other names for builds of a template. A tag is a template of its own, `NAME--TAG`.

use axum::{Json, extract::State};
use http::{StatusCode, request::Parts};
use sandkeep_model::{Error, Result, Template, TemplateName, Timestamp};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::types::TemplateRef;
use crate::{
    error::E2bError,
    extract::{E2bJson, path_part},
    query::{E2bQuery, shown},
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
async fn tags_of(state: &Shared, parts: &mut Parts) -> Result<(TemplateName, Vec<Tagged>)> {
    let text = path_part(parts, state, "id").await?;
    let name = TemplateRef::parse(&text)?.name;
    let mut tags = Vec::new();
    for template in state.keeper.templates().await? {
        if let Some(tag) = tag_of(&name, &template.name) {
            tags.push(Tagged { tag, template });
        }
    }
    if tags.is_empty() {
        return Err(Error::not_found(format!("template '{name}' not found")));
    }
    Ok((name, tags))
}

struct Tagged {
    tag: String,
    template: Template,
}

pub(crate) async fn list(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<Json<Vec<TagBody>>, E2bError> {
    let (_, tags) = tags_of(&state, &mut parts).await?;
    let tags = tags.into_iter().map(|tagged| TagBody {
        build_id: build_id(&tagged.template),
        created_at: tagged.template.created_at,
        tag: tagged.tag,
    });
    Ok(Json(tags.collect()))
}

#[derive(Debug, Serialize)]
pub(crate) struct Count {
    total: usize,
}

pub(crate) async fn count(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<Json<Count>, E2bError> {
    let (_, tags) = tags_of(&state, &mut parts).await?;
    Ok(Json(Count { total: tags.len() }))
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Exists {
    exists: bool,
    normalized_tag: String,
}

pub(crate) async fn exists(
    State(state): State<Shared>,
    E2bQuery(mut query): E2bQuery,
    mut parts: Parts,
) -> Result<Json<Exists>, E2bError> {
    let (name, tags) = tags_of(&state, &mut parts).await?;
    let wanted = query.take("tag")?.unwrap_or_default();
    let wanted = normalized(&name, &wanted)?;
    Ok(Json(Exists {
        exists: tags.iter().any(|tagged| tagged.tag == wanted),
        normalized_tag: wanted,
    }))
}

fn normalized(name: &TemplateName, tag: &str) -> Result<String> {
    tagged(name, tag)?;
    Ok(tag.to_ascii_lowercase())
}

/// A tag is at one build at a time, and what it was at before is not kept.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Assignment {
    assignment_id: String,
    build_id: String,
    assigned_at: Timestamp,
    build_created_at: Timestamp,
    build_finished_at: Option<Timestamp>,
}

impl From<&Template> for Assignment {
    fn from(template: &Template) -> Self {
        let build_id = build_id(template);
        Self {
            // One of its own for each tag: two may be at the same build.
            assignment_id: uuid_of(&format!("{} {build_id}", template.name)),
            build_id,
            assigned_at: template.created_at,
            build_created_at: template.created_at,
            build_finished_at: Some(template.created_at),
        }
    }
}

/// A name-based UUID; the same text gives the same one.
fn uuid_of(text: &str) -> String {
    let hash = Sha256::digest(text);
    let mut hex: String = hash[..16]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    // Version 8: made in a way of one's own. Variant 10.
    hex.replace_range(12..13, "8");
    hex.replace_range(16..17, "8");
    for at in [20, 16, 12, 8] {
        hex.insert(at, '-');
    }
    hex
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Groups {
    tags: Vec<Group>,
    next_cursor: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Group {
    tag: String,
    assignments: [Assignment; 1],
    has_more: bool,
}

pub(crate) async fn groups(
    State(state): State<Shared>,
    E2bQuery(mut query): E2bQuery,
    mut parts: Parts,
) -> Result<Json<Groups>, E2bError> {
    let most = query.parsed::<usize>("tagsLimit")?.unwrap_or(25).max(1);
    let search = query.take("search")?.unwrap_or_default();
    let sort = query.take("sort")?;
    let after = query.take("tagsCursor")?.filter(|text| !text.is_empty());
    let (_, mut tags) = tags_of(&state, &mut parts).await?;
    tags.retain(|tagged| tagged.tag.contains(&search));
    tags.sort_by(|a, b| a.tag.cmp(&b.tag));
    match sort.as_deref() {
        Some("name_asc") => {}
        Some("name_desc") => tags.reverse(),
        Some("latest_asc") => tags.sort_by_key(|tagged| tagged.template.created_at),
        None | Some("" | "latest_desc") => {
            tags.sort_by_key(|tagged| std::cmp::Reverse(tagged.template.created_at));
        }
        Some(other) => {
            let words = format!(
                "sort is {}, it must be latest_desc, latest_asc, name_asc or name_desc",
                shown(other)
            );
            return Err(Error::invalid("sort", words).into());
        }
    }
    let begin = match after {
        None => 0,
        Some(last) => tags
            .iter()
            .position(|tagged| tagged.tag == last)
            .map(|at| at + 1)
            .ok_or_else(|| Error::invalid("tagsCursor", "the page before this one has changed"))?,
    };
    let more = tags.len() > begin.saturating_add(most);
    let page = tags.into_iter().skip(begin).take(most);
    let tags: Vec<Group> = page
        .map(|tagged| Group {
            assignments: [Assignment::from(&tagged.template)],
            has_more: false,
            tag: tagged.tag,
        })
        .collect();
    let next_cursor = tags.last().filter(|_| more).map(|group| group.tag.clone());
    Ok(Json(Groups { tags, next_cursor }))
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Assignments {
    data: Vec<Assignment>,
    next_cursor: Option<String>,
}

pub(crate) async fn assignments(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<Json<Assignments>, E2bError> {
    let tag = path_part(&mut parts, &state, "tag").await?;
    let (name, tags) = tags_of(&state, &mut parts).await?;
    let tag = normalized(&name, &tag)?;
    let of = tags.iter().filter(|tagged| tagged.tag == tag);
    Ok(Json(Assignments {
        data: of
            .map(|tagged| Assignment::from(&tagged.template))
            .collect(),
        next_cursor: None,
    }))
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
