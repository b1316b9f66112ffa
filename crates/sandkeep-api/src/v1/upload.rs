//! A request's body, read by a thread that may block.

use std::io::{self, Read};

use bytes::{Buf, Bytes};
use futures_util::{Stream, StreamExt};
use tokio::sync::mpsc;

/// Pieces that wait for the reader.
const WAITING: usize = 16;
/// What is still taken while a client that is sending is told that the reader wants no more:
/// closed before it has read that, the connection takes it along. Nobody is listened to for ever.
const LEFT_OVER: u64 = 16 << 20;

/// The two ends of an upload.
pub(super) fn upload() -> (Feed, Reader) {
    let (give, take) = mpsc::channel(WAITING);
    let reader = Reader {
        take,
        piece: Bytes::new(),
        ended: false,
    };
    (Feed(give), reader)
}

/// What the reader gets; without an `End` the upload was broken off.
enum Piece {
    Bytes(Bytes),
    Broken(io::Error),
    End,
}

pub(super) struct Feed(mpsc::Sender<Piece>);

impl Feed {
    /// Passes on the body to its end, or until the reader wants no more, at the reader's pace.
    pub(super) async fn pump(self, body: impl Stream<Item = io::Result<Bytes>> + Send + 'static) {
        let mut body = body.boxed();
        while let Some(piece) = body.next().await {
            let (piece, broken) = match piece {
                Ok(bytes) => (Piece::Bytes(bytes), false),
                Err(error) => (Piece::Broken(error), true),
            };
            let refused = self.0.send(piece).await.is_err();
            if broken {
                return;
            }
            if refused {
                tokio::spawn(discard(body, LEFT_OVER));
                return;
            }
        }
        // A reader that had enough does not need to know.
        let _ = self.0.send(Piece::End).await;
    }
}

async fn discard(mut body: impl Stream<Item = io::Result<Bytes>> + Unpin, mut most: u64) {
    while let Some(Ok(bytes)) = body.next().await {
        most = most.saturating_sub(bytes.len() as u64);
        if most == 0 {
            return;
        }
    }
}

/// Blocks until there is something to read: not for async threads.
pub(super) struct Reader {
    take: mpsc::Receiver<Piece>,
    piece: Bytes,
    ended: bool,
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.ended {
            match self.take.blocking_recv() {
                Some(Piece::Bytes(bytes)) => self.piece = bytes,
                Some(Piece::End) => self.ended = true,
                Some(Piece::Broken(error)) => return Err(error),
                // Half an archive must never pass for a whole one.
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
        let count = self.piece.len().min(buffer.len());
        buffer[..count].copy_from_slice(&self.piece[..count]);
        self.piece.advance(count);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    fn pieces(texts: &[&'static str]) -> impl Stream<Item = io::Result<Bytes>> + use<> {
        let texts: Vec<_> = texts.iter().map(|text| Ok(Bytes::from(*text))).collect();
        stream::iter(texts)
    }

    async fn read_all(mut reader: Reader) -> io::Result<String> {
        tokio::task::spawn_blocking(move || {
            let mut text = String::new();
            reader.read_to_string(&mut text).map(|_| text)
        })
        .await
        .unwrap()
    }

    #[tokio::test]
    async fn everything_arrives_in_order_with_empty_pieces_between() {
        let (feed, reader) = upload();
        let body = pieces(&["ab", "", "c"]);
        let ((), read) = tokio::join!(feed.pump(body), read_all(reader));
        assert_eq!(read.unwrap(), "abc");
    }

    #[tokio::test]
    async fn an_upload_that_is_broken_off_is_no_end() {
        let (feed, reader) = upload();
        let broken = pieces(&["ab"]).chain(stream::iter([Err(io::ErrorKind::TimedOut.into())]));
        let ((), read) = tokio::join!(feed.pump(broken), read_all(reader));
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut);

        let (feed, reader) = upload();
        drop(feed);
        let error = read_all(reader).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn what_nobody_wants_any_more_is_taken_within_bounds() {
        let endless = stream::repeat_with(|| Ok(Bytes::from_static(&[0; 1 << 16])));
        discard(endless, LEFT_OVER).await;
    }

    #[tokio::test]
    async fn a_refusal_does_not_wait_for_the_rest() {
        let (feed, reader) = upload();
        drop(reader);
        feed.pump(pieces(&["ab"]).chain(stream::pending())).await;
    }
}
