//! Bytes from one socket to another, both ways, until both are done.
//!
//! A connection at rest holds no buffer: data goes through one buffer, or one pipe, of the
//! thread, and only what the other side does not take at once is kept.

use std::{cell::RefCell, io, net::Shutdown};

use socket2::SockRef;
use tokio::{io::Interest, net::TcpStream};

use super::{
    meter::{Meter, Way},
    pipe::Pipe,
};
use crate::limits::Charge;

const LARGE: usize = 256 * 1024;
/// After the other side was slow: so little is kept per connection that many of them are fine.
const SMALL: usize = 32 * 1024;
/// Whoever sends so much at once sends more: then bytes are moved without being copied.
const BULK: usize = 64 * 1024;
/// Others get their turn after this many rounds.
const ROUNDS: u32 = 8;

thread_local! {
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; LARGE]);
}

/// `head` gives what was read from the client before and goes first. Until it is there, only what
/// the server says is passed on.
pub async fn both_ways(
    client: &TcpStream,
    upstream: &TcpStream,
    head: impl Future<Output = io::Result<Vec<u8>>>,
    meter: &Meter,
) -> io::Result<()> {
    let out = async { one_way(client, upstream, head.await?, Way::Out, meter).await };
    tokio::try_join!(out, one_way(upstream, client, Vec::new(), Way::In, meter),)?;
    Ok(())
}

enum Step {
    Nothing,
    Ended,
    Moved(usize),
    /// So much was read, and this of it could not be written yet.
    Kept(usize, Rest),
}

enum Rest {
    Bytes(Vec<u8>),
    Piped(Pipe),
}

async fn one_way(
    from: &TcpStream,
    to: &TcpStream,
    head: Vec<u8>,
    way: Way,
    meter: &Meter,
) -> io::Result<()> {
    if !head.is_empty() {
        forward(to, &head, way, meter).await?;
        drop(head);
    }
    let mut most = LARGE;
    let mut bulk = false;
    let mut round = 0_u32;
    loop {
        from.readable().await?;
        let step = if bulk {
            move_pages(from, to, meter.piece(Pipe::SIZE))?
        } else {
            copy(from, to, meter.piece(most))?
        };
        match step {
            Step::Nothing => {}
            Step::Ended => {
                // The other direction goes on: a half-closed connection is a whole one.
                return match SockRef::from(to).shutdown(Shutdown::Write) {
                    Err(error) if error.kind() != io::ErrorKind::NotConnected => Err(error),
                    _ => Ok(()),
                };
            }
            Step::Moved(count) => {
                most = LARGE;
                bulk = count >= BULK;
                pay(meter, way, count).await?;
            }
            Step::Kept(count, rest) => {
                most = SMALL;
                bulk = count >= BULK;
                pay(meter, way, count).await?;
                match rest {
                    Rest::Bytes(rest) => write_all(to, &rest).await?,
                    Rest::Piped(pipe) => empty(pipe, to).await?,
                }
            }
        }
        round = round.wrapping_add(1);
        if round.is_multiple_of(ROUNDS) {
            tokio::task::yield_now().await;
        }
    }
}

fn copy(from: &TcpStream, to: &TcpStream, most: usize) -> io::Result<Step> {
    SCRATCH.with_borrow_mut(|buffer| {
        let buffer = &mut buffer[..most];
        let got = match from.try_read(buffer) {
            Ok(0) => return Ok(Step::Ended),
            Ok(got) => got,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Step::Nothing),
            Err(error) => return Err(error),
        };
        match to.try_write(&buffer[..got]) {
            Ok(written) if written == got => Ok(Step::Moved(got)),
            Ok(written) => Ok(Step::Kept(got, Rest::Bytes(buffer[written..got].to_vec()))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Ok(Step::Kept(got, Rest::Bytes(buffer[..got].to_vec())))
            }
            Err(error) => Err(error),
        }
    })
}

/// The same through a pipe: the kernel hands pages from one socket to the other.
fn move_pages(from: &TcpStream, to: &TcpStream, most: usize) -> io::Result<Step> {
    let Ok(mut pipe) = Pipe::take() else {
        // No descriptors are left; copying needs none.
        return copy(from, to, most.min(LARGE));
    };
    let got = match from.try_io(Interest::READABLE, || pipe.fill(from, most)) {
        Ok(0) => return Ok(Step::Ended),
        Ok(got) => got,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            pipe.give_back();
            return Ok(Step::Nothing);
        }
        Err(error) => return Err(error),
    };
    match to.try_io(Interest::WRITABLE, || pipe.drain(to)) {
        Ok(_) if pipe.is_empty() => {
            pipe.give_back();
            Ok(Step::Moved(got))
        }
        Ok(_) => Ok(Step::Kept(got, Rest::Piped(pipe))),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Ok(Step::Kept(got, Rest::Piped(pipe)))
        }
        Err(error) => Err(error),
    }
}

async fn empty(mut pipe: Pipe, to: &TcpStream) -> io::Result<()> {
    while !pipe.is_empty() {
        to.writable().await?;
        match to.try_io(Interest::WRITABLE, || pipe.drain(to)) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    pipe.give_back();
    Ok(())
}

async fn write_all(to: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        to.writable().await?;
        match to.try_write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Sends what was read before.
pub async fn forward(to: &TcpStream, bytes: &[u8], way: Way, meter: &Meter) -> io::Result<()> {
    pay(meter, way, bytes.len()).await?;
    write_all(to, bytes).await
}

async fn pay(meter: &Meter, way: Way, count: usize) -> io::Result<()> {
    match meter.charge(way, count) {
        Charge::Go => Ok(()),
        Charge::Wait(wait) => {
            tokio::time::sleep(wait).await;
            Ok(())
        }
        Charge::UsedUp => Err(io::ErrorKind::QuotaExceeded.into()),
    }
}
