//! Bodies and path parts, with every refusal typed and naming what is wrong.

use std::{fmt, marker::PhantomData, ops::Deref, time::Duration};

use axum::{
    body::Body,
    extract::{FromRequest, FromRequestParts, MatchedPath, RawPathParams, Request},
};
use bytes::Bytes;
use http::{HeaderMap, Method, header::CONTENT_TYPE, request::Parts};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use sandkeep_model::{Code, Error, GoneReason, Result, SandboxId, human_bytes};
use serde::{
    Deserializer,
    de::{DeserializeOwned, MapAccess, Visitor, value::MapAccessDeserializer},
};

use crate::{
    error::{CONTENT_TYPE_FIELD, E2bError, NativeError},
    query::shown,
    state::Shared,
};

/// How long a client may take to send a small body.
const BODY_DEADLINE: Duration = Duration::from_secs(30);

/// A JSON body of the native API.
#[derive(Debug)]
pub(crate) struct NativeJson<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Shared> for NativeJson<T> {
    type Rejection = NativeError;
    async fn from_request(request: Request, state: &Shared) -> Result<Self, NativeError> {
        Ok(Self(json(request, state.max_body_bytes).await?))
    }
}

/// A JSON body of the native API that may be missing altogether.
#[derive(Debug)]
pub(crate) struct NativeJsonOrNothing<T>(pub T);

impl<T: DeserializeOwned + Default> FromRequest<Shared> for NativeJsonOrNothing<T> {
    type Rejection = NativeError;
    async fn from_request(request: Request, state: &Shared) -> Result<Self, NativeError> {
        Ok(Self(json_or_nothing(request, state.max_body_bytes).await?))
    }
}

/// A JSON body of the E2B API; what the SDKs leave empty is the default.
#[derive(Debug)]
pub(crate) struct E2bJson<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Shared> for E2bJson<T> {
    type Rejection = E2bError;
    async fn from_request(request: Request, state: &Shared) -> Result<Self, E2bError> {
        Ok(Self(json(request, state.max_body_bytes).await?))
    }
}

/// A JSON body that may be missing altogether.
#[derive(Debug)]
pub(crate) struct E2bJsonOrNothing<T>(pub T);

impl<T: DeserializeOwned + Default> FromRequest<Shared> for E2bJsonOrNothing<T> {
    type Rejection = E2bError;
    async fn from_request(request: Request, state: &Shared) -> Result<Self, E2bError> {
        Ok(Self(json_or_nothing(request, state.max_body_bytes).await?))
    }
}

async fn json_or_nothing<T: DeserializeOwned + Default>(
    request: Request,
    limit: usize,
) -> Result<T> {
    let (parts, body) = request.into_parts();
    let bytes = read_body(body, limit).await?;
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(T::default());
    }
    check_content_type(&parts.headers)?;
    parse_json(&bytes)
}

async fn json<T: DeserializeOwned>(request: Request, limit: usize) -> Result<T> {
    check_content_type(request.headers())?;
    let bytes = read_body(request.into_body(), limit).await?;
    parse_json(&bytes)
}

/// Some clients name no type at all; those who name one must name JSON.
fn check_content_type(headers: &HeaderMap) -> Result<()> {
    let Some(value) = headers.get(CONTENT_TYPE) else {
        return Ok(());
    };
    let text = value.to_str().unwrap_or_default();
    let essence = text.split(';').next().unwrap_or_default().trim();
    let lower = essence.to_ascii_lowercase();
    if lower == "application/json"
        || (lower.starts_with("application/") && lower.ends_with("+json"))
    {
        return Ok(());
    }
    Err(Error::invalid(
        CONTENT_TYPE_FIELD,
        format!(
            "a body of type {} is not taken here",
            shown(if essence.is_empty() { "?" } else { essence })
        ),
    )
    .hint("send JSON with the header `Content-Type: application/json`"))
}

pub(crate) async fn read_body(body: Body, limit: usize) -> Result<Bytes> {
    let whole = tokio::time::timeout(BODY_DEADLINE, Limited::new(body, limit).collect())
        .await
        .map_err(|_| Error::new(Code::DeadlineExceeded, "the body did not arrive in time"))?;
    match whole {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Error::new(
            Code::TooLarge,
            format!(
                "the body is larger than {limit} bytes ({})",
                human_bytes(limit as u64)
            ),
        )
        .hint("send less; large data goes through the files of a sandbox")),
        Err(_) => Err(Error::invalid("body", "the body broke off")),
    }
}

/// Parses JSON; the error names the field by its path.
pub(crate) fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    let error = match parse_exact(bytes) {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    // For JSON Schema and for many clients 14.0 is an integer, for serde it is not.
    if !error.message.contains("floating point") {
        return Err(error);
    }
    let mut value: serde_json::Value = parse_exact_value(bytes)?;
    if !whole_numbers(&mut value) {
        return Err(error);
    }
    parse_exact(value.to_string().as_bytes())
}

fn parse_exact_value(bytes: &[u8]) -> Result<serde_json::Value> {
    serde_json::from_slice(bytes).map_err(|error| unfit(".", &error))
}

/// Turns numbers like 14.0 into integers; `false` when there are none.
fn whole_numbers(value: &mut serde_json::Value) -> bool {
    use serde_json::Value;
    match value {
        Value::Number(number) => {
            // Beyond it a float does not tell one integer from the next.
            const EXACT: f64 = 9_007_199_254_740_992.0;
            let whole = number
                .as_f64()
                .filter(|f| number.is_f64() && f.fract() == 0.0 && f.abs() <= EXACT);
            let Some(whole) = whole else { return false };
            #[expect(clippy::cast_possible_truncation, reason = "whole and within 2^53")]
            let whole = whole as i64;
            *value = whole.into();
            true
        }
        // No short cut: every number counts.
        Value::Array(list) => list.iter_mut().fold(false, |any, v| whole_numbers(v) | any),
        Value::Object(map) => map
            .values_mut()
            .fold(false, |any, v| whole_numbers(v) | any),
        _ => false,
    }
}

fn parse_exact<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(Error::invalid("body", "the body is empty").hint("send a JSON object"));
    }
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let mut track = serde_path_to_error::Track::new();
    let tracked = serde_path_to_error::Deserializer::new(&mut reader, &mut track);
    let value = object(tracked).map_err(|error| unfit(&track.path().to_string(), &error))?;
    reader.end().map_err(|error| unfit(".", &error))?;
    Ok(value)
}

/// Reads a struct from an object only; derived code would take a list by position as well.
pub(crate) fn object<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: DeserializeOwned,
{
    struct Object<T>(PhantomData<T>);
    impl<'de, T: DeserializeOwned> Visitor<'de> for Object<T> {
        type Value = T;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
            T::deserialize(MapAccessDeserializer::new(map))
        }
    }
    deserializer.deserialize_map(Object(PhantomData))
}

fn unfit(path: &str, error: &serde_json::Error) -> Error {
    let said = error.to_string();
    // The position helps only those whose text is no JSON at all.
    let reason = match said.rfind(" at line ") {
        Some(at) if error.is_data() => &said[..at],
        _ => said.as_str(),
    };
    let outer = if path == "." { "" } else { path };
    // serde names a missing field only in its words.
    let missing = reason
        .strip_prefix("missing field `")
        .and_then(|rest| rest.strip_suffix('`'));
    let field = match (outer, missing) {
        ("", None) => "body".to_owned(),
        ("", Some(name)) => name.to_owned(),
        (outer, None) => outer.to_owned(),
        (outer, Some(name)) => format!("{outer}.{name}"),
    };
    let field: String = field
        .chars()
        .filter(|c| !c.is_control())
        .take(128)
        .collect();
    let reason: String = reason
        .chars()
        .filter(|c| !c.is_control())
        .take(500)
        .collect();
    if error.is_data() {
        Error::invalid(&field, format!("{field}: {reason}"))
            .hint("the fields of every request are described at /v1/openapi.json")
    } else {
        Error::invalid(field, format!("the body is no proper JSON: {reason}"))
    }
}

/// The `{id}` of a path.
#[derive(Debug, Clone)]
pub(crate) struct NativeId(pub SandboxId);

impl Deref for NativeId {
    type Target = SandboxId;
    fn deref(&self) -> &SandboxId {
        &self.0
    }
}

impl FromRequestParts<Shared> for NativeId {
    type Rejection = NativeError;
    async fn from_request_parts(parts: &mut Parts, state: &Shared) -> Result<Self, NativeError> {
        let id = path_part(parts, state, "id").await?.parse()?;
        if !LOOKS_BACK.iter().any(|route| is_at(parts, route)) {
            refuse_the_gone(state, &id).await?;
        }
        Ok(Self(id))
    }
}

/// What can be asked of a sandbox that is gone.
const LOOKS_BACK: &[&str] = &["/v1/sandboxes/{id}", "/v1/sandboxes/{id}/points"];

fn is_at(parts: &Parts, route: &str) -> bool {
    let at = parts.extensions.get::<MatchedPath>();
    parts.method == Method::GET && at.is_some_and(|at| at.as_str() == route)
}

/// Whoever asks for a sandbox that ended hears that it did, and why: not that it was never there.
async fn refuse_the_gone(state: &Shared, id: &SandboxId) -> Result<()> {
    if state.keeper.get(id).await.is_ok() {
        return Ok(());
    }
    let Ok(sandbox) = state.keeper.get_any(id).await else {
        return Ok(());
    };
    let Some(why) = &sandbox.gone else {
        return Ok(());
    };
    let at = sandbox.gone_at.map(|at| format!(" at {at}"));
    let why = match why {
        GoneReason::Expired => "reached its timeout".to_owned(),
        why => why.to_string(),
    };
    Err(Error::not_found(format!(
        "sandbox \"{id}\" is gone: {why}{}",
        at.unwrap_or_default()
    ))
    .hint("make a new one, with more time if it needs it: sandkeep create --timeout 8h"))
}

/// The `{id}` of a path of the E2B API.
#[derive(Debug, Clone)]
pub(crate) struct E2bId(pub SandboxId);

impl Deref for E2bId {
    type Target = SandboxId;
    fn deref(&self) -> &SandboxId {
        &self.0
    }
}

impl FromRequestParts<Shared> for E2bId {
    type Rejection = E2bError;
    async fn from_request_parts(parts: &mut Parts, state: &Shared) -> Result<Self, E2bError> {
        Ok(Self(path_part(parts, state, "id").await?.parse()?))
    }
}

/// One named, decoded part of the path.
pub(crate) async fn path_part(parts: &mut Parts, state: &Shared, name: &str) -> Result<String> {
    let params = RawPathParams::from_request_parts(parts, state)
        .await
        .map_err(|_| Error::not_found("the path is not UTF-8"))?;
    params
        .iter()
        .find(|(key, _)| *key == name)
        .map(|(_, value)| value.to_owned())
        .ok_or_else(|| Error::internal(format!("the route has no {{{name}}}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Outer {
        #[allow(dead_code)]
        inner: Inner,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        #[allow(dead_code)]
        count: u32,
    }

    fn field_of(json: &str) -> String {
        let error = parse_json::<Outer>(json.as_bytes()).unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
        error.field.unwrap()
    }

    #[test]
    fn the_field_is_named_by_its_path() {
        assert_eq!(field_of(r#"{"inner":{"count":"x"}}"#), "inner.count");
        assert_eq!(field_of(r#"{"inner":{"count":-1}}"#), "inner.count");
        assert_eq!(field_of(r#"{"inner":{}}"#), "inner.count");
        assert_eq!(field_of("{}"), "inner");
        assert_eq!(
            field_of(r#"{"inner":{"count":1,"cuont":2}}"#),
            "inner.cuont"
        );
        assert_eq!(field_of(r#"{"inner":{"count":1},"more":2}"#), "more");
        assert_eq!(field_of("[]"), "body");
        assert_eq!(field_of("[{\"count\":1}]"), "body");
        assert_eq!(field_of("null"), "body");
        assert_eq!(field_of(""), "body");
        assert_eq!(field_of(r#"{"inner":{"count":1}} trailing"#), "body");
    }

    #[test]
    fn a_whole_number_may_have_a_fraction_of_zero() {
        assert!(parse_json::<Outer>(br#"{"inner":{"count":14.0}}"#).is_ok());
        assert!(parse_json::<Outer>(br#"{"inner":{"count":1.4e1}}"#).is_ok());
        for bad in ["14.5", "-1.0", "1e300", "4294967296.0"] {
            assert_eq!(
                field_of(&format!(r#"{{"inner":{{"count":{bad}}}}}"#)),
                "inner.count",
                "{bad}"
            );
        }
    }

    #[test]
    fn broken_json_says_where() {
        let error = parse_json::<Outer>(b"{\"inner\": nope").unwrap_err();
        assert!(error.message.contains("no proper JSON"), "{error}");
        assert!(error.message.contains("line 1"), "{error}");
    }

    #[test]
    fn only_json_is_taken_for_json() {
        let with = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_TYPE, value.parse().unwrap());
            check_content_type(&headers)
        };
        assert!(check_content_type(&HeaderMap::new()).is_ok());
        assert!(with("application/json").is_ok());
        assert!(with("Application/JSON; charset=utf-8").is_ok());
        assert!(with("application/merge-patch+json").is_ok());
        for bad in [
            "text/plain",
            "a+json",
            "+json",
            "multipart/form-data; boundary=x",
        ] {
            let error = with(bad).unwrap_err();
            assert_eq!(error.field.as_deref(), Some(CONTENT_TYPE_FIELD), "{bad}");
        }
    }

    #[tokio::test]
    async fn the_limit_of_a_body_is_named() {
        let error = read_body(Body::from(vec![0; 100]), 64).await.unwrap_err();
        assert_eq!(error.code, Code::TooLarge);
        assert!(error.message.contains("64 bytes"), "{error}");
        assert_eq!(read_body(Body::from("ok"), 64).await.unwrap(), "ok");
    }
}
