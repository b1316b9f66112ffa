//! A connection that switched protocols: bytes both ways, with an eye on what comes back.

use std::future::poll_fn;

use bytes::BytesMut;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy};

use super::gate::{Gate, Search, Stop};

const PIECE: usize = 16 * 1024;

/// Ends with the first side that does, or with what must not go on.
pub async fn relay(
    from_box: OnUpgrade,
    from_server: OnUpgrade,
    search: Option<Search>,
) -> Result<(), Stop> {
    let Ok((inner, outer)) = tokio::try_join!(from_box, from_server) else {
        return Ok(());
    };
    let (mut box_read, mut box_write) = tokio::io::split(TokioIo::new(inner));
    let (mut server_read, mut server_write) = tokio::io::split(TokioIo::new(outer));
    let out = async {
        // Either side may end its half as it likes.
        drop(copy(&mut box_read, &mut server_write).await);
        drop(server_write.shutdown().await);
        std::future::pending::<()>().await;
    };
    let back = async {
        match search.map(Gate::for_frames) {
            Some(gate) => searched(&mut server_read, &mut box_write, gate).await,
            None => {
                drop(copy(&mut server_read, &mut box_write).await);
                drop(box_write.shutdown().await);
                Ok(())
            }
        }
    };
    tokio::select! {
        () = out => Ok(()),
        ended = back => ended,
    }
}

/// Ends when the server does: nothing is answered after that.
async fn searched(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    mut gate: Gate,
) -> Result<(), Stop> {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(PIECE);
        let clean = tokio::select! {
            biased;
            read = from.read_buf(&mut buffer) => match read {
                Ok(1..) => gate.push(&buffer.split())?,
                Ok(0) | Err(_) => break,
            },
            clean = poll_fn(|context| gate.poll_pause(context)) => clean?,
        };
        if to.write_all(&clean).await.is_err() || to.flush().await.is_err() {
            return Ok(());
        }
    }
    // If the box is gone, so is the need for the rest.
    drop(to.write_all(&gate.finish()).await);
    drop(to.shutdown().await);
    Ok(())
}
