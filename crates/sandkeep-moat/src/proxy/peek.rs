//! What a connection begins with, before anything is sent on.

use std::{io, time::Duration};

use tokio::{
    net::TcpStream,
    time::{Instant, timeout_at},
};

use super::{
    first_words::{Kind, at_the_end, classify},
    hello::MAX_HELLO,
};

#[derive(Debug, PartialEq, Eq)]
pub enum Peeked {
    Kind(Kind),
    /// Nothing was said in the time given.
    Silent,
    /// It ended without saying anything.
    Closed,
    /// It began something and did not finish it in time or in size.
    Unfinished,
}

/// Reads until it is clear what this is. What was read stays in `head`. `first` is the time for
/// the first byte, `rest` from there on.
pub async fn peek(
    stream: &TcpStream,
    head: &mut Vec<u8>,
    first: Duration,
    rest: Duration,
) -> io::Result<Peeked> {
    let mut until = Instant::now() + first;
    let mut begun = !head.is_empty();
    loop {
        if begun && let Some(kind) = classify(head) {
            return Ok(Peeked::Kind(kind));
        }
        match timeout_at(until, read_more(stream, head)).await {
            Ok(Ok(0)) if !begun => return Ok(Peeked::Closed),
            // It ends without a line.
            Ok(Ok(0)) => return Ok(Peeked::Kind(at_the_end(head))),
            Ok(Ok(_)) if !begun => {
                begun = true;
                until = Instant::now() + rest;
            }
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Err(error),
            Err(_) if begun => return Ok(Peeked::Unfinished),
            Err(_) => return Ok(Peeked::Silent),
        }
        if head.len() > MAX_HELLO {
            return Ok(Peeked::Unfinished);
        }
    }
}

/// More bytes for `head`; zero at the end.
pub async fn read_more(stream: &TcpStream, head: &mut Vec<u8>) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        let mut buffer = [0_u8; 4096];
        match stream.try_read(&mut buffer) {
            Ok(count) => {
                head.extend_from_slice(&buffer[..count]);
                return Ok(count);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}
