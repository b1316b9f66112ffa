//! Who may ask: whoever holds the key.

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::Response,
};
use http::{HeaderMap, header::AUTHORIZATION};
use sandkeep_model::{Code, Error, Result, Secret};

use crate::{caller::Caller, error::Dialect, oidc, state::Shared};

/// Answers without a key: they tell nothing but that the server is there.
const OPEN: [&str; 2] = ["/v1/health", "/health"];
/// Below it a word in the address stands for the key: whoever was given one may send files.
const UPLOADS: &str = "/build-files/";

pub(crate) async fn require_key(
    State(state): State<Shared>,
    mut request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path();
    let open = OPEN.contains(&path)
        || oidc::OPEN.contains(&path)
        || path.starts_with(UPLOADS)
        || (state.metrics_open && path == "/metrics");
    if !open && let Err(error) = check(request.headers(), &state.api_key) {
        return Dialect::of(path).answer(error);
    }
    if !open {
        request
            .extensions_mut()
            .insert(Caller::of_key(&state.api_key));
    }
    next.run(request).await
}

/// Whether whoever sent these has the key.
pub fn has_key(headers: &HeaderMap, key: &Secret) -> bool {
    given(headers).is_some_and(|given| key.matches(given))
}

fn check(headers: &HeaderMap, key: &Secret) -> Result<()> {
    let Some(given) = given(headers) else {
        return Err(
            Error::new(Code::Unauthenticated, "no API key was given").hint(
                "send it as header X-API-Key or Authorization: Bearer; the server keeps it in \
             SANDKEEP_API_KEY or in its state directory",
            ),
        );
    };
    if key.matches(given) {
        return Ok(());
    }
    Err(Error::new(
        Code::Unauthenticated,
        "the API key is not valid for this server",
    )
    .hint("check SANDKEEP_API_KEY or E2B_API_KEY of the client"))
}

fn given(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(value) = headers.get("x-api-key").filter(|value| !value.is_empty()) {
        return Some(value.as_bytes());
    }
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, rest) = value.split_at_checked(7)?;
    scheme
        .eq_ignore_ascii_case(b"bearer ")
        .then(|| rest.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &'static str, value: &'static str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        headers
    }

    #[test]
    fn the_key_is_taken_from_either_header() {
        let key = Secret::new("e2b_0123");
        assert!(check(&with("x-api-key", "e2b_0123"), &key).is_ok());
        assert!(check(&with("authorization", "Bearer e2b_0123"), &key).is_ok());
        assert!(check(&with("authorization", "bearer e2b_0123"), &key).is_ok());
        for wrong in [
            HeaderMap::new(),
            with("x-api-key", ""),
            with("x-api-key", "e2b_01234"),
            with("authorization", "Basic e2b_0123"),
            with("authorization", "e2b_0123"),
        ] {
            let error = check(&wrong, &key).unwrap_err();
            assert_eq!(error.code, Code::Unauthenticated);
            assert!(error.hint.is_some());
            assert!(!error.message.contains("0123"));
        }
    }
}
