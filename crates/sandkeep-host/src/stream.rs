//! A connection that ends with its box.
//!
//! When a sandbox dies its network stack dies with it: nobody is left to say so, and whoever
//! reads would wait for ever.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

#[derive(Debug)]
pub struct BoxStream {
    stream: TcpStream,
    over: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl BoxStream {
    /// `over` is cancelled when the box has ended.
    pub fn new(stream: TcpStream, over: CancellationToken) -> Self {
        Self {
            stream,
            over: Box::pin(over.cancelled_owned()),
        }
    }

    fn ended(&mut self, context: &mut Context<'_>) -> bool {
        self.over.as_mut().poll(context).is_ready()
    }
}

fn reset<T>() -> Poll<io::Result<T>> {
    Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
}

impl AsyncRead for BoxStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // What came before the end is still read.
        match Pin::new(&mut self.stream).poll_read(context, buffer) {
            Poll::Pending if self.ended(context) => reset(),
            other => other,
        }
    }
}

impl AsyncWrite for BoxStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.ended(context) {
            return reset();
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    #[tokio::test]
    async fn a_silent_peer_is_left_when_the_box_is_over() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (mut peer, _) = listener.accept().await.unwrap();
        let over = CancellationToken::new();
        let mut stream = BoxStream::new(stream, over.clone());
        peer.write_all(b"last words").await.unwrap();
        let mut heard = [0; 10];
        stream.read_exact(&mut heard).await.unwrap();
        let waiting = tokio::spawn(async move {
            let ended = stream.read(&mut [0; 1]).await;
            (ended, stream.write(b"more").await)
        });
        over.cancel();
        let (read, written) = tokio::time::timeout(Duration::from_secs(30), waiting)
            .await
            .expect("it ends")
            .unwrap();
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }
}
