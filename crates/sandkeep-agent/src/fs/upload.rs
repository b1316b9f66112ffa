//! `POST /files`: receives the body and feeds the writer, one batch being
//! written while the next is received.

use super::error::FileError;
use super::metadata;
use super::multipart::Multipart;
use super::params::Params;
use super::query::FilesQuery;
use super::writer::{Destination, Form, Upload};
use super::{join, run_blocking};
use crate::connect::json_response;
use crate::{Body, BodyError, State};
use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::BodyExt;
use sandkeep_agent_api::filesystem::WriteInfo;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// What is received before it is handed to a writing thread.
const BATCH_BYTES: usize = 256 * 1024;
/// A sender that is silent for so long has gone, whatever its socket says.
const SILENCE: Duration = Duration::from_secs(300);
/// After a failure this much of the rest is read and thrown away: most clients
/// look at the answer only when they have sent everything.
const DISCARD_BYTES: usize = 256 << 20;
const DISCARD_TIME: Duration = Duration::from_secs(10);

/// Answers one upload.
pub(crate) async fn upload<B>(
    state: State,
    query: FilesQuery,
    request: Request<B>,
) -> Result<Response<Body>, FileError>
where
    B: http_body::Body<Data = Bytes, Error: Into<BodyError>> + Unpin,
{
    let (parts, mut body) = request.into_parts();
    let written = match receive(state, query, &parts.headers, &mut body).await {
        Ok(written) => written,
        Err(error) => {
            // Whether the rest comes or not, the answer is the same.
            let _ = timeout(DISCARD_TIME, discard(body)).await;
            return Err(error);
        }
    };
    Ok(json_response(StatusCode::OK, &written))
}

async fn receive<B>(
    state: State,
    query: FilesQuery,
    headers: &HeaderMap,
    body: &mut B,
) -> Result<Vec<WriteInfo>, FileError>
where
    B: http_body::Body<Data = Bytes, Error: Into<BodyError>> + Unpin,
{
    let form = form(headers)?;
    let gzip = is_gzip(headers)?;
    let metadata = metadata::from_headers(headers)?;
    let user = state.user(headers, query.username.as_deref())?;
    let upload = Upload::new(
        form,
        gzip,
        Destination {
            state,
            user,
            path: query.path,
            metadata,
        },
    );
    let mut writer = Writer::Idle(Box::new(upload));
    loop {
        let batch = next_batch(body).await?;
        let upload = writer.idle().await?;
        if batch.last {
            return run_blocking(move || finish(upload, &batch)).await?;
        }
        writer = Writer::start(upload, batch);
    }
}

fn finish(mut upload: Box<Upload>, batch: &Batch) -> Result<Vec<WriteInfo>, FileError> {
    upload.push(&batch.pieces)?;
    upload.finish()
}

/// The upload is either here or on a thread that writes.
enum Writer {
    Idle(Box<Upload>),
    Writing(JoinHandle<Result<Box<Upload>, FileError>>),
}

impl Writer {
    fn start(mut upload: Box<Upload>, batch: Batch) -> Self {
        Self::Writing(tokio::task::spawn_blocking(move || {
            upload.push(&batch.pieces)?;
            Ok(upload)
        }))
    }

    async fn idle(self) -> Result<Box<Upload>, FileError> {
        match self {
            Self::Idle(upload) => Ok(upload),
            Self::Writing(handle) => join(handle).await?,
        }
    }
}

#[derive(Default)]
struct Batch {
    pieces: Vec<Bytes>,
    last: bool,
}

/// Receives until a batch is full or the body is over.
async fn next_batch<B>(body: &mut B) -> Result<Batch, FileError>
where
    B: http_body::Body<Data = Bytes, Error: Into<BodyError>> + Unpin,
{
    let mut batch = Batch::default();
    let mut size = 0;
    while size < BATCH_BYTES {
        let frame = timeout(SILENCE, body.frame()).await.map_err(|_| {
            let message = format!("nothing was received for {} seconds", SILENCE.as_secs());
            FileError::new(StatusCode::REQUEST_TIMEOUT, message)
        })?;
        match frame {
            Some(Ok(frame)) => {
                if let Ok(bytes) = frame.into_data() {
                    size += bytes.len();
                    batch.pieces.push(bytes);
                }
            }
            Some(Err(error)) => {
                let message = format!("the upload broke off: {}", error.into());
                return Err(FileError::bad_request(message));
            }
            None => {
                batch.last = true;
                break;
            }
        }
    }
    Ok(batch)
}

async fn discard<B>(mut body: B)
where
    B: http_body::Body<Data = Bytes, Error: Into<BodyError>> + Unpin,
{
    let mut left = DISCARD_BYTES;
    while let Some(Ok(frame)) = body.frame().await {
        let size = frame.data_ref().map_or(0, Bytes::len);
        match left.checked_sub(size) {
            Some(less) => left = less,
            None => break,
        }
    }
}

fn form(headers: &HeaderMap) -> Result<Form, FileError> {
    let value = text(headers, &CONTENT_TYPE)?.unwrap_or_default();
    let essence = Params::parse(value).map(|params| params.main.to_ascii_lowercase());
    match essence.as_deref() {
        Some("application/octet-stream") => Ok(Form::Raw),
        Some("multipart/form-data") => {
            let parser = Multipart::from_content_type(value)?;
            Ok(Form::Multipart(Box::new(parser)))
        }
        _ => Err(FileError::bad_request(format!(
            "content type '{value}' is not supported: \
             send multipart/form-data or application/octet-stream"
        ))),
    }
}

fn is_gzip(headers: &HeaderMap) -> Result<bool, FileError> {
    let value = text(headers, &CONTENT_ENCODING)?.unwrap_or_default().trim();
    if value.is_empty() || value.eq_ignore_ascii_case("identity") {
        return Ok(false);
    }
    if value.eq_ignore_ascii_case("gzip") || value.eq_ignore_ascii_case("x-gzip") {
        return Ok(true);
    }
    Err(FileError::bad_request(format!(
        "content encoding '{value}' is not supported: send gzip or none"
    )))
}

fn text<'a>(headers: &'a HeaderMap, name: &http::HeaderName) -> Result<Option<&'a str>, FileError> {
    let Some(value) = headers.get(name) else {
        return Ok(None);
    };
    match value.to_str() {
        Ok(text) => Ok(Some(text)),
        Err(_) => Err(FileError::bad_request(format!(
            "the {name} header is not text"
        ))),
    }
}
