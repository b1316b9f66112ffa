//! A pipe to move bytes between sockets through, without copying them into this process.

use std::{
    cell::RefCell,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::atomic::{AtomicUsize, Ordering},
};

use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

/// Empty pipes a thread keeps: more are never used at the same moment, except by connections
/// whose other side is slow, and these hold their own.
const SPARE: usize = 4;

/// More are not made: what they hold is memory of the kernel, and a sandbox that reads nothing
/// keeps its pipe full. Without one, bytes go through a small buffer.
const MOST: usize = 256;

static MADE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static EMPTY: RefCell<Vec<Pipe>> = const { RefCell::new(Vec::new()) };
}

#[derive(Debug)]
pub struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    held: usize,
    _counted: Counted,
}

/// One of the pipes there are.
#[derive(Debug)]
struct Counted;

impl Counted {
    fn new() -> io::Result<Self> {
        let before = MADE.fetch_add(1, Ordering::Relaxed);
        // Counted off again when there are enough.
        let counted = Self;
        if before >= MOST {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        Ok(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        MADE.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pipe {
    /// At most so much goes through at once.
    pub const SIZE: usize = 512 * 1024;

    /// An empty one.
    pub fn take() -> io::Result<Self> {
        if let Some(pipe) = EMPTY.with_borrow_mut(Vec::pop) {
            return Ok(pipe);
        }
        let counted = Counted::new()?;
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // A smaller one works as well, in smaller steps.
        let _ = fcntl_setpipe_size(&write, Self::SIZE);
        Ok(Self {
            read,
            write,
            held: 0,
            _counted: counted,
        })
    }

    /// For the next one. A pipe that still holds bytes of a connection is closed instead.
    pub fn give_back(self) {
        if self.is_empty() {
            EMPTY.with_borrow_mut(|spare| {
                if spare.len() < SPARE {
                    spare.push(self);
                }
            });
        }
    }

    pub const fn is_empty(&self) -> bool {
        self.held == 0
    }

    /// Zero: there is nothing more to come. Only for an empty pipe: one that is full would look
    /// like a socket that has nothing.
    pub fn fill(&mut self, from: impl AsFd, most: usize) -> io::Result<usize> {
        debug_assert!(self.is_empty());
        let got = splice(from, None, &self.write, None, most, FLAGS)?;
        self.held += got;
        Ok(got)
    }

    pub fn drain(&mut self, to: impl AsFd) -> io::Result<usize> {
        let gone = splice(&self.read, None, to, None, self.held, FLAGS)?;
        self.held -= gone;
        Ok(gone)
    }
}

const FLAGS: SpliceFlags = SpliceFlags::MOVE.union(SpliceFlags::NONBLOCK);

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
    };

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    #[test]
    fn bytes_pass_and_only_empty_pipes_are_used_again() {
        let ((mut a, b), (c, mut d)) = (pair(), pair());
        a.write_all(b"words").unwrap();
        let mut pipe = Pipe::take().unwrap();
        assert_eq!(pipe.fill(&b, 100).unwrap(), 5);
        assert!(!pipe.is_empty());
        assert_eq!(pipe.drain(&c).unwrap(), 5);
        let mut got = [0; 5];
        d.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"words");
        pipe.give_back();
        a.write_all(b"left").unwrap();
        let mut pipe = Pipe::take().unwrap();
        assert_eq!(pipe.fill(&b, 100).unwrap(), 4);
        pipe.give_back();
        let pipe = Pipe::take().unwrap();
        assert!(pipe.is_empty(), "what another connection left is not in it");
        drop(a);
        let mut pipe = Pipe::take().unwrap();
        assert_eq!(pipe.fill(&b, 100).unwrap(), 0);
    }
}
