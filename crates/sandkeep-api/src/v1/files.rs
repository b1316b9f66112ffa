//! Files of a box.

use std::time::Duration;

use axum::{
    Json,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use sandkeep_agent_api::{
    filesystem::{
        EntryInfo, EntryResponse, FileType, ListDirRequest, ListDirResponse, MoveRequest,
        PathRequest,
    },
    process::Empty,
};
use sandkeep_agent_client::FileRange;
use sandkeep_model::{Error, Latched, Result};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    agent,
    error::NativeError,
    extract::{NativeId, NativeJson},
    query::{NativeQuery, Query},
    state::Shared,
};

/// The kernel's own limit.
pub(crate) const MAX_PATH_BYTES: usize = 4096;
pub(crate) const MAX_DEPTH: u32 = 64;
/// How long an upload may stand still.
const UPLOAD_SILENCE: Duration = Duration::from_secs(60);

/// A file, a directory or something else.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EntryView {
    name: String,
    /// Absolute.
    path: String,
    /// `file`, `directory`, `symlink` or `other`; of a link, what it leads to.
    #[serde(rename = "type")]
    #[schema(example = "file")]
    kind: &'static str,
    size: i64,
    /// Permission bits.
    mode: u32,
    #[schema(example = "-rw-r--r--")]
    permissions: String,
    owner: String,
    group: String,
    #[schema(value_type = Option<String>, format = DateTime, required)]
    modified_at: Option<sandkeep_agent_api::Timestamp>,
    /// Where a symbolic link leads.
    #[schema(required)]
    symlink_target: Option<String>,
}

impl From<EntryInfo> for EntryView {
    fn from(entry: EntryInfo) -> Self {
        Self {
            name: entry.name,
            path: entry.path,
            kind: match entry.file_type {
                FileType::File => "file",
                FileType::Directory => "directory",
                FileType::Symlink => "symlink",
                FileType::Unspecified => "other",
            },
            size: entry.size,
            mode: entry.mode,
            permissions: entry.permissions,
            owner: entry.owner,
            group: entry.group,
            modified_at: entry.modified_time,
            symlink_target: entry.symlink_target,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OneEntry {
    entry: EntryView,
}

impl From<EntryResponse> for OneEntry {
    fn from(response: EntryResponse) -> Self {
        Self {
            entry: response.entry.into(),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EntryList {
    entries: Vec<EntryView>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Written {
    /// Absolute.
    path: String,
}

/// The path and the user of a request, checked.
struct Target {
    path: String,
    user: Option<String>,
}

impl Target {
    fn take(query: &mut Query) -> Result<Self> {
        let path = query
            .take("path")?
            .ok_or_else(|| Error::invalid("path", "path is missing").hint("add ?path=/…"))?;
        let user = query.take("user")?.filter(|user| !user.is_empty());
        check_path("path", &path)?;
        Ok(Self { path, user })
    }

    fn only(mut query: Query) -> Result<Self> {
        let target = Self::take(&mut query)?;
        query.finish("path and user")?;
        Ok(target)
    }
}

fn check_path(field: &str, path: &str) -> Result<()> {
    let wrong = if path.is_empty() {
        format!("{field} is empty")
    } else if path.len() > MAX_PATH_BYTES {
        format!(
            "{field} is {} bytes, the limit is {MAX_PATH_BYTES}",
            path.len()
        )
    } else if path.contains('\0') {
        format!("{field} holds a NUL byte")
    } else {
        return Ok(());
    };
    Err(Error::invalid(field, wrong))
}

/// Reads a file as it is. Takes one `Range`.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files", tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox"),
        ("path" = String, Query, description = "Absolute, or relative to the user's home"),
        ("user" = Option<String>, Query, description = "Whose home; the default user when left out"),
        ("Range" = Option<String>, Header, description = "`bytes=FIRST-LAST` or `bytes=FIRST-`"),
    ),
    responses(
        (status = 200, description = "The bytes", body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 206, description = "The range of bytes", body = Vec<u8>, content_type = "application/octet-stream"),
    ))]
pub(crate) async fn read(
    State(state): State<Shared>,
    id: NativeId,
    NativeQuery(query): NativeQuery,
    headers: HeaderMap,
) -> Result<Response, NativeError> {
    let target = Target::only(query)?;
    let agent = agent::open(&state, &id).await?;
    let file = agent
        .read_file(&target.path, target.user.as_deref(), range(&headers))
        .await?;
    let mut answer = HeaderMap::new();
    const KEPT: [HeaderName; 5] = [
        header::CONTENT_LENGTH,
        header::CONTENT_RANGE,
        header::ACCEPT_RANGES,
        header::LAST_MODIFIED,
        header::ETAG,
    ];
    for name in KEPT {
        if let Some(value) = file.headers.get(&name) {
            answer.insert(name, value.clone());
        }
    }
    // What a box wrote must never act as a page of this server.
    for (name, value) in [
        (header::CONTENT_TYPE, "application/octet-stream"),
        (header::CONTENT_DISPOSITION, "attachment"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ] {
        answer.insert(name, HeaderValue::from_static(value));
    }
    let status = file.status;
    let closed = state.keeper.closed(&id);
    let bytes = until(Box::pin(file.into_stream()), closed);
    Ok((status, answer, Body::from_stream(bytes)).into_response())
}

/// The bytes of a file. When the box goes the stream breaks: a clean end would make a part
/// look like the whole.
fn until(
    bytes: impl Stream<Item = Result<Bytes>> + Unpin + Send,
    closed: Latched<()>,
) -> impl Stream<Item = Result<Bytes>> + Send {
    stream::try_unfold((bytes, closed), |(mut bytes, mut closed)| async move {
        tokio::select! {
            biased;
            next = bytes.next() => Ok(next.transpose()?.map(|chunk| (chunk, (bytes, closed)))),
            () = &mut closed => Err(Error::not_found("the sandbox ended while the file was read")),
        }
    })
}

/// One plain range; any other kind is answered with the whole file, as HTTP allows.
fn range(headers: &HeaderMap) -> Option<FileRange> {
    let text = headers.get(header::RANGE)?.to_str().ok()?;
    let (start, end) = text.trim().strip_prefix("bytes=")?.split_once('-')?;
    let start = start.trim().parse().ok()?;
    let end = match end.trim() {
        "" => None,
        end => Some(end.parse().ok()?),
    };
    (end.is_none_or(|end| end >= start)).then_some(FileRange { start, end })
}

/// Writes a file, replacing what was there. The body is its content, as large as the
/// sandbox's disk allows.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/files", tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox"),
        ("path" = String, Query, description = "Absolute, or relative to the user's home; parents are made"),
        ("user" = Option<String>, Query, description = "Who will own it; the default user when left out"),
    ),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, body = Written)))]
pub(crate) async fn write(
    State(state): State<Shared>,
    id: NativeId,
    NativeQuery(query): NativeQuery,
    body: Body,
) -> Result<Json<Written>, NativeError> {
    let target = Target::only(query)?;
    let mut agent = agent::open(&state, &id).await?;
    let bytes = sandkeep_agent_client::stream(steady(body));
    let written = agent
        .write_file(&target.path, target.user.as_deref(), bytes)
        .await?;
    let path = written
        .into_iter()
        .next()
        .map_or(target.path, |file| file.path);
    Ok(Json(Written { path }))
}

/// The bytes of an upload; one that stands still too long is broken off.
pub(super) fn steady(body: Body) -> impl Stream<Item = std::io::Result<Bytes>> + Send + 'static {
    stream::try_unfold(body.into_data_stream(), |mut body| async move {
        match tokio::time::timeout(UPLOAD_SILENCE, body.next()).await {
            Ok(None) => Ok(None),
            Ok(Some(Ok(bytes))) => Ok(Some((bytes, body))),
            Ok(Some(Err(error))) => Err(std::io::Error::other(error)),
            Err(_) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut)),
        }
    })
}

/// Removes a file, or a directory with all in it.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/files", tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox"),
        ("path" = String, Query, description = "Absolute, or relative to the user's home"),
        ("user" = Option<String>, Query, description = "Whose home; the default user when left out"),
    ),
    responses((status = 204, description = "It is gone")))]
pub(crate) async fn remove(
    State(state): State<Shared>,
    id: NativeId,
    NativeQuery(query): NativeQuery,
) -> Result<StatusCode, NativeError> {
    let Target { path, user } = Target::only(query)?;
    let mut agent = agent::open(&state, &id).await?;
    let request = PathRequest { path };
    // envd calls removing nothing a success; here a wrong path is told.
    let _: EntryResponse = agent
        .unary("filesystem.Filesystem/Stat", user.as_deref(), &request)
        .await?;
    let Empty {} = agent
        .unary("filesystem.Filesystem/Remove", user.as_deref(), &request)
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lists a directory.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/list", tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox"),
        ("path" = String, Query, description = "Absolute, or relative to the user's home"),
        ("user" = Option<String>, Query, description = "Whose home; the default user when left out"),
        ("depth" = Option<u32>, Query, description = "1 (only the directory itself) to 64; 1 when left out"),
    ),
    responses((status = 200, body = EntryList)))]
pub(crate) async fn list(
    State(state): State<Shared>,
    id: NativeId,
    NativeQuery(mut query): NativeQuery,
) -> Result<Json<EntryList>, NativeError> {
    let Target { path, user } = Target::take(&mut query)?;
    let depth = query.parsed::<u32>("depth")?.unwrap_or(1);
    query.finish("path, user and depth")?;
    if !(1..=MAX_DEPTH).contains(&depth) {
        return Err(Error::invalid(
            "depth",
            format!("depth is {depth}, it must be from 1 to {MAX_DEPTH}"),
        )
        .into());
    }
    let request = ListDirRequest { path, depth };
    let listed: ListDirResponse = agent::open(&state, &id)
        .await?
        .unary("filesystem.Filesystem/ListDir", user.as_deref(), &request)
        .await?;
    Ok(Json(EntryList {
        entries: listed.entries.into_iter().map(EntryView::from).collect(),
    }))
}

/// What there is to know about a file.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/stat", tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox"),
        ("path" = String, Query, description = "Absolute, or relative to the user's home"),
        ("user" = Option<String>, Query, description = "Whose home; the default user when left out"),
    ),
    responses((status = 200, body = OneEntry)))]
pub(crate) async fn stat(
    State(state): State<Shared>,
    id: NativeId,
    NativeQuery(query): NativeQuery,
) -> Result<Json<OneEntry>, NativeError> {
    let Target { path, user } = Target::only(query)?;
    let found: EntryResponse = agent::open(&state, &id)
        .await?
        .unary(
            "filesystem.Filesystem/Stat",
            user.as_deref(),
            &PathRequest { path },
        )
        .await?;
    Ok(Json(found.into()))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MkdirRequest {
    /// Absolute, or relative to the user's home; parents are made.
    path: String,
    /// Who will own it; the default user when left out.
    #[serde(default)]
    user: Option<String>,
}

/// Makes a directory; one that exists is a conflict.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/files/mkdir", tag = "files",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = MkdirRequest,
    responses((status = 201, body = OneEntry)))]
pub(crate) async fn mkdir(
    State(state): State<Shared>,
    id: NativeId,
    NativeJson(request): NativeJson<MkdirRequest>,
) -> Result<(StatusCode, Json<OneEntry>), NativeError> {
    check_path("path", &request.path)?;
    let path = PathRequest { path: request.path };
    let made: EntryResponse = agent::open(&state, &id)
        .await?
        .unary(
            "filesystem.Filesystem/MakeDir",
            request.user.as_deref(),
            &path,
        )
        .await?;
    Ok((StatusCode::CREATED, Json(made.into())))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RenameRequest {
    source: String,
    /// Parents are made.
    destination: String,
    #[serde(default)]
    user: Option<String>,
}

/// Moves or renames a file or a directory.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/files/move", tag = "files",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = RenameRequest,
    responses((status = 200, body = OneEntry)))]
pub(crate) async fn rename(
    State(state): State<Shared>,
    id: NativeId,
    NativeJson(request): NativeJson<RenameRequest>,
) -> Result<Json<OneEntry>, NativeError> {
    check_path("source", &request.source)?;
    check_path("destination", &request.destination)?;
    let paths = MoveRequest {
        source: request.source,
        destination: request.destination,
    };
    let moved: EntryResponse = agent::open(&state, &id)
        .await?
        .unary(
            "filesystem.Filesystem/Move",
            request.user.as_deref(),
            &paths,
        )
        .await?;
    Ok(Json(moved.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_checked() {
        let take = |query: &str| Target::only(Query::parse(query)?);
        let target = take("path=%2Fa%20b&user=root").unwrap();
        assert_eq!(target.path, "/a b");
        assert_eq!(target.user.as_deref(), Some("root"));
        for (query, field) in [
            ("user=root", "path"),
            ("path=", "path"),
            ("path=a%00b", "path"),
            ("path=a&pat=b", "pat"),
        ] {
            let error = take(query).err().unwrap();
            assert_eq!(error.field.as_deref(), Some(field), "{query}");
        }
        let long = format!("path=/{}", "x".repeat(MAX_PATH_BYTES));
        assert!(take(&long).err().unwrap().message.contains("4096"));
    }

    #[test]
    fn only_plain_ranges_are_passed_on() {
        let read = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::RANGE, value.parse().unwrap());
            range(&headers).map(|range| (range.start, range.end))
        };
        assert_eq!(read("bytes=0-9"), Some((0, Some(9))));
        assert_eq!(read("bytes=5-"), Some((5, None)));
        for other in ["bytes=-5", "bytes=9-0", "bytes=0-1,3-4", "lines=1-2", "x"] {
            assert_eq!(read(other), None, "{other}");
        }
    }
}
