//! Files of the box: `filesystem.Filesystem`, `/files`, and watches.
//!
//! Whatever may wait for a disk runs on a blocking thread; the runtime's own
//! thread only moves bytes. Nothing here trusts what it finds in the box:
//! names may be no text, files may be pipes, trees may be bottomless.

mod download;
mod entry;
mod error;
mod file_body;
mod gzip;
mod list;
mod media_type;
mod metadata;
pub mod multipart;
mod names;
pub mod negotiate;
mod open;
mod ops;
mod params;
pub mod query;
pub mod range;
mod remove;
mod upload;
mod watch;
mod writer;

use crate::connect::{error_response, read_json, unary};
use crate::{Body, State, bytes_body};
use error::FileError;
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use ops::Caller;
use query::FilesQuery;
use sandkeep_agent_api::ConnectError;
use sandkeep_agent_api::filesystem::{
    ListDirRequest, MoveRequest, PathRequest, WatchRequest, WatcherRef,
};
use sandkeep_agent_api::process::Empty;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::task::JoinHandle;

/// What the file calls remember between requests.
#[derive(Debug, Default)]
pub struct FsState {
    watchers: watch::Watchers,
}

/// Answers one call of `filesystem.Filesystem`.
pub async fn rpc(state: State, method: &str, request: Request<Incoming>) -> Response<Body> {
    match method {
        "Stat" => call(state, request, ops::stat).await,
        "MakeDir" => call(state, request, ops::make_dir).await,
        "Move" => {
            call(state, request, |caller, message: &MoveRequest| {
                ops::rename(caller, message)
            })
            .await
        }
        "Remove" => {
            let remove = |caller: &Caller, message: &PathRequest| {
                ops::remove(caller, message).map(|()| Empty {})
            };
            call(state, request, remove).await
        }
        "ListDir" => list_dir(state, request).await,
        "WatchDir" => watch::stream(state, request).await,
        "CreateWatcher" => {
            unary(request, async |headers, message: WatchRequest| {
                watch::create(&state, headers, message).await
            })
            .await
        }
        "GetWatcherEvents" => {
            unary(request, async |_, message: WatcherRef| {
                state.fs().watchers.events(&message.watcher_id).await
            })
            .await
        }
        "RemoveWatcher" => {
            unary(request, async |_, message: WatcherRef| {
                state.fs().watchers.remove(&message.watcher_id);
                Ok(Empty {})
            })
            .await
        }
        _ => error_response(&ConnectError::unimplemented(format!(
            "filesystem.Filesystem has no method {method}"
        ))),
    }
}

/// Answers `/files`.
pub async fn files(state: State, request: Request<Incoming>) -> Response<Body> {
    let result = match FilesQuery::parse(request.uri().query()) {
        Err(error) => Err(error),
        Ok(query) => match *request.method() {
            Method::GET | Method::HEAD => {
                let head_only = request.method() == Method::HEAD;
                let headers = request.headers().clone();
                run_blocking(move || download::download(&state, &query, &headers, head_only))
                    .await
                    .and_then(|result| result)
            }
            Method::POST => upload::upload(state, query, request).await,
            _ => return method_not_allowed(),
        },
    };
    result.unwrap_or_else(|error| error.response())
}

fn method_not_allowed() -> Response<Body> {
    let message = "/files takes GET, HEAD and POST";
    let mut response = FileError::new(StatusCode::METHOD_NOT_ALLOWED, message).response();
    let allowed = HeaderValue::from_static("GET, HEAD, POST");
    response.headers_mut().insert(ALLOW, allowed);
    response
}

/// A unary call whose work blocks.
async fn call<T, R>(
    state: State,
    request: Request<Incoming>,
    work: impl FnOnce(&Caller, &T) -> Result<R, ConnectError> + Send + 'static,
) -> Response<Body>
where
    T: DeserializeOwned + Send + 'static,
    R: Serialize + Send + 'static,
{
    unary(request, async |headers: HeaderMap, message: T| {
        run_blocking(move || work(&Caller::of(&state, &headers)?, &message)).await?
    })
    .await
}

async fn list_dir(state: State, request: Request<Incoming>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let message: ListDirRequest = match read_json(body).await {
        Ok(message) => message,
        Err(error) => return error_response(&error),
    };
    let work = move || ops::list_dir(&Caller::of(&state, &parts.headers)?, &message);
    match run_blocking(work).await.map_err(ConnectError::from) {
        Ok(Ok(json)) => {
            let mut response = Response::new(bytes_body(json));
            let json_type = HeaderValue::from_static("application/json");
            response.headers_mut().insert(CONTENT_TYPE, json_type);
            response
        }
        Ok(Err(error)) | Err(error) => error_response(&error),
    }
}

/// Runs what may wait for a disk.
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, FileError> {
    join(tokio::task::spawn_blocking(work)).await
}

async fn join<T>(handle: JoinHandle<T>) -> Result<T, FileError> {
    handle.await.map_err(|error| {
        let message = format!("a file operation broke off: {error}");
        FileError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    })
}
