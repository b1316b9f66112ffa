//! The bounds the server enforces, as the OpenAPI document states them.
//!
//! Generated clients and fuzzers read them there, so a request that fits the document is refused
//! only for what a schema cannot say (a name that does not exist, a pattern that cannot be
//! compiled). `tests/server/test_openapi.py` drives the server by the document and looks for
//! requests on which the two do not agree.

use sandkeep_audit::Action;
use sandkeep_moat::policy::Profile;
use sandkeep_model::{
    Audience, FILES_KEY_PATTERN, Isolation, LONGEST_PATTERN, Label, Limits, ListFilter,
    MAX_METADATA_BYTES, MODE_PATTERN, MOST_PATTERNS, MOST_STEPS, MOST_TAGS, NamedTokens,
    PLAIN_PATTERN, POINT_NAME_PATTERN, POINT_PATTERN, PageToken, PointId, SandboxId, Scopes,
    SecretName, State, TemplateName, TokenName,
};
use serde_json::{Map, Value, json};

use crate::{
    create::{IDEMPOTENCY_PATTERN, MAX_TIMEOUT_SECONDS},
    v1::bounds as own,
};

const PROFILE: &str = "^[a-z0-9][a-z0-9-]{0,63}$";
const PROFILE_VERSION: &str = "^[a-z0-9][a-z0-9-]{0,63}(@[0-9]{1,9})?$";
const USER: &str = "^[A-Za-z_][A-Za-z0-9_.-]{0,31}$";
/// No NUL byte.
const TEXT: &str = "^[^\\x00]*$";
/// Something to see in it, and no NUL byte.
const FILLED: &str = "^[^\\x00]*[^\\s\\x00][^\\x00]*$";
const ENV_NAME: &str = "^[^=\\x00]+$";
const DAY: u64 = 24 * 3600;
/// A host name: labels, the last of which is no number.
const NAME: &str = "([A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,20}){0,2}\\.){0,4}[A-Za-z][A-Za-z0-9]{0,20}";
const LABELS: &str = "([A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,20}){0,2}\\.){1,4}";
const LAST: &str = "[A-Za-z][A-Za-z0-9]{0,20}";
const V4: &str = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])(\\.(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])){3}";

/// Adds them to the document; `most` is what a sandbox may ask for on this server.
pub(crate) fn add(document: &mut Value, most: &Limits) {
    components(document);
    for (operation, name, bounds) in parameters() {
        narrow_parameter(document, operation, name, &bounds);
    }
    for (place, bounds) in properties(most) {
        let pointer = format!("/components/schemas/{}", place.replace('.', "/properties/"));
        merge(document.pointer_mut(&pointer), &bounds);
    }
    bodies(document);
}

fn merge(into: Option<&mut Value>, bounds: &Value) {
    let (Some(Value::Object(into)), Value::Object(bounds)) = (into, bounds) else {
        return;
    };
    if bounds.contains_key("oneOf") || bounds.contains_key("$ref") || bounds.contains_key("anyOf") {
        into.remove("type");
        into.remove("format");
        into.remove("minimum");
    }
    for (name, bound) in bounds {
        into.insert(name.clone(), bound.clone());
    }
}

fn text(pattern: &str, longest: usize) -> Value {
    json!({"pattern": pattern, "minLength": 1, "maxLength": longest})
}

fn pattern(pattern: &str) -> Value {
    json!({ "pattern": pattern })
}

/// A name is not an id.
fn point_name() -> Value {
    json!({"pattern": POINT_NAME_PATTERN, "not": {"pattern": PointId::PATTERN}})
}

fn from_to(least: u64, most: u64) -> Value {
    json!({"minimum": least, "maximum": most})
}

fn map_of(name: &str, value: &str) -> Value {
    json!({
        "propertyNames": {"type": "string", "pattern": name},
        "additionalProperties": {"type": "string", "pattern": value},
        "maxProperties": 1024,
    })
}

/// Seconds, or no end.
fn timeout(least: u64) -> Value {
    json!({"oneOf": [
        {"type": "integer", "minimum": least, "maximum": MAX_TIMEOUT_SECONDS},
        {"type": "null"},
        {"type": "string", "const": "never"},
    ]})
}

fn levels() -> Value {
    let mut words = vec!["auto"];
    words.extend(Isolation::ALL.map(Isolation::name));
    json!(words)
}

/// A level, or none.
fn minimum() -> Value {
    let mut words: Vec<Value> = Isolation::ALL
        .iter()
        .map(|level| level.name().into())
        .collect();
    words.push(Value::Null);
    json!({"type": ["string", "null"], "enum": words})
}

/// Fields of bodies, as `Schema.field`.
fn properties(most: &Limits) -> Vec<(&'static str, Value)> {
    let wish = json!({"oneOf": [refer("NetworkWish"), {"type": "null"}]});
    let limit = |least: u64, most: u64| from_to(least, most);
    let cmd = json!({"oneOf": [
        {"type": "string", "pattern": FILLED, "maxLength": own::MAX_WORD_BYTES - 1},
        // Types made of `prefixItems` have room for the program alone.
        {"type": "array", "minItems": 1, "maxItems": 1024, "items": {"type": "string", "pattern": TEXT},
            "not": {"prefixItems": [{"const": ""}], "minItems": 1}},
    ]});
    vec![
        ("CreateRequest.template", pattern(TemplateName::PATTERN)),
        ("CreateRequest.isolation", json!({"enum": levels()})),
        ("CreateRequest.timeout_seconds", timeout(1)),
        (
            "CreateRequest.on_timeout",
            json!({"enum": ["kill", "pause"]}),
        ),
        ("CreateRequest.env", map_of(ENV_NAME, TEXT)),
        ("CreateRequest.metadata", map_of(TEXT, TEXT)),
        ("CreateRequest.from_point", pattern(POINT_PATTERN)),
        (
            "CreateRequest.idle_seconds",
            from_to(1, MAX_TIMEOUT_SECONDS),
        ),
        (
            "CreateRequest.paused_limit_seconds",
            from_to(1, MAX_TIMEOUT_SECONDS),
        ),
        ("CreateRequest.network", wish.clone()),
        ("LimitsBody.cpu_millis", limit(10, most.cpu_millis.into())),
        ("LimitsBody.memory_mib", limit(16, most.memory_mib)),
        ("LimitsBody.pids", limit(8, most.pids.into())),
        ("LimitsBody.disk_mib", disk(most.disk_mib)),
        ("LimitsBody.open_files", limit(64, most.open_files.into())),
        ("IdentityBody.org", text(PLAIN_PATTERN, Label::LONGEST)),
        ("IdentityBody.task", text(PLAIN_PATTERN, Label::LONGEST)),
        (
            "IdentityBody.scopes",
            json!({"maxItems": Scopes::MOST, "items": {
            "type": "string", "pattern": PLAIN_PATTERN, "maxLength": Scopes::LONGEST}}),
        ),
        (
            "IdentityBody.tokens",
            json!({"maxProperties": NamedTokens::MOST,
            "propertyNames": {"type": "string", "pattern": TokenName::PATTERN},
            "additionalProperties": {"type": "string", "pattern": PLAIN_PATTERN, "maxLength": Audience::LONGEST}}),
        ),
        ("TimeoutRequest.timeout_seconds", timeout(0)),
        ("ForkRequest.timeout_seconds", timeout(1)),
        ("ForkRequest.at", pattern(POINT_PATTERN)),
        ("ResumeRequest.timeout_seconds", timeout(1)),
        ("RollbackRequest.to", pattern(POINT_PATTERN)),
        ("PointRequest.name", point_name()),
        ("PointRequest.tags", tags()),
        ("LabelRequest.name", point_name()),
        ("LabelRequest.tags", tags()),
        ("AutoPoints.every_seconds", from_to(1, 365 * DAY)),
        ("AutoPoints.min_interval_seconds", from_to(0, DAY)),
        (
            "AutoPoints.before_matching",
            json!({"maxItems": MOST_PATTERNS, "items": {
            "type": "string", "minLength": 1, "maxLength": LONGEST_PATTERN, "format": "regex"}}),
        ),
        ("KeepBody.age_seconds", from_to(1, u64::from(u32::MAX))),
        ("KeepBody.bytes", from_to(0, u64::MAX)),
        ("ExecRequest.cmd", cmd.clone()),
        ("ExecRequest.cwd", text(TEXT, own::MAX_PATH_BYTES)),
        ("ExecRequest.user", pattern(USER)),
        ("ExecRequest.env", map_of(ENV_NAME, TEXT)),
        ("ExecRequest.timeout_ms", from_to(1, own::MAX_TIMEOUT_MS)),
        ("InteractiveRequest.cmd", cmd),
        ("TtySize.cols", from_to(1, own::MAX_TTY_SIZE.into())),
        ("TtySize.rows", from_to(1, own::MAX_TTY_SIZE.into())),
        ("MkdirRequest.path", text(TEXT, own::MAX_PATH_BYTES)),
        ("MkdirRequest.user", pattern(USER)),
        ("RenameRequest.source", text(TEXT, own::MAX_PATH_BYTES)),
        ("RenameRequest.destination", text(TEXT, own::MAX_PATH_BYTES)),
        ("RenameRequest.user", pattern(USER)),
        ("SecretRequest.name", pattern(SecretName::PATTERN)),
        ("SecretRequest.value", text(TEXT, MAX_METADATA_BYTES)),
        ("SecretRequest.metadata", map_of(TEXT, TEXT)),
        (
            "VerifyRequest.audience",
            text(PLAIN_PATTERN, Audience::LONGEST),
        ),
        ("VerifyRequest.sandbox_id", pattern(SandboxId::PATTERN)),
        ("PolicyTest.method", pattern("^[A-Za-z]{1,32}$")),
        ("PolicyTest.url", text("^[!-~]+$", 8192)),
        ("PolicyTest.sandbox_id", pattern(SandboxId::PATTERN)),
        ("PolicyTest.policy", wish.clone()),
        ("BuildRequest.from", pattern(TemplateName::PATTERN)),
        ("BuildRequest.steps", json!({"maxItems": MOST_STEPS})),
        ("BuildRequest.start", text(FILLED, own::MAX_WORD_BYTES - 1)),
        (
            "BuildRequest.isolation",
            json!({"maxItems": 8, "items": {"type": "string", "enum": levels()}}),
        ),
        ("BuildRequest.isolation_minimum", minimum()),
        ("BuildRequest.network", wish),
        ("StepBody.run", text(FILLED, own::MAX_WORD_BYTES - 1)),
        ("StepBody.copy", text(FILLED, own::MAX_PATH_BYTES)),
        ("StepBody.to", text(FILLED, own::MAX_PATH_BYTES)),
        ("StepBody.mode", pattern(MODE_PATTERN)),
        ("StepBody.files", pattern(FILES_KEY_PATTERN)),
        ("StepBody.env", map_of(ENV_NAME, TEXT)),
        ("StepBody.workdir", text(FILLED, own::MAX_PATH_BYTES)),
        ("ReadyBody.command", text(FILLED, own::MAX_WORD_BYTES - 1)),
        ("ReadyBody.port", from_to(1, u16::MAX.into())),
    ]
}

/// 0 is no limit, where the operator allows that.
fn disk(most: u64) -> Value {
    if most == 0 {
        from_to(0, i64::MAX.unsigned_abs())
    } else {
        from_to(1, most)
    }
}

/// Those that are built in cannot be changed.
fn own_profile() -> Value {
    let built_in: Vec<String> = Profile::ALL.iter().map(ToString::to_string).collect();
    json!({"pattern": PROFILE, "not": {"enum": built_in}})
}

fn tags() -> Value {
    json!({"maxItems": MOST_TAGS, "items": {"type": "string", "pattern": POINT_NAME_PATTERN}})
}

/// `METHOD path`, or only the beginning of it for all that are below.
fn parameters() -> Vec<(&'static str, &'static str, Value)> {
    let states: Vec<&str> = State::ALL.iter().map(|state| state.name()).collect();
    let one = states.join("|");
    let limit = from_to(1, ListFilter::MAX_LIMIT.into());
    let number = from_to(0, i64::MAX.unsigned_abs());
    vec![
        (
            "get /v1/audit",
            "limit",
            from_to(1, own::MOST_ENTRIES as u64),
        ),
        ("get /v1/audit", "after", number.clone()),
        ("get /v1/audit", "before", number.clone()),
        ("get /v1/audit", "sandbox_id", pattern(SandboxId::PATTERN)),
        ("get /v1/audit", "kind", json!({"enum": Action::NAMES})),
        ("get /v1/events", "after", number.clone()),
        ("get /v1/events", "Last-Event-ID", number.clone()),
        ("get /v1/events", "sandbox_id", pattern(SandboxId::PATTERN)),
        ("get /v1/events", "format", json!({"enum": ["sse", "json"]})),
        ("get /v1/sandboxes", "limit", limit),
        (
            "get /v1/sandboxes",
            "state",
            pattern(&format!("^({one})(,({one}))*$")),
        ),
        (
            "get /v1/sandboxes",
            "template",
            pattern(TemplateName::PATTERN),
        ),
        (
            "get /v1/sandboxes",
            "order",
            json!({"enum": ["asc", "desc"]}),
        ),
        (
            "get /v1/sandboxes",
            "metadata",
            map_of("^[^\\[\\]\\x00]+$", TEXT),
        ),
        (
            "get /v1/sandboxes",
            "next_token",
            pattern(PageToken::PATTERN),
        ),
        (
            "post /v1/sandboxes",
            "Idempotency-Key",
            pattern(IDEMPOTENCY_PATTERN),
        ),
        (
            "get /v1/sandboxes/{id}/files/list",
            "depth",
            from_to(1, own::MAX_DEPTH.into()),
        ),
        ("get /v1/sandboxes/{id}/logs", "after", number),
        (
            "* /v1/sandboxes/{id}/files",
            "path",
            text(TEXT, own::MAX_PATH_BYTES),
        ),
        ("* /v1/sandboxes/{id}/files", "user", pattern(USER)),
        ("* /v1/sandboxes/{id}", "id", pattern(SandboxId::PATTERN)),
        (
            "* /v1/templates/{name}",
            "name",
            pattern(TemplateName::PATTERN),
        ),
        (
            "* /v1/templates/{name}/files/{sha256}",
            "sha256",
            pattern(FILES_KEY_PATTERN),
        ),
        ("put /v1/profiles/{name}", "name", own_profile()),
        ("delete /v1/profiles/{name}", "name", own_profile()),
        ("get /v1/profiles/{name}", "name", pattern(PROFILE_VERSION)),
        ("* /v1/secrets/{name}", "name", pattern(SecretName::PATTERN)),
        ("* /v1/points/{id}", "id", pattern(POINT_PATTERN)),
        ("* /v1/points/{id}", "other", pattern(POINT_PATTERN)),
    ]
}

fn narrow_parameter(document: &mut Value, operation: &str, name: &str, bounds: &Value) {
    let (method, path) = operation.split_once(' ').unwrap_or_default();
    let Some(paths) = document["paths"].as_object_mut() else {
        return;
    };
    let below = format!("{path}/");
    for (at, item) in paths {
        if at != path && !(method == "*" && at.starts_with(&below)) {
            continue;
        }
        for (by, operation) in item.as_object_mut().into_iter().flatten() {
            if method != "*" && method != by {
                continue;
            }
            let all = operation["parameters"].as_array_mut();
            for parameter in all.into_iter().flatten() {
                if parameter["name"] == name {
                    merge(parameter.get_mut("schema"), bounds);
                }
            }
        }
    }
}

/// Policies are read by the moat, which has no words for OpenAPI.
fn components(document: &mut Value) {
    let network = json!({"anyOf": [
        {"type": "string", "pattern": format!("^{V4}/([12]?[0-9]|3[0-2])$")},
        {"type": "string", "pattern": "^([0-9A-Fa-f]{1,4}:){7}[0-9A-Fa-f]{1,4}/(1[01][0-9]|12[0-8]|[1-9]?[0-9])$"},
        {"type": "string", "pattern": "^([0-9A-Fa-f]{1,4}:){1,6}:/(1[01][0-9]|12[0-8]|[1-9]?[0-9])$"},
    ]});
    let named = format!("({NAME}|\\*\\.{LABELS}{LAST})");
    let host = json!({"anyOf": [
        {"type": "string", "pattern": format!("^{named}$"), "maxLength": 253},
        {"type": "string", "pattern": format!("^{V4}$")},
        {"type": "string", "format": "ipv6"},
        network,
    ]});
    let short = json!({"type": "string", "maxLength": 253,
        "pattern": format!("^{named}(:[1-9][0-9]{{0,3}})?$")});
    let ports = json!({"type": "array", "items": {"oneOf": [
        {"type": "integer", "minimum": 1, "maximum": u16::MAX},
        {"type": "string", "pattern": "^[0-9]{1,5}(-[0-9]{1,5})?$"},
    ]}});
    // Requests are told apart by their host, so rules about them name one.
    let host_rule = json!({
        "type": "object", "required": ["to"], "additionalProperties": false,
        "properties": {"to": host, "ports": ports},
    });
    let request = json!({
        "type": "object", "required": ["path"], "additionalProperties": false,
        "properties": {
            "path": {"type": "string", "pattern": "^/[^\\x00-\\x1f\\x7f]*$", "maxLength": 2048},
            "methods": {"type": "array", "items": {"type": "string", "pattern": "^[A-Za-z]{1,32}$"}},
        },
    });
    let request_rule = json!({
        "type": "object", "required": ["to", "http"], "additionalProperties": false,
        "properties": {
            "to": {"type": "string", "pattern": format!("^{named}$"), "maxLength": 253},
            "ports": ports,
            "http": {"type": "array", "items": refer("RuleRequest")},
        },
    });
    let rule = json!({"anyOf": [short, refer("HostRule"), refer("RequestRule")]});
    let amount = json!({"type": ["integer", "null"], "minimum": 0, "maximum": u64::MAX});
    let count = json!({"type": ["integer", "null"], "minimum": 0, "maximum": u32::MAX});
    let limits = json!({"type": "object", "additionalProperties": false, "properties": {
        "bytes_per_second": amount, "total_bytes": amount,
        "new_connections_per_second": count, "concurrent_connections": count,
    }});
    let policy = json!({
        "default": {"type": "string", "enum": ["deny", "open"]},
        "allow": {"type": "array", "maxItems": 256, "items": rule},
        "deny": {"type": "array", "maxItems": 256, "items": network},
        "limits": refer("NetworkLimits"),
        "isolation_minimum": minimum(),
    });
    let credentials = json!({"type": "array", "items": refer("Credential"),
        "description": "Which secret is added to requests to which host; see docs/credentials.md"});
    let with_credentials = |policy: &Value| {
        let mut all: Map<String, Value> = policy.as_object().cloned().unwrap_or_default();
        all.insert("credentials".to_owned(), credentials.clone());
        Value::Object(all)
    };
    let Some(schemas) = document["components"]["schemas"].as_object_mut() else {
        return;
    };
    let profile = json!({"type": "string", "pattern": PROFILE_VERSION});
    // Each has a name of its own, which generators would otherwise make up, twice the same.
    for (name, schema) in [
        ("HostRule", host_rule),
        ("RuleRequest", request),
        ("RequestRule", request_rule),
        ("NetworkLimits", limits),
        ("Credential", json!({"type": "object"})),
        (
            "PolicyOfRules",
            json!({"type": "object", "additionalProperties": false, "properties": policy}),
        ),
        (
            "PolicyOfProfile",
            json!({"type": "object", "additionalProperties": false, "required": ["profile"],
                "properties": {"profile": profile}}),
        ),
        (
            "WishOfRules",
            json!({"type": "object", "additionalProperties": false,
                "properties": with_credentials(&policy)}),
        ),
        (
            "WishOfProfile",
            json!({"type": "object", "additionalProperties": false, "required": ["profile"],
                "properties": {"profile": profile, "credentials": credentials}}),
        ),
        (
            "NetworkPolicy",
            json!({"anyOf": [refer("PolicyOfRules"), refer("PolicyOfProfile")]}),
        ),
        (
            "NetworkWish",
            json!({"anyOf": [refer("WishOfRules"), refer("WishOfProfile")]}),
        ),
    ] {
        schemas.insert(name.to_owned(), schema);
    }
}

fn refer(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// A step does one thing, and has what belongs to it.
fn steps(schemas: &mut Value) {
    let all = [
        "run", "copy", "to", "mode", "files", "env", "workdir", "user",
    ];
    let one = |needed: &[&str], allowed: &[&str]| {
        let properties: Map<String, Value> = all
            .iter()
            .filter(|name| !allowed.contains(name))
            .map(|name| {
                let must = if needed.contains(name) {
                    json!({"not": {"type": "null"}})
                } else {
                    json!({"type": "null"})
                };
                ((*name).to_owned(), must)
            })
            .collect();
        json!({"required": needed, "properties": properties})
    };
    schemas["StepBody"]["oneOf"] = json!([
        one(&["run"], &["user"]),
        one(&["copy", "to", "files"], &["user", "mode"]),
        one(&["env"], &[]),
        one(&["workdir"], &[]),
        one(&["user"], &[]),
    ]);
    schemas["ReadyBody"]["oneOf"] = json!([
        {"required": ["command"], "properties": {"command": {"not": {"type": "null"}}, "port": {"type": "null"}}},
        {"required": ["port"], "properties": {"port": {"not": {"type": "null"}}, "command": {"type": "null"}}},
    ]);
    // Nothing is waited for where nothing is started.
    schemas["BuildRequest"]["not"] = json!({
        "required": ["ready"],
        "properties": {"ready": {"type": "object"}, "start": {"type": "null"}},
    });
}

/// What a struct of Rust does not say about a body.
fn bodies(document: &mut Value) {
    let bytes = json!({"type": "string", "format": "binary"});
    let wish = refer("NetworkWish");
    let policy = refer("NetworkPolicy");
    for (path, method, kind, schema) in [
        (
            "/v1/sandboxes/{id}/files",
            "put",
            "application/octet-stream",
            &bytes,
        ),
        (
            "/v1/templates/{name}",
            "post",
            "application/octet-stream",
            &bytes,
        ),
        (
            "/v1/templates/{name}/files/{sha256}",
            "put",
            "application/octet-stream",
            &bytes,
        ),
        (
            "/v1/points/import",
            "post",
            "application/octet-stream",
            &bytes,
        ),
        (
            "/v1/sandboxes/{id}/network",
            "put",
            "application/json",
            &wish,
        ),
        ("/v1/profiles/{name}", "put", "application/json", &policy),
    ] {
        let body = &mut document["paths"][path][method]["requestBody"]["content"][kind];
        body["schema"] = schema.clone();
    }
    for what in ["pause", "resume", "fork", "points"] {
        let path = format!("/v1/sandboxes/{{id}}/{what}");
        document["paths"][path]["post"]["requestBody"]["required"] = json!(false);
    }
    let schemas = &mut document["components"]["schemas"];
    steps(schemas);
    // One of the two, as a whole.
    schemas["PolicyTest"]["oneOf"] = json!([
        {"required": ["policy"], "properties": {"policy": {"not": {"type": "null"}}, "sandbox_id": {"type": "null"}}},
        {"required": ["sandbox_id"], "properties": {"sandbox_id": {"type": "string"}, "policy": {"type": "null"}}},
    ]);
    schemas["ExecRequest"]["not"] = json!({"required": ["stdin", "stdin_base64"], "properties": {
        "stdin": {"type": "string"}, "stdin_base64": {"type": "string"}}});
    schemas["ExecRequest"]["properties"]["stdin_base64"]["pattern"] =
        json!("^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bound_has_its_place() {
        let document = crate::openapi::described(&Limits::default());
        for (place, bounds) in properties(&Limits::default()) {
            let pointer = format!("/components/schemas/{}", place.replace('.', "/properties/"));
            let found = document
                .pointer(&pointer)
                .unwrap_or_else(|| panic!("{place}"));
            for (name, bound) in bounds.as_object().unwrap() {
                assert_eq!(&found[name], bound, "{place}.{name}");
            }
        }
        for (operation, name, bounds) in parameters() {
            let (method, path) = operation.split_once(' ').unwrap();
            let item = document["paths"][path].as_object().unwrap();
            let found = item
                .iter()
                .filter(|(by, _)| method == "*" || method == *by)
                .flat_map(|(_, operation)| operation["parameters"].as_array().into_iter().flatten())
                .any(|parameter| parameter["name"] == name);
            let deeper = document["paths"]
                .as_object()
                .unwrap()
                .iter()
                .any(|(at, item)| {
                    at.starts_with(path)
                        && item.as_object().unwrap().values().any(|operation| {
                            let all = operation["parameters"].as_array();
                            all.into_iter().flatten().any(|p| p["name"] == name)
                        })
                });
            assert!(
                found || (method == "*" && deeper),
                "{operation} {name} {bounds}"
            );
        }
    }
}
