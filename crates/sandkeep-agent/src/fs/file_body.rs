//! A response body that reads a file piece by piece, one piece ahead of the
//! reader and never more.

use crate::BodyError;
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use rustix::io::Errno;
use std::fs::File;
use std::io::Write;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::task::JoinHandle;

/// What is read at once.
pub(crate) const CHUNK_BYTES: usize = 256 * 1024;

/// Why the rest of a file cannot be sent. The connection breaks off then, so
/// that the reader sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadError {
    Os(Errno),
    /// The file became shorter than announced.
    Shrunk,
}

impl std::fmt::Display for ReadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Os(errno) => write!(f, "cannot read the file: {errno}"),
            Self::Shrunk => f.write_str("the file became shorter while it was read"),
        }
    }
}

impl std::error::Error for ReadError {}

/// Reads a file from its current position.
pub(crate) struct Reader {
    file: File,
    /// How much is still to come; `None` is until the end, wherever that is.
    left: Option<u64>,
}

impl Reader {
    pub(crate) fn new(file: File, left: Option<u64>) -> Self {
        Self { file, left }
    }

    /// The next bytes: as many as fit, fewer only at the end of the file.
    pub(crate) fn read_full(&mut self) -> Result<Vec<u8>, Errno> {
        let mut buffer = vec![0; self.limit()];
        let mut filled = 0;
        while filled < buffer.len() {
            match rustix::io::read(&self.file, &mut buffer[filled..]) {
                Ok(0) => break,
                Ok(got) => filled += got,
                Err(Errno::INTR) => {}
                // What was read before the error still counts; the error
                // comes again with the next read.
                Err(_) if filled > 0 => break,
                Err(error) => return Err(error),
            }
        }
        buffer.truncate(filled);
        if let Some(left) = &mut self.left {
            *left -= buffer.len() as u64;
        }
        Ok(buffer)
    }

    /// The next bytes, or `None` when everything was read.
    fn next(&mut self) -> Result<Option<Vec<u8>>, ReadError> {
        if self.left == Some(0) {
            return Ok(None);
        }
        let bytes = self.read_full().map_err(ReadError::Os)?;
        match (bytes.is_empty(), self.left) {
            (false, _) => Ok(Some(bytes)),
            (true, None) => Ok(None),
            (true, Some(_)) => Err(ReadError::Shrunk),
        }
    }

    fn limit(&self) -> usize {
        let left = self.left.unwrap_or(u64::MAX);
        usize::try_from(left).map_or(CHUNK_BYTES, |left| left.min(CHUNK_BYTES))
    }
}

/// Packs what it is given; small and fast rather than tight.
pub(crate) struct Packer(Option<GzEncoder<Vec<u8>>>);

impl Packer {
    pub(crate) fn new() -> Self {
        Self(Some(GzEncoder::new(Vec::new(), Compression::fast())))
    }

    /// Packs more; gives what is ready, which may be nothing yet.
    pub(crate) fn push(&mut self, plain: &[u8]) -> Vec<u8> {
        let Some(encoder) = &mut self.0 else {
            return Vec::new();
        };
        // Writing into memory does not fail.
        let _ = encoder.write_all(plain);
        std::mem::take(encoder.get_mut())
    }

    /// The end of the packed stream; `None` the second time.
    pub(crate) fn finish(&mut self) -> Option<Vec<u8>> {
        self.0.take()?.finish().ok()
    }
}

/// What the body is made of.
struct Source {
    reader: Reader,
    packer: Option<Packer>,
}

impl Source {
    fn next(&mut self) -> Result<Option<Bytes>, ReadError> {
        loop {
            let plain = self.reader.next()?;
            let Some(packer) = &mut self.packer else {
                return Ok(plain.map(Bytes::from));
            };
            let Some(plain) = plain else {
                return Ok(packer.finish().map(Bytes::from));
            };
            let packed = packer.push(&plain);
            if !packed.is_empty() {
                return Ok(Some(packed.into()));
            }
        }
    }
}

type Step = (Source, Result<Option<Bytes>, ReadError>);

/// The body: a piece at hand, the rest still in the file.
pub(crate) struct FileBody {
    first: Option<Bytes>,
    idle: Option<Source>,
    reading: Option<JoinHandle<Step>>,
}

impl FileBody {
    /// Sends `first`, then what the reader gives, packed if so wished.
    pub(crate) fn new(first: Vec<u8>, reader: Reader, mut packer: Option<Packer>) -> Self {
        let first = match &mut packer {
            Some(packer) => packer.push(&first),
            None => first,
        };
        Self {
            first: (!first.is_empty()).then(|| first.into()),
            idle: Some(Source { reader, packer }),
            reading: None,
        }
    }

    fn read_ahead(&mut self) {
        if let Some(mut source) = self.idle.take() {
            self.reading = Some(tokio::task::spawn_blocking(move || {
                let step = source.next();
                (source, step)
            }));
        }
    }
}

impl http_body::Body for FileBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, BodyError>>> {
        self.read_ahead();
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(http_body::Frame::data(first))));
        }
        let Some(reading) = &mut self.reading else {
            return Poll::Ready(None);
        };
        let step = ready!(Pin::new(reading).poll(context));
        self.reading = None;
        match step {
            Ok((source, Ok(Some(bytes)))) => {
                self.idle = Some(source);
                self.read_ahead();
                Poll::Ready(Some(Ok(http_body::Frame::data(bytes))))
            }
            Ok((_, Ok(None))) => Poll::Ready(None),
            Ok((_, Err(error))) => Poll::Ready(Some(Err(error.into()))),
            Err(panicked) => Poll::Ready(Some(Err(panicked.into()))),
        }
    }
}
