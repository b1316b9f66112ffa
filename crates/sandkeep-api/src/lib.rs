//! The front desk: who are you, and is what you ask well-formed?
//!
//! Three faces on one router: the native API under `/v1` with its OpenAPI document, the
//! control plane the E2B SDKs speak, and Prometheus metrics. Everything is parsed and
//! bounded here, then handed to the keeper.

mod access_log;
mod agent;
mod auth;
mod bounds;
mod caller;
mod create;
mod e2b;
mod error;
mod extract;
mod network;
mod oidc;
mod openapi;
mod query;
mod router;
mod secrets;
mod state;
mod v1;

pub use auth::has_key;
pub use openapi::document as openapi_document;
pub use router::router;
pub use state::{ApiState, MetricsText};
