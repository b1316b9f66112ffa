//! The two documents with which anybody checks tokens of boxes. They are public: verifiers
//! elsewhere have no key of this server.

use axum::{Json, Router, extract::State, routing::get};
use http::{HeaderName, header::CACHE_CONTROL};
use sandkeep_identity::{Issuer, JWKS_PATH, OPENID_CONFIGURATION_PATH};
use sandkeep_model::{Code, Error, Result};
use serde_json::Value;

use crate::{
    error::E2bError,
    state::{ApiState, Shared},
};

/// A new key signs at once, so verifiers must not keep the old set for long.
const FRESH: &str = "public, max-age=60";

pub(crate) const OPEN: [&str; 2] = [OPENID_CONFIGURATION_PATH, JWKS_PATH];

pub(crate) fn routes() -> Router<Shared> {
    Router::new()
        .route(OPENID_CONFIGURATION_PATH, get(configuration))
        .route(JWKS_PATH, get(keys))
}

/// The issuer of this server; `NotImplemented` where there is none.
pub(crate) fn issuer(state: &ApiState) -> Result<&Issuer> {
    state
        .issuer
        .as_deref()
        .ok_or_else(|| Error::new(Code::NotImplemented, "this server issues no identities"))
}

type Document = ([(HeaderName, &'static str); 1], Json<Value>);

async fn configuration(State(state): State<Shared>) -> Result<Document, E2bError> {
    let document = issuer(&state)?.openid_configuration();
    Ok(([(CACHE_CONTROL, FRESH)], Json(document)))
}

async fn keys(State(state): State<Shared>) -> Result<Document, E2bError> {
    let document = issuer(&state)?.jwks();
    Ok(([(CACHE_CONTROL, FRESH)], Json(document)))
}
