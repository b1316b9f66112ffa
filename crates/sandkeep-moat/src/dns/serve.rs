//! Queries come in as datagrams and over TCP.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    time::timeout,
};

use super::answer::{MAX_QUERY, answer};
use crate::state::BoxState;

/// A resolver library asks a handful of names over one connection.
const MAX_PER_CONNECTION: usize = 128;
/// Datagrams taken in one go.
const AT_ONCE: usize = 64;
const IDLE: Duration = Duration::from_secs(10);

/// Takes what is there and answers each query in a task of its own. Returns when nothing is left,
/// or when others should have their turn.
pub async fn datagrams(state: &Arc<BoxState>, socket: &Arc<UdpSocket>) -> io::Result<()> {
    socket.readable().await?;
    for taken in 0..AT_ONCE {
        // On the stack and only for a moment: a quiet box holds no buffer.
        let mut buffer = [0_u8; MAX_QUERY + 1];
        match socket.try_recv_from(&mut buffer) {
            // One byte more than the largest query: it was cut off.
            Ok((got, _)) if got > MAX_QUERY => {}
            Ok((got, from)) => take(state, socket, buffer[..got].to_vec(), from),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return rest(state, taken).await;
            }
            // An answer could not be delivered; the next query can be.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(error),
        }
    }
    tokio::task::yield_now().await;
    rest(state, AT_ONCE).await
}

/// A flood is not answered faster than this: what comes meanwhile is dropped by the kernel.
async fn rest(state: &BoxState, taken: usize) -> io::Result<()> {
    match state.limiter.after_datagrams(taken) {
        Duration::ZERO => {}
        pause => tokio::time::sleep(pause).await,
    }
    Ok(())
}

fn take(state: &Arc<BoxState>, socket: &Arc<UdpSocket>, bytes: Vec<u8>, from: SocketAddr) {
    // Beyond the bound queries are dropped, as a busy resolver does; askers ask again.
    let Ok(slot) = Arc::clone(&state.dns_slots).try_acquire_owned() else {
        return;
    };
    let (state, socket) = (Arc::clone(state), Arc::clone(socket));
    let tasks = state.tasks.clone();
    tasks.spawn(async move {
        let _slot = slot;
        let work = async {
            if let Some(reply) = answer(&state, &bytes, false).await {
                // The asker may be gone; it will ask again if it is not.
                drop(socket.send_to(&reply, from).await);
            }
        };
        state.gone.run_until_cancelled(work).await;
    });
}

/// Queries with their length in front, one after the other.
pub async fn stream(state: &Arc<BoxState>, mut stream: TcpStream) -> io::Result<()> {
    for _ in 0..MAX_PER_CONNECTION {
        let length = usize::from(timeout(IDLE, stream.read_u16()).await??);
        if length > MAX_QUERY {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut query = vec![0; length];
        timeout(IDLE, stream.read_exact(&mut query)).await??;
        let Some(reply) = answer(state, &query, true).await else {
            return Ok(());
        };
        let length = u16::try_from(reply.len()).map_err(io::Error::other)?;
        let framed = [&length.to_be_bytes()[..], &reply].concat();
        timeout(IDLE, stream.write_all(&framed)).await??;
    }
    Ok(())
}
