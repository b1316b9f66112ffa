//! Who may talk to an agent that listens on the network of its box.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sandkeep_agent_api::channel::TOKEN_LENGTH;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::timeout;

/// The host sends its token at once.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(10);
/// More than one line, should several have been written.
const MOST_READ: usize = 1024;

type Token = [u8; TOKEN_LENGTH];

/// Lets in who comes from the host's address and knows the token.
#[derive(Debug)]
pub(crate) struct Gate {
    host: IpAddr,
    token: Mutex<Option<Token>>,
}

impl Gate {
    pub(crate) fn new(host: IpAddr) -> Self {
        Self {
            host,
            token: Mutex::new(None),
        }
    }

    /// From now on this is the token; one that can not be a token lets nobody in.
    pub(crate) fn renew(&self, token: &str) {
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) =
            token.as_bytes().try_into().ok();
    }

    /// Whether a caller may even try. Nobody in the box has the host's address.
    pub(crate) fn knows(&self, peer: IpAddr) -> bool {
        peer.to_canonical() == self.host
    }

    /// Reads the token of a connection and says whether it is right.
    pub(crate) async fn admits(&self, stream: &mut (impl AsyncRead + Unpin)) -> bool {
        let mut line = [0; TOKEN_LENGTH + 1];
        let read = timeout(TOKEN_TIMEOUT, stream.read_exact(&mut line)).await;
        let Some((offered, b"\n")) = line
            .split_first_chunk()
            .filter(|_| matches!(read, Ok(Ok(_))))
        else {
            return false;
        };
        let mut token = self.token.lock().unwrap_or_else(PoisonError::into_inner);
        if fits(token.as_ref(), offered) {
            return true;
        }
        // After a restore the one we remember is the old one's. (A machine has no standard
        // input; it is told on its port.)
        if let Some(fresh) = from_stdin() {
            *token = Some(fresh);
        }
        fits(token.as_ref(), offered)
    }
}

fn fits(token: Option<&Token>, offered: &Token) -> bool {
    token.is_some_and(|token| {
        // All of it is looked at, however early it differs.
        let differences = token
            .iter()
            .zip(offered)
            .fold(0, |all, (a, b)| all | (a ^ b));
        differences == 0
    })
}

/// The last token written to our standard input. Never waits.
fn from_stdin() -> Option<Token> {
    let stdin = rustix::stdio::stdin();
    let mut bytes = [0; MOST_READ];
    let mut length = 0;
    while length < bytes.len() && readable(stdin) {
        match rustix::io::read(stdin, &mut bytes[length..]) {
            Ok(count) if count > 0 => length += count,
            _ => break,
        }
    }
    last_token(&bytes[..length])
}

fn readable(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let now = Timespec::default();
    poll(&mut fds, Some(&now)).is_ok_and(|count| count > 0)
        && fds[0].revents().contains(PollFlags::IN)
}

fn last_token(bytes: &[u8]) -> Option<Token> {
    bytes
        .split(|byte| *byte == b'\n')
        .rev()
        .find_map(|line| line.try_into().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_whole_line_counts() {
        let (a, b) = ([b'a'; TOKEN_LENGTH], [b'b'; TOKEN_LENGTH]);
        let text = [&a[..], b"\n", &b[..], b"\n"].concat();
        assert_eq!(last_token(&text), Some(b));
        assert_eq!(last_token(b"short\n"), None);
        assert_eq!(last_token(b""), None);
    }

    #[tokio::test]
    async fn only_the_whole_token_is_admitted() {
        let gate = Gate::new(IpAddr::from([10, 0, 0, 1]));
        let token = [b'x'; TOKEN_LENGTH];
        *gate.token.lock().unwrap() = Some(token);
        let good = [&token[..], b"\n"].concat();
        assert!(gate.admits(&mut &good[..]).await);
        let mut bad = good.clone();
        bad[TOKEN_LENGTH - 1] = b'y';
        assert!(!gate.admits(&mut &bad[..]).await);
        assert!(!gate.admits(&mut &good[..TOKEN_LENGTH]).await);
        let mut long = good;
        long[TOKEN_LENGTH] = b'x';
        assert!(!gate.admits(&mut &long[..]).await);
    }

    #[test]
    fn only_the_host_may_try() {
        let gate = Gate::new(IpAddr::from([10, 0, 0, 1]));
        assert!(gate.knows("10.0.0.1".parse().unwrap()));
        assert!(gate.knows("::ffff:10.0.0.1".parse().unwrap()));
        assert!(!gate.knows("10.0.0.2".parse().unwrap()));
        assert!(!gate.knows("127.0.0.1".parse().unwrap()));
    }
}
