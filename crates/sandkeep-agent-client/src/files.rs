//! Files in and out.

use bytes::Bytes;
use http::{
    HeaderValue, Method, Request, StatusCode,
    header::{CONTENT_LENGTH, CONTENT_TYPE, RANGE},
};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use sandkeep_agent_api::filesystem::WriteInfo;
use sandkeep_model::{Error, Result};

use crate::{
    Agent, Body, empty, error,
    unary::{as_user, build, collect, parse, refusal},
};

/// Bytes `start..=end` of a file; without `end`, to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileRange {
    pub start: u64,
    pub end: Option<u64>,
}

/// A file being read. Dropping it closes the connection.
#[derive(Debug)]
pub struct FileStream {
    /// 200, or 206 for a range.
    pub status: StatusCode,
    pub headers: http::HeaderMap,
    body: Incoming,
    connection: Agent,
}

impl FileStream {
    /// What the agent says the size of the answer is.
    pub fn length(&self) -> Option<u64> {
        self.headers
            .get(CONTENT_LENGTH)?
            .to_str()
            .ok()?
            .parse()
            .ok()
    }

    /// The next piece; `None` at the end. Cancel safe.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>> {
        let silence = self.connection.limits().silence;
        loop {
            let frame = tokio::time::timeout(silence, self.body.frame())
                .await
                .map_err(|_| error::unreachable("the agent of the box fell silent"))?;
            match frame {
                None => return Ok(None),
                Some(Err(e)) => return Err(error::from_hyper(&e)),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// The pieces as a stream.
    pub fn into_stream(self) -> impl futures_util::Stream<Item = Result<Bytes>> + Send {
        futures_util::stream::try_unfold(self, |mut file| async move {
            Ok(file.chunk().await?.map(|chunk| (chunk, file)))
        })
    }
}

impl Agent {
    /// Opens a file for reading. Directories and missing files are errors.
    pub async fn read_file(
        mut self,
        path: &str,
        user: Option<&str>,
        range: Option<FileRange>,
    ) -> Result<FileStream> {
        let until = self.until();
        let mut request = files(Method::GET, path, user, empty())?;
        if let Some(FileRange { start, end }) = range {
            let end = end.map(|end| end.to_string()).unwrap_or_default();
            if let Ok(value) = HeaderValue::try_from(format!("bytes={start}-{end}")) {
                request.headers_mut().insert(RANGE, value);
            }
        }
        let (parts, body) = self.head(request, until).await?.into_parts();
        // Other successes have no body, whatever length they announce.
        if matches!(parts.status, StatusCode::OK | StatusCode::PARTIAL_CONTENT) {
            return Ok(FileStream {
                status: parts.status,
                headers: parts.headers,
                body,
                connection: self,
            });
        }
        let limit = self.limits().unary_bytes;
        let bytes = tokio::time::timeout_at(until, collect(body, limit))
            .await
            .map_err(|_| error::late())??;
        Err(refusal(parts.status, &bytes))
    }

    /// Writes a file, replacing what was there. The deadline starts when the body has been
    /// sent, so it may come slowly.
    pub async fn write_file(
        &mut self,
        path: &str,
        user: Option<&str>,
        body: Body,
    ) -> Result<Vec<WriteInfo>> {
        let (body, sent) = crate::body::with_end(body);
        let mut request = files(Method::POST, path, user, body)?;
        request.headers_mut().insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/octet-stream"),
        );
        let limits = self.limits();
        let answer = async {
            let response = self.request(request).await.map_err(|e| e.error)?;
            let (parts, body) = response.into_parts();
            Ok::<_, Error>((parts.status, collect(body, limits.unary_bytes).await?))
        };
        let late = async {
            sent.await.ok();
            tokio::time::sleep(limits.deadline).await;
        };
        let (status, bytes) = tokio::select! {
            answer = answer => answer?,
            () = late => return Err(error::late()),
        };
        if status.is_success() {
            return parse(&bytes);
        }
        Err(refusal(status, &bytes))
    }
}

fn files(method: Method, path: &str, user: Option<&str>, body: Body) -> Result<Request<Body>> {
    let path = utf8_percent_encode(path, NON_ALPHANUMERIC);
    let mut uri = format!("/files?path={path}");
    if let Some(user) = user {
        uri.push_str("&username=");
        uri.extend(utf8_percent_encode(user, NON_ALPHANUMERIC));
    }
    let mut request = build(method, &uri, body)?;
    as_user(&mut request, user)?;
    Ok(request)
}
