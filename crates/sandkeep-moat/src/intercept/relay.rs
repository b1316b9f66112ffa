//! A connection that switched protocols: bytes both ways, with an eye on what comes back.

use bytes::{Bytes, BytesMut};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy};

use super::scan::{Needles, Scanner};

const PIECE: usize = 16 * 1024;

/// Whether a secret came back, which ended it.
pub async fn relay(from_box: OnUpgrade, from_server: OnUpgrade, needles: Needles) -> bool {
    let Ok((inner, outer)) = tokio::try_join!(from_box, from_server) else {
        return false;
    };
    let (mut box_read, mut box_write) = tokio::io::split(TokioIo::new(inner));
    let (mut server_read, mut server_write) = tokio::io::split(TokioIo::new(outer));
    let out = async {
        // Either side may end its half as it likes.
        drop(copy(&mut box_read, &mut server_write).await);
        drop(server_write.shutdown().await);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = out => false,
        found = back(&mut server_read, &mut box_write, needles.scanner()) => found,
    }
}

/// Ends when the server does: nobody waits for answers after that.
async fn back(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    mut scanner: Scanner,
) -> bool {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(PIECE);
        match from.read_buf(&mut buffer).await {
            Ok(1..) => {}
            Ok(0) | Err(_) => break,
        }
        let Ok(clean) = scanner.push(Bytes::from(buffer.split())) else {
            return true;
        };
        if to.write_all(&clean).await.is_err() || to.flush().await.is_err() {
            return false;
        }
    }
    // If the box is gone, so is the need for the rest.
    drop(to.write_all(&scanner.finish()).await);
    drop(to.shutdown().await);
    false
}
