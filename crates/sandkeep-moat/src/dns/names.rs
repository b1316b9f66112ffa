//! Which names a sandbox was told which addresses for.
//!
//! A connection to such an address may begin: what it says then decides. Plain TCP (ssh,
//! databases) carries no name, so there the answer of our own resolver decides by itself, and
//! for a shorter time.

use std::{
    collections::HashMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use crate::policy::Host;

/// Of each sandbox. A flood of names pushes out the oldest of the same sandbox.
pub const MOST_ADDRESSES: usize = 1024;
/// Many names share an address on a content network; the newest ones count.
const MOST_NAMES: usize = 16;
/// Programs keep addresses longer than they were told to: some for as long as they run. An
/// address that is in use stays, see [`Names::used`].
const OPEN_AT_LEAST: Duration = Duration::from_secs(3600);
const OPEN_AT_MOST: Duration = Duration::from_secs(24 * 3600);
/// An address may belong to another soon.
const SPEAKS_AT_LEAST: Duration = Duration::from_secs(600);

/// That a name was given as the reason for an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given {
    pub address: IpAddr,
    pub name: Host,
    /// How long a connection that names nothing is still taken for one to this name.
    pub speaks: Duration,
    /// How long a connection may still begin.
    pub opens: Duration,
}

impl Given {
    pub fn by_answer(address: IpAddr, name: &Host, ttl: Duration) -> Self {
        Self {
            address,
            name: name.clone(),
            speaks: ttl.clamp(SPEAKS_AT_LEAST, OPEN_AT_MOST),
            opens: ttl.clamp(OPEN_AT_LEAST, OPEN_AT_MOST),
        }
    }
}

#[derive(Debug)]
struct Known {
    name: Host,
    speaks_until: Instant,
    opens_until: Instant,
}

#[derive(Debug, Default)]
pub struct Names {
    by_address: HashMap<IpAddr, Vec<Known>>,
}

/// What taking something in did to the rest.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// It is worth writing down: it was not known, or will be there for a good while longer.
    pub news: bool,
    /// Had to make room.
    pub gone: Option<IpAddr>,
}

impl Names {
    pub fn take(&mut self, given: Given) -> Taken {
        let now = Instant::now();
        let mut taken = Taken::default();
        if self.by_address.len() >= MOST_ADDRESSES && !self.by_address.contains_key(&given.address)
        {
            taken.gone = self.make_room(now);
        }
        let names = self.by_address.entry(given.address).or_default();
        let before = names
            .iter()
            .position(|known| known.name == given.name)
            .map(|at| names.remove(at));
        names.retain(|known| known.opens_until > now);
        if names.len() >= MOST_NAMES {
            names.remove(0);
        }
        let later = |before: Option<Instant>, next: Duration| match before {
            Some(before) => before.max(now + next),
            None => now + next,
        };
        let known = Known {
            speaks_until: later(
                before.as_ref().map(|known| known.speaks_until),
                given.speaks,
            ),
            opens_until: later(before.as_ref().map(|known| known.opens_until), given.opens),
            name: given.name,
        };
        taken.news = before.is_none_or(|before| {
            known.speaks_until.duration_since(before.speaks_until) > SPEAKS_AT_LEAST / 2
        });
        names.push(known);
        taken
    }

    /// A connection went there: whoever uses an address goes on using it.
    pub fn used(&mut self, address: IpAddr) {
        let until = Instant::now() + OPEN_AT_LEAST;
        for known in self.by_address.get_mut(&address).into_iter().flatten() {
            known.opens_until = known.opens_until.max(until);
        }
    }

    /// The names that speak for an address by themselves, newest first.
    pub fn speaking_for(&self, address: IpAddr) -> Vec<Host> {
        let now = Instant::now();
        self.names(address, |known| known.speaks_until > now)
    }

    /// The names for which connections to it may begin.
    pub fn opening(&self, address: IpAddr) -> Vec<Host> {
        let now = Instant::now();
        self.names(address, |known| known.opens_until > now)
    }

    fn names(&self, address: IpAddr, counts: impl Fn(&&Known) -> bool) -> Vec<Host> {
        let known = self.by_address.get(&address).into_iter().flatten();
        let counting = known.filter(counts);
        let mut names: Vec<Host> = counting.map(|known| known.name.clone()).collect();
        names.reverse();
        names
    }

    /// Every address there is something known of.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.by_address.keys().copied()
    }

    /// All that still counts, oldest first for each address.
    pub fn all(&self) -> Vec<Given> {
        let now = Instant::now();
        let each = self.by_address.iter().flat_map(|(address, names)| {
            names.iter().map(move |known| Given {
                address: *address,
                name: known.name.clone(),
                speaks: known.speaks_until.saturating_duration_since(now),
                opens: known.opens_until.saturating_duration_since(now),
            })
        });
        each.filter(|given| !given.opens.is_zero()).collect()
    }

    /// Forgets what is over.
    pub fn sweep(&mut self) {
        let now = Instant::now();
        self.by_address.retain(|_, names| {
            names.retain(|known| known.opens_until > now);
            !names.is_empty()
        });
    }

    fn make_room(&mut self, now: Instant) -> Option<IpAddr> {
        self.by_address.retain(|_, names| {
            names.retain(|known| known.opens_until > now);
            !names.is_empty()
        });
        if self.by_address.len() < MOST_ADDRESSES {
            return None;
        }
        let oldest = self
            .by_address
            .iter()
            .min_by_key(|(_, names)| names.iter().map(|known| known.opens_until).max())
            .map(|(address, _)| *address)?;
        self.by_address.remove(&oldest);
        Some(oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(text: &str) -> Host {
        text.parse().unwrap()
    }

    fn given(address: impl Into<IpAddr>, name: &str) -> Given {
        Given::by_answer(address.into(), &host(name), Duration::ZERO)
    }

    #[test]
    fn the_newest_name_comes_first_and_room_is_bounded() {
        let mut names = Names::default();
        let address = IpAddr::from([192, 0, 2, 1]);
        for at in 0..40 {
            assert!(names.take(given(address, &format!("n{at}.test"))).news);
        }
        let found = names.speaking_for(address);
        assert_eq!(found.len(), MOST_NAMES);
        assert_eq!(found[0], host("n39.test"));
        let mut gone = 0;
        for at in 0..3000_u32 {
            let taken = names.take(given(at.to_be_bytes(), "a.test"));
            gone += usize::from(taken.gone.is_some());
        }
        assert_eq!(names.addresses().count(), MOST_ADDRESSES);
        assert_eq!(gone, 3001 - MOST_ADDRESSES);
        assert!(names.opening(IpAddr::from([1, 1, 1, 1])).is_empty());
    }

    #[test]
    fn a_name_told_again_lives_longer_and_is_no_news() {
        let mut names = Names::default();
        let address = IpAddr::from([192, 0, 2, 1]);
        assert!(names.take(given(address, "a.test")).news);
        assert!(!names.take(given(address, "a.test")).news);
        assert_eq!(names.all().len(), 1);
        let long = Given {
            speaks: OPEN_AT_MOST,
            ..given(address, "a.test")
        };
        assert!(names.take(long).news);
        // A shorter life does not take away from a longer one.
        names.take(given(address, "a.test"));
        assert!(names.all()[0].speaks > OPEN_AT_LEAST);
    }

    #[test]
    fn what_is_over_speaks_and_opens_no_more() {
        let mut names = Names::default();
        let address = IpAddr::from([192, 0, 2, 1]);
        names.take(Given {
            speaks: Duration::ZERO,
            ..given(address, "a.test")
        });
        assert!(names.speaking_for(address).is_empty());
        assert_eq!(names.opening(address), [host("a.test")]);
        let other = IpAddr::from([192, 0, 2, 2]);
        names.take(Given {
            opens: Duration::ZERO,
            speaks: Duration::ZERO,
            ..given(other, "b.test")
        });
        assert!(names.opening(other).is_empty());
        names.sweep();
        assert_eq!(names.addresses().collect::<Vec<_>>(), [address]);
        assert_eq!(names.all().len(), 1);
    }
}
