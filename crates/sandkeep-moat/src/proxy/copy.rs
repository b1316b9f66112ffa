//! Bytes from one socket to another, both ways, until both are done.
//!
//! A connection at rest holds no buffer: data goes through one buffer of the thread, and only
//! what the other side does not take at once is kept.

use std::{cell::RefCell, io, net::Shutdown};

use socket2::SockRef;
use tokio::net::TcpStream;

use super::meter::{Meter, Way};
use crate::limits::Charge;

const LARGE: usize = 256 * 1024;
/// After the other side was slow: so little is kept per connection that many of them are fine.
const SMALL: usize = 32 * 1024;
/// Others get their turn after this many rounds.
const ROUNDS: u32 = 8;

thread_local! {
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; LARGE]);
}

/// `head` was read from the client before and goes first.
pub async fn both_ways(
    client: &TcpStream,
    upstream: &TcpStream,
    head: Vec<u8>,
    meter: &Meter,
) -> io::Result<()> {
    tokio::try_join!(
        one_way(client, upstream, head, Way::Out, meter),
        one_way(upstream, client, Vec::new(), Way::In, meter),
    )?;
    Ok(())
}

enum Step {
    Nothing,
    Ended,
    Moved(usize),
    /// So much was read, and this of it could not be written yet.
    Kept(usize, Vec<u8>),
}

async fn one_way(
    from: &TcpStream,
    to: &TcpStream,
    head: Vec<u8>,
    way: Way,
    meter: &Meter,
) -> io::Result<()> {
    if !head.is_empty() {
        pay(meter, way, head.len()).await?;
        write_all(to, &head).await?;
        drop(head);
    }
    let mut most = LARGE;
    let mut round = 0_u32;
    loop {
        from.readable().await?;
        match step(from, to, meter.piece(most))? {
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
                pay(meter, way, count).await?;
            }
            Step::Kept(count, rest) => {
                most = SMALL;
                pay(meter, way, count).await?;
                write_all(to, &rest).await?;
            }
        }
        round = round.wrapping_add(1);
        if round.is_multiple_of(ROUNDS) {
            tokio::task::yield_now().await;
        }
    }
}

fn step(from: &TcpStream, to: &TcpStream, most: usize) -> io::Result<Step> {
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
            Ok(written) => Ok(Step::Kept(got, buffer[written..got].to_vec())),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Ok(Step::Kept(got, buffer[..got].to_vec()))
            }
            Err(error) => Err(error),
        }
    })
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
