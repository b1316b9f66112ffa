//! Sessions of one box with its metadata service.
//!
//! A program that can be talked into fetching a URL can rarely be talked into a PUT with a header
//! of our choice first. That is what the session token proves.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use sandkeep_model::{Error, Result, Secret, Timestamp};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

/// Six hours, as in EC2.
pub const LONGEST_SECONDS: u64 = 6 * 60 * 60;
/// The one that ends first makes room.
const MOST: usize = 64;
/// Tokens a box may ask for in one second; a signature costs us, an entry in the audit too.
const TOKENS_PER_SECOND: u32 = 20;

/// The sessions of one box. Empty it costs a few words.
#[derive(Default)]
pub struct Sessions {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    open: Vec<Session>,
    /// The second tokens are counted in, and how many there were.
    counted: (i64, u32),
}

struct Session {
    hash: [u8; 32],
    ends: Timestamp,
}

impl Sessions {
    pub fn new() -> Self {
        Self::default()
    }

    /// A new session that ends after so many seconds.
    pub fn start(&self, seconds: u64, now: Timestamp) -> Result<Secret> {
        if !(1..=LONGEST_SECONDS).contains(&seconds) {
            return Err(
                Error::invalid("ttl", format!("a session can not last {seconds} seconds"))
                    .hint(format!("ask for 1 to {LONGEST_SECONDS} seconds")),
            );
        }
        let token = Secret::random();
        let mut inner = self.lock();
        inner.open.retain(|session| session.ends > now);
        if inner.open.len() >= MOST
            && let Some((first, _)) = inner
                .open
                .iter()
                .enumerate()
                .min_by_key(|(_, session)| session.ends)
        {
            inner.open.swap_remove(first);
        }
        inner.open.push(Session {
            hash: hash(token.expose().as_bytes()),
            ends: now.plus(Duration::from_secs(seconds)),
        });
        Ok(token)
    }

    /// Whether a session with this token is open.
    pub fn knows(&self, token: &[u8], now: Timestamp) -> bool {
        let given = hash(token);
        self.lock()
            .open
            .iter()
            .any(|session| session.ends > now && bool::from(session.hash.ct_eq(&given)))
    }

    /// Ends all of them: the box was restored or forked, and its memory holds their tokens.
    pub fn end_all(&self) {
        self.lock().open = Vec::new();
    }

    /// Counts a token about to be made; false when there were too many in this second.
    pub(crate) fn may_mint(&self, now: Timestamp) -> bool {
        let mut inner = self.lock();
        if inner.counted.0 != now.seconds() {
            inner.counted = (now.seconds(), 0);
        }
        inner.counted.1 = inner.counted.1.saturating_add(1);
        inner.counted.1 <= TOKENS_PER_SECOND
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Sessions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sessions({} open)", self.lock().open.len())
    }
}

/// Only the hash is kept: a picture of our memory opens no session.
fn hash(token: &[u8]) -> [u8; 32] {
    Sha256::digest(token).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_ends() {
        let sessions = Sessions::new();
        let now = Timestamp::now();
        let token = sessions.start(60, now).unwrap();
        let knows = |at| sessions.knows(token.expose().as_bytes(), at);
        assert!(knows(now));
        assert!(knows(now.plus(Duration::from_secs(59))));
        assert!(!knows(now.plus(Duration::from_secs(60))));
        assert!(!sessions.knows(b"", now));
        assert!(!Sessions::new().knows(token.expose().as_bytes(), now));
        sessions.end_all();
        assert!(!knows(now));
    }

    #[test]
    fn their_length_and_number_are_bounded() {
        let sessions = Sessions::new();
        let now = Timestamp::now();
        for bad in [0, LONGEST_SECONDS + 1, u64::MAX] {
            assert!(sessions.start(bad, now).is_err());
        }
        let short = sessions.start(1, now).unwrap();
        for _ in 0..MOST {
            sessions.start(60, now).unwrap();
        }
        assert_eq!(format!("{sessions:?}"), "Sessions(64 open)");
        assert!(!sessions.knows(short.expose().as_bytes(), now));
    }

    #[test]
    fn tokens_are_counted_by_the_second() {
        let sessions = Sessions::new();
        let now = Timestamp::from_millis(5_000);
        let made = (0..100).filter(|_| sessions.may_mint(now)).count();
        assert_eq!(made, TOKENS_PER_SECOND as usize);
        assert!(sessions.may_mint(Timestamp::from_millis(6_000)));
    }
}
