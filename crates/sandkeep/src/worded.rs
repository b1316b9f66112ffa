//! Words for what hyper refuses by itself.
//!
//! A head that is malformed or too large never becomes a request, and hyper answers it with a
//! status and no body; it offers no way to say more. So the connection looks at what is written
//! before its first request: all of that is hyper's own. (A later head on the same connection
//! that is malformed gets the bare status: there, the bytes could be an answer of a box.)

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use sandkeep_model::{Code, Error};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A connection whose bare refusals are given words until `asked` says that a request came.
pub struct Worded<IO> {
    io: IO,
    asked: Arc<AtomicBool>,
    /// Our answer in place of hyper's, and how much of it is written.
    answer: Vec<u8>,
    written: usize,
}

impl<IO: AsyncWrite + Unpin> Worded<IO> {
    pub fn new(io: IO, asked: Arc<AtomicBool>) -> Self {
        Self {
            io,
            asked,
            answer: Vec::new(),
            written: 0,
        }
    }

    fn write_answer(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some(left @ [_, ..]) = self.answer.get(self.written..) {
            match ready!(Pin::new(&mut self.io).poll_write(cx, left))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => self.written += count,
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Worded<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Worded<IO> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if !self.asked.load(Ordering::Relaxed)
            && self.answer.is_empty()
            && let Some(answer) = in_words(bytes)
        {
            // Taken as a whole; the flush that follows brings it out.
            self.answer = answer;
            return Poll::Ready(Ok(bytes.len()));
        }
        ready!(self.write_answer(cx))?;
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if !self.asked.load(Ordering::Relaxed) {
            let first = slices.iter().find(|slice| !slice.is_empty());
            return self.poll_write(cx, first.map_or(&[], |slice| slice));
        }
        ready!(self.write_answer(cx))?;
        Pin::new(&mut self.io).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.write_answer(cx))?;
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.write_answer(cx))?;
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// The same refusal with a body; `None` for anything else.
fn in_words(bytes: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (status, _) = text.strip_suffix("\r\n\r\n")?.split_once("\r\n")?;
    let code = status.strip_prefix("HTTP/1.1 ")?.split(' ').next()?;
    let error = match code {
        "400" => Error::new(Code::InvalidArgument, "the request is not well-formed HTTP")
            .hint("look at its first line and its headers; this port speaks HTTP without TLS"),
        "414" => Error::new(Code::TooLarge, "the address of the request is too long")
            .field("uri")
            .hint("send what is long in the body"),
        "431" => Error::new(
            Code::TooLarge,
            format!(
                "the headers of the request are more than {} bytes or too many",
                crate::desk::HEAD_LIMIT
            ),
        )
        .field("headers")
        .hint("send fewer or shorter headers"),
        _ => return None,
    };
    Some(whole_answer(status, "", &error))
}

/// A whole answer for a connection that ends with it.
pub fn whole_answer(status: &str, headers: &str, error: &Error) -> Vec<u8> {
    let body = serde_json::json!({ "error": error }).to_string();
    format!(
        "{status}\r\ncontent-type: application/json\r\n{headers}connection: close\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const BARE: &str = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

    async fn sent(asked: bool, pieces: &[&str]) -> String {
        // A pipe smaller than the answer: it goes out in parts.
        let (ours, mut theirs) = tokio::io::duplex(16);
        let writing = async {
            let mut io = Worded::new(ours, Arc::new(AtomicBool::new(asked)));
            for piece in pieces {
                io.write_all(piece.as_bytes()).await.unwrap();
            }
            io.shutdown().await.unwrap();
        };
        let mut text = String::new();
        let (_, read) = tokio::join!(writing, theirs.read_to_string(&mut text));
        read.unwrap();
        text
    }

    #[tokio::test]
    async fn a_bare_refusal_gets_a_body() {
        let text = sent(false, &[BARE]).await;
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 400 Bad Request\r\n"));
        assert!(head.contains(&format!("content-length: {}", body.len())));
        let value: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(value["error"]["code"], "invalid_argument");
    }

    #[tokio::test]
    async fn what_is_not_hypers_own_stays_as_it_is() {
        assert_eq!(sent(true, &[BARE]).await, BARE);
        let preface = "\0\0\x12\x04\0\0\0\0\0";
        assert_eq!(sent(false, &[preface, "x"]).await, format!("{preface}x"));
        let other = "HTTP/1.1 500 Oh\r\n\r\n";
        assert_eq!(sent(false, &[other]).await, other);
    }
}
