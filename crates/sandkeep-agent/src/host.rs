//! Calls for the host alone.

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use sandkeep_agent_api::ConnectError;
use sandkeep_agent_api::host::{LogsResponse, PortsResponse};

use crate::connect::{error_response, json_response};
use crate::{Body, State, ports};

pub(crate) fn envs(state: &State) -> Response<Body> {
    json_response(StatusCode::OK, &state.settings().envs)
}

pub(crate) async fn init(_state: State, _request: Request<Incoming>) -> Response<Body> {
    error_response(&ConnectError::unimplemented("init"))
}

pub(crate) async fn warm(_state: State) -> Response<Body> {
    error_response(&ConnectError::unimplemented("warm"))
}

pub(crate) fn ports() -> Response<Body> {
    json_response(
        StatusCode::OK,
        &PortsResponse {
            ports: ports::listening(),
        },
    )
}

pub(crate) fn logs(state: &State, query: Option<&str>) -> Response<Body> {
    let after = query
        .unwrap_or_default()
        .split('&')
        .find_map(|pair| pair.strip_prefix("after="))
        .and_then(|number| number.parse().ok())
        .unwrap_or(0);
    json_response(
        StatusCode::OK,
        &LogsResponse {
            entries: state.log().after(after),
        },
    )
}
