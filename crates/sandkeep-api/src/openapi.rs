//! The OpenAPI 3.1 document of the native API.

use utoipa::{
    Modify, OpenApi,
    openapi::{
        self, Content, Ref, RefOr, ResponseBuilder,
        path::Operation,
        security::{
            ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityRequirement, SecurityScheme,
        },
    },
};

use sandkeep_model::Limits;
use serde_json::{Map, Value, json};

use crate::{bounds, error::ErrorBody, v1};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Sandkeep",
        description = "Sandboxes for AI agents, on your own machine.\n\nEvery refusal is \
            `{\"error\": {code, message, hint, field, retryable}}`; `code` is stable, `hint` says \
            what to do."
    ),
    components(schemas(ErrorBody)),
    modifiers(&Keys),
    tags(
        (name = "server", description = "The server itself"),
        (name = "sandboxes", description = "Sandboxes and their life"),
        (name = "exec", description = "Commands in a sandbox"),
        (name = "network", description = "What a sandbox may reach"),
        (name = "secrets", description = "Values that are added to requests at the edge, and never shown"),
        (name = "identity", description = "Who a sandbox is, and tokens that prove it"),
        (name = "audit", description = "What happened, provably unchanged"),
        (name = "time", description = "Pauses, points, forks and rollbacks"),
        (name = "files", description = "Files of a sandbox"),
        (name = "events", description = "What happened"),
        (name = "templates", description = "What sandboxes are made from"),
    )
)]
struct Skeleton;

struct Keys;

impl Modify for Keys {
    fn modify(&self, document: &mut openapi::OpenApi) {
        let components = document.components.get_or_insert_default();
        components.add_security_scheme(
            "api_key",
            SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-API-Key"))),
        );
        components.add_security_scheme(
            "bearer",
            SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer)),
        );
    }
}

/// Every native route with its bodies, and the one shape of every refusal.
pub fn document() -> openapi::OpenApi {
    let mut document = Skeleton::openapi();
    document.info.version = env!("CARGO_PKG_VERSION").to_owned();
    for routes in [v1::quick(), v1::streaming()] {
        document.merge(routes.into_openapi());
    }
    let refusal: RefOr<openapi::Response> = ResponseBuilder::new()
        .description("Refused: what, why, and what to do about it")
        .content(
            "application/json",
            Content::new(Some(RefOr::Ref(Ref::from_schema_name("ErrorBody")))),
        )
        .build()
        .into();
    for (path, item) in &mut document.paths.paths {
        let operations = [
            &mut item.get,
            &mut item.put,
            &mut item.post,
            &mut item.patch,
            &mut item.delete,
        ];
        for operation in operations.into_iter().flatten() {
            name_it(operation);
            let answers = &mut operation.responses.responses;
            answers.insert("default".to_owned(), refusal.clone());
            for (status, answer) in answers.iter_mut() {
                // The format insists on words where the schema says it all.
                if let RefOr::T(answer) = answer
                    && answer.description.is_empty()
                {
                    let words = if status == "201" {
                        "Made"
                    } else {
                        "The answer"
                    };
                    answer.description = words.to_owned();
                }
            }
            if path != "/v1/health" {
                operation.security = Some(vec![
                    SecurityRequirement::new("api_key", Vec::<String>::new()),
                    SecurityRequirement::new("bearer", Vec::<String>::new()),
                ]);
            }
        }
    }
    document
}

/// The document as it is served: with the bounds of this server.
pub(crate) fn described(most: &Limits) -> Value {
    let mut document = serde_json::to_value(document()).unwrap_or_default();
    bounds::add(&mut document, most);
    one_object_each(&mut document);
    bytes_are_binary(&mut document);
    document
}

/// Generators know no `allOf` in one of several shapes: what is in it becomes one object, and where
/// a part of it has several shapes itself, one for each.
fn one_object_each(document: &mut Value) {
    let schemas = document["components"]["schemas"].clone();
    let Some(all) = document["components"]["schemas"].as_object_mut() else {
        return;
    };
    for shapes in all
        .values_mut()
        .filter_map(|schema| schema.get_mut("oneOf")?.as_array_mut())
    {
        *shapes = shapes
            .iter()
            .flat_map(|shape| match shape["allOf"].as_array() {
                None => vec![shape.clone()],
                Some(parts) => joined(shape, parts, &schemas),
            })
            .collect();
    }
}

fn joined(shape: &Value, parts: &[Value], schemas: &Value) -> Vec<Value> {
    let mut made = vec![(Map::new(), Vec::new())];
    for part in parts {
        let name = part["$ref"]
            .as_str()
            .and_then(|path| path.rsplit('/').next());
        let part = name.map_or(part, |name| &schemas[name]);
        let choices = part["oneOf"].as_array();
        let choices = choices.map_or(std::slice::from_ref(part), Vec::as_slice);
        made = made
            .iter()
            .flat_map(
                |(properties, required): &(Map<String, Value>, Vec<Value>)| {
                    choices.iter().map(|choice| {
                        let (mut properties, mut required) = (properties.clone(), required.clone());
                        properties.extend(
                            choice["properties"]
                                .as_object()
                                .cloned()
                                .unwrap_or_default(),
                        );
                        required.extend(choice["required"].as_array().cloned().unwrap_or_default());
                        (properties, required)
                    })
                },
            )
            .collect();
    }
    made.into_iter()
        .map(|(properties, required)| {
            let mut one = json!({"type": "object", "properties": properties, "required": required});
            if let Some(words) = shape["description"].as_str() {
                one["description"] = words.into();
            }
            one
        })
        .collect()
}

/// Bytes in an answer, whatever type of Rust stands for them.
fn bytes_are_binary(document: &mut Value) {
    let answers = document["paths"]
        .as_object_mut()
        .into_iter()
        .flat_map(|paths| paths.values_mut())
        .filter_map(Value::as_object_mut)
        .flat_map(|item| item.values_mut())
        .filter_map(|operation| operation.get_mut("responses")?.as_object_mut())
        .flat_map(|answers| answers.values_mut());
    for answer in answers {
        if let Some(content) = answer.pointer_mut("/content/application~1octet-stream") {
            content["schema"] = json!({"type": "string", "format": "binary"});
        }
    }
}

/// Generated clients name their functions after this: `files_list`, `sandboxes_list`.
fn name_it(operation: &mut Operation) {
    let tag = operation.tags.iter().flatten().next();
    if let (Some(tag), Some(id)) = (tag, &operation.operation_id)
        && tag != id
    {
        operation.operation_id = Some(format!("{tag}_{id}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_is_there_with_its_refusal() {
        let document = serde_json::to_value(document()).unwrap();
        assert!(document["openapi"].as_str().unwrap().starts_with("3.1"));
        let paths = document["paths"].as_object().unwrap();
        let mut found: Vec<String> = Vec::new();
        let mut names = std::collections::HashSet::new();
        for (path, item) in paths {
            for (method, operation) in item.as_object().unwrap() {
                found.push(format!("{} {path}", method.to_uppercase()));
                let id = format!("{method} {path}");
                assert!(operation["tags"][0].is_string(), "{id}");
                assert!(operation["summary"].is_string(), "{id}");
                assert!(
                    names.insert(operation["operationId"].as_str().unwrap()),
                    "{id}"
                );
                let answers = operation["responses"].as_object().unwrap();
                assert!(answers.contains_key("default"), "{id}");
                for answer in answers.values() {
                    assert!(answer["description"].is_string(), "{id}");
                }
                let locked = operation["security"].is_array();
                assert_eq!(locked, path != "/v1/health", "{id}");
            }
        }
        found.sort();
        let mut wanted = [
            "DELETE /v1/sandboxes/{id}",
            "DELETE /v1/sandboxes/{id}/files",
            "DELETE /v1/secrets/{name}",
            "DELETE /v1/templates/{name}",
            "POST /v1/templates/{name}",
            "DELETE /v1/templates/{name}/builds/{build}",
            "GET /v1/templates/{name}/builds",
            "GET /v1/templates/{name}/builds/{build}",
            "GET /v1/templates/{name}/builds/{build}/log",
            "GET /v1/templates/{name}/log",
            "POST /v1/templates/{name}/builds",
            "PUT /v1/templates/{name}/files/{sha256}",
            "GET /v1/points/{id}/export",
            "POST /v1/points/import",
            "PATCH /v1/points/{id}",
            "GET /v1/sandboxes/{id}/auto-points",
            "PUT /v1/sandboxes/{id}/auto-points",
            "GET /v1/audit",
            "GET /v1/audit/verify",
            "POST /v1/identity/rotate",
            "POST /v1/identity/verify",
            "GET /v1/events",
            "GET /v1/health",
            "GET /v1/host",
            "GET /v1/host/key",
            "GET /v1/profiles",
            "GET /v1/profiles/{name}",
            "PUT /v1/profiles/{name}",
            "DELETE /v1/profiles/{name}",
            "GET /v1/sandboxes",
            "GET /v1/sandboxes/{id}",
            "GET /v1/sandboxes/{id}/exec",
            "GET /v1/sandboxes/{id}/files",
            "GET /v1/sandboxes/{id}/files/list",
            "GET /v1/sandboxes/{id}/files/stat",
            "GET /v1/sandboxes/{id}/logs",
            "GET /v1/sandboxes/{id}/metrics",
            "GET /v1/sandboxes/{id}/network",
            "GET /v1/sandboxes/{id}/network/dead-rules",
            "GET /v1/sandboxes/{id}/network/denials",
            "GET /v1/sandboxes/{id}/network/traffic",
            "GET /v1/sandboxes/{id}/processes",
            "GET /v1/secrets",
            "GET /v1/templates",
            "GET /v1/templates/{name}",
            "GET /v1/version",
            "POST /v1/policy/test",
            "POST /v1/sandboxes",
            "POST /v1/sandboxes/{id}/exec",
            "POST /v1/sandboxes/{id}/files/mkdir",
            "POST /v1/sandboxes/{id}/files/move",
            "POST /v1/sandboxes/{id}/timeout",
            "POST /v1/secrets",
            "PUT /v1/sandboxes/{id}/files",
            "PUT /v1/sandboxes/{id}/network",
            "DELETE /v1/points/{id}",
            "GET /v1/points",
            "GET /v1/points/{id}",
            "GET /v1/points/{id}/diff/{other}",
            "GET /v1/sandboxes/{id}/points",
            "POST /v1/sandboxes/{id}/fork",
            "POST /v1/sandboxes/{id}/pause",
            "POST /v1/sandboxes/{id}/points",
            "POST /v1/sandboxes/{id}/resume",
            "POST /v1/sandboxes/{id}/rollback",
        ];
        wanted.sort_unstable();
        assert_eq!(found, wanted);
    }

    #[test]
    fn every_reference_leads_somewhere() {
        fn references(value: &Value, into: &mut Vec<String>) {
            match value {
                Value::Object(map) => {
                    for (key, value) in map {
                        match value.as_str() {
                            Some(target) if key == "$ref" => into.push(target.to_owned()),
                            _ => references(value, into),
                        }
                    }
                }
                Value::Array(list) => {
                    list.iter().for_each(|value| references(value, into));
                }
                _ => {}
            }
        }
        let document = serde_json::to_value(document()).unwrap();
        let mut found = Vec::new();
        references(&document, &mut found);
        assert!(found.len() > 20);
        for target in found {
            let pointer = target.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{target}");
        }
    }
}
