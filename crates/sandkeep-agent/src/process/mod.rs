//! `process.Process`: starting processes and everything about them.
use http::{Request, Response};
use hyper::body::Incoming;
use sandkeep_agent_api::ConnectError;

use crate::connect::error_response;
use crate::{Body, State};

/// Answers one call of `process.Process`.
pub(crate) async fn rpc(
    _state: State,
    method: &str,
    _request: Request<Incoming>,
) -> Response<Body> {
    error_response(&ConnectError::unimplemented(format!("no method {method}")))
}
