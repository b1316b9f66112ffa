//! The box's side of a connection, for those who read it as a stream: what was peeked comes
//! first, and everything is counted and bounded.

use std::{
    future::Future,
    io,
    net::Shutdown,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes};
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::Sleep,
};

use super::meter::{Meter, Way};
use crate::limits::Charge;

#[derive(Debug)]
pub struct BoxStream {
    socket: Arc<TcpStream>,
    head: Bytes,
    meter: Arc<Meter>,
    wait: Option<Pin<Box<Sleep>>>,
}

impl BoxStream {
    pub(crate) fn new(socket: Arc<TcpStream>, head: Vec<u8>, meter: Arc<Meter>) -> Self {
        Self {
            socket,
            head: head.into(),
            meter,
            wait: None,
        }
    }

    fn poll_wait(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if let Some(wait) = self.wait.as_mut() {
            ready!(wait.as_mut().poll(context));
            self.wait = None;
        }
        Poll::Ready(())
    }

    fn pay(&mut self, way: Way, count: usize) -> io::Result<()> {
        match self.meter.charge(way, count) {
            Charge::Go => {}
            Charge::Wait(wait) => self.wait = Some(Box::pin(tokio::time::sleep(wait))),
            Charge::UsedUp => return Err(io::ErrorKind::QuotaExceeded.into()),
        }
        Ok(())
    }
}

impl AsyncRead for BoxStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_wait(context));
        if self.head.has_remaining() {
            let count = self.head.remaining().min(buffer.remaining());
            buffer.put_slice(&self.head.split_to(count));
            return Poll::Ready(self.pay(Way::Out, count));
        }
        loop {
            ready!(self.socket.poll_read_ready(context))?;
            let most = self.meter.piece(buffer.remaining()).min(buffer.remaining());
            match self.socket.try_read(buffer.initialize_unfilled_to(most)) {
                Ok(count) => {
                    buffer.advance(count);
                    return Poll::Ready(self.pay(Way::Out, count));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for BoxStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_wait(context));
        let most = self.meter.piece(bytes.len()).min(bytes.len());
        loop {
            ready!(self.socket.poll_write_ready(context))?;
            match self.socket.try_write(&bytes[..most]) {
                Ok(count) => {
                    self.pay(Way::In, count)?;
                    return Poll::Ready(Ok(count));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&*self.socket).shutdown(Shutdown::Write))
    }
}
