//! Points as files.

use std::{
    io::{self, Write},
    time::Duration,
};

use axum::{
    Json,
    body::Body,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt as _, stream};
use http::{HeaderName, StatusCode, header, request::Parts};
use sandkeep_audit::Action;
use sandkeep_keeper::{Imported, PointUse};
use sandkeep_model::{Code, Error};
use tokio::{
    runtime::Handle,
    sync::{Semaphore, mpsc},
};

use super::{
    exec_ws::stopping,
    files::steady,
    time::{PointView, meant},
    upload::upload,
};
use crate::{
    caller::Caller, error::NativeError, extract::path_part, query::NativeQuery, state::Shared,
};

/// At once: each keeps a thread waiting for its client.
static TRANSFERS: Semaphore = Semaphore::const_new(2);
/// Pieces that wait for the client, and how large they are.
const WAITING: usize = 8;
const PIECE: usize = 128 * 1024;
/// How long a client may take nothing.
const SILENCE: Duration = Duration::from_secs(60);
/// Tells a client how much it will be when unpacked, for its progress.
const UNPACKED: HeaderName = HeaderName::from_static("sandkeep-unpacked-bytes");

fn slot() -> Result<tokio::sync::SemaphorePermit<'static>, Error> {
    TRANSFERS.try_acquire().map_err(|_| {
        Error::new(
            Code::ResourceExhausted,
            "other points are being exported or imported already",
        )
        .hint("try again when they are done")
    })
}

/// A point as one file (a tar packed with zstd), to be imported elsewhere.
///
/// It is signed with the key of this server, and packed while it is sent. A transfer that breaks off leaves a file that is refused.
#[utoipa::path(get, path = "/v1/points/{id}/export", tag = "time", operation_id = "export_point",
    params(("id" = String, Path, description = "The snapshot: its id, SANDBOX:NAME, or a name that only one sandbox has")),
    responses((status = 200, description = "The file", body = Vec<u8>, content_type = "application/octet-stream")))]
pub(crate) async fn export(
    State(state): State<Shared>,
    mut parts: Parts,
) -> Result<Response, NativeError> {
    let text = path_part(&mut parts, &state, "id").await?;
    let id = meant(&state, "id", &text, None, PointUse::Read).await?;
    let slot = slot()?;
    let export = state.keeper.export_point(&id).await?;
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (
            header::CONTENT_DISPOSITION,
            format!("attachment; filename=\"{id}.point.tar.zst\""),
        ),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (UNPACKED, export.unpacked_bytes().to_string()),
    ];
    let (give, take) = mpsc::channel(WAITING);
    let out = Pieces {
        give: give.clone(),
        piece: BytesMut::with_capacity(PIECE),
        runtime: Handle::current(),
    };
    let shutdown = state.shutdown.clone();
    tokio::spawn(async move {
        let _slot = slot;
        let written = tokio::select! {
            written = export.write(out) => written,
            () = shutdown.cancelled() => Err(stopping()),
        };
        if let Err(error) = written {
            tracing::warn!(point = %id, %error, "an export was broken off");
            // The client must not take a part for the whole.
            let _ = give.send(Err(io::Error::other(error.message))).await;
        }
    });
    let body = stream::unfold(take, |mut take| async move {
        take.recv().await.map(|piece| (piece, take))
    });
    Ok((StatusCode::OK, headers, Body::from_stream(body.boxed())).into_response())
}

/// Where a thread that may block writes what a client reads.
struct Pieces {
    give: mpsc::Sender<io::Result<Bytes>>,
    piece: BytesMut,
    runtime: Handle,
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.piece.extend_from_slice(bytes);
        if self.piece.len() >= PIECE {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let send = self
            .give
            .send_timeout(Ok(self.piece.split().freeze()), SILENCE);
        self.runtime.block_on(send).map_err(|error| match error {
            mpsc::error::SendTimeoutError::Timeout(_) => io::ErrorKind::TimedOut.into(),
            mpsc::error::SendTimeoutError::Closed(_) => io::ErrorKind::BrokenPipe.into(),
        })
    }
}

/// Makes a point from an exported file.
///
/// Everything in it is compared before the point has a name; an upload that breaks off leaves
/// nothing. Memory is only taken by the engine build that wrote it, and at isolation level
/// `container` only from servers that the operator trusts (setting `trusted_servers`).
#[utoipa::path(post, path = "/v1/points/import", tag = "time", operation_id = "import_point",
    params(("files_only" = Option<bool>, Query, description = "Leave out its memory")),
    request_body(content = String, content_type = "application/octet-stream"),
    responses((status = 201, body = PointView)))]
pub(crate) async fn import(
    State(state): State<Shared>,
    caller: Caller,
    NativeQuery(mut query): NativeQuery,
    request: Request,
) -> Result<(StatusCode, Json<PointView>), NativeError> {
    let files_only = query.parsed::<bool>("files_only")?.unwrap_or(false);
    query.finish("files_only")?;
    let _slot = slot()?;
    let (feed, reader) = upload();
    let feeding = async {
        tokio::select! {
            () = feed.pump(steady(request.into_body())) => Ok(()),
            // The reader finds its upload broken off.
            () = state.shutdown.cancelled() => Err(stopping()),
        }
    };
    let (fed, made) = tokio::join!(feeding, state.keeper.import_point(reader, files_only));
    fed?;
    let Imported { point, signer } = made?;
    let action = Action::PointImported {
        point: point.id.as_str().into(),
        signer: signer.map(|key| key.to_string().as_str().into()),
        memory: point.has_memory(),
    };
    caller.did(&state, action).await;
    Ok((StatusCode::CREATED, Json(point.into())))
}
