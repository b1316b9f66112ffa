//! Connections that end by a reset when what they carried was broken off.
//!
//! An answer in chunks, or a WebSocket, that is cut in the middle must not look like one that came
//! to its end. HTTP/2 resets the stream; over HTTP/1 all there is is the connection, and clients
//! tell a connection that was closed from one that was reset.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use rustix::ioctl::{Getter, ioctl};
use sandkeep_gateway::Cut;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    runtime::Handle,
    time::{Instant, sleep},
};

/// A reset throws away what was not delivered yet, so that is waited for, but not for ever.
const DELIVERY: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(5);
/// `TIOCOUTQ`: how many bytes the other side has not confirmed.
const UNCONFIRMED: u32 = 0x5411;

/// A connection, reset at its end if `cut` is marked by then.
pub struct Resettable {
    stream: Option<TcpStream>,
    cut: Cut,
}

impl Resettable {
    pub const fn new(stream: TcpStream, cut: Cut) -> Self {
        Self {
            stream: Some(stream),
            cut,
        }
    }

    fn stream(&mut self) -> io::Result<Pin<&mut TcpStream>> {
        let stream = self.stream.as_mut();
        stream
            .map(Pin::new)
            .ok_or(io::ErrorKind::NotConnected.into())
    }
}

impl Drop for Resettable {
    fn drop(&mut self) {
        let Some(stream) = self.stream.take().filter(|_| self.cut.is_marked()) else {
            return;
        };
        // Without a runtime the whole server ends, and its connections as they are.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(reset(stream));
        }
    }
}

async fn reset(stream: TcpStream) {
    let until = Instant::now() + DELIVERY;
    while unconfirmed(&stream) > 0 && Instant::now() < until {
        sleep(LOOK).await;
    }
    if let Err(error) = stream.set_zero_linger() {
        tracing::debug!(%error, "a connection that was cut is closed, not reset");
    }
}

fn unconfirmed(stream: &TcpStream) -> i32 {
    // SAFETY: the call writes one int, which is what the getter has room for.
    let asked = unsafe { ioctl(stream, Getter::<UNCONFIRMED, i32>::new()) };
    // One that cannot say has nothing to wait for.
    asked.unwrap_or(0)
}

impl AsyncRead for Resettable {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream()?.poll_read(cx, buffer)
    }
}

impl AsyncWrite for Resettable {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The reset follows when it is dropped; an end now would come before it.
        if self.cut.is_marked() {
            return Poll::Ready(Ok(()));
        }
        self.stream()?.poll_shutdown(cx)
    }
}
