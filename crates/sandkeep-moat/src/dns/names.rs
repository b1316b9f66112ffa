//! Which names a box was told which addresses for: plain TCP (ssh, databases) carries no name,
//! so a rule by name is decided by the address our own resolver gave for it.

use std::{
    collections::HashMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use crate::policy::Host;

const MAX_ADDRESSES: usize = 1024;
/// Many names share an address on a content network; the newest ones count.
const MAX_NAMES: usize = 16;
/// Programs keep addresses longer than they were told to.
const KEPT_AT_LEAST: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
pub struct Names {
    by_address: HashMap<IpAddr, Vec<(Host, Instant)>>,
}

impl Names {
    pub fn remember(&mut self, address: IpAddr, name: &Host, ttl: Duration) {
        let now = Instant::now();
        let until = now + ttl.max(KEPT_AT_LEAST);
        if self.by_address.len() >= MAX_ADDRESSES && !self.by_address.contains_key(&address) {
            self.make_room(now);
        }
        let names = self.by_address.entry(address).or_default();
        names.retain(|(known, end)| known != name && *end > now);
        if names.len() >= MAX_NAMES {
            names.remove(0);
        }
        names.push((name.clone(), until));
    }

    /// The names this address was given for, newest first.
    pub fn of(&self, address: IpAddr) -> Vec<Host> {
        let now = Instant::now();
        self.by_address
            .get(&address)
            .map_or_else(Vec::new, |names| {
                names
                    .iter()
                    .rev()
                    .filter(|(_, end)| *end > now)
                    .map(|(name, _)| name.clone())
                    .collect()
            })
    }

    fn make_room(&mut self, now: Instant) {
        self.by_address.retain(|_, names| {
            names.retain(|(_, end)| *end > now);
            !names.is_empty()
        });
        if self.by_address.len() >= MAX_ADDRESSES {
            let oldest = self
                .by_address
                .iter()
                .min_by_key(|(_, names)| names.last().map(|(_, end)| *end))
                .map(|(address, _)| *address);
            if let Some(address) = oldest {
                self.by_address.remove(&address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(text: &str) -> Host {
        text.parse().unwrap()
    }

    #[test]
    fn the_newest_name_comes_first_and_room_is_bounded() {
        let mut names = Names::default();
        let address = IpAddr::from([192, 0, 2, 1]);
        for at in 0..40 {
            names.remember(address, &host(&format!("n{at}.test")), Duration::ZERO);
        }
        let found = names.of(address);
        assert_eq!(found.len(), MAX_NAMES);
        assert_eq!(found[0], host("n39.test"));
        for at in 0..3000_u32 {
            names.remember(
                IpAddr::from(at.to_be_bytes()),
                &host("a.test"),
                Duration::ZERO,
            );
        }
        assert!(names.by_address.len() <= MAX_ADDRESSES);
        assert!(names.of(IpAddr::from([1, 1, 1, 1])).is_empty());
    }
}
