//! Files of the box: `filesystem.Filesystem`, `/files`, and watches.
//!
//! The contract with the rest of the crate:
//! - [`FsState`] is made once with `Default` and reached by `state.fs()`; watchers live there.
//! - `rpc(state, method, request)` answers `POST /filesystem.Filesystem/<method>`.
//! - `files(state, request)` answers `/files`, every method; the router adds CORS headers and
//!   answers OPTIONS by itself.
//! - users: `state.user(headers, username_query)`; paths: `state.resolve(path, &user)`.
//! - RPC helpers: `connect::{unary, server_stream, keepalive_interval, call_timeout}`; bodies:
//!   `channel_body`, `bytes_body`, `empty_body`.

use http::{Request, Response};
use hyper::body::Incoming;
use sandkeep_agent_api::ConnectError;

use crate::connect::error_response;
use crate::{Body, State};

/// What the file calls remember between requests.
#[derive(Debug, Default)]
pub struct FsState {}

/// Answers one call of `filesystem.Filesystem`.
pub async fn rpc(_state: State, method: &str, _request: Request<Incoming>) -> Response<Body> {
    error_response(&ConnectError::unimplemented(format!("no method {method}")))
}

/// Answers `/files`.
pub async fn files(_state: State, _request: Request<Incoming>) -> Response<Body> {
    error_response(&ConnectError::unimplemented("no files yet"))
}
