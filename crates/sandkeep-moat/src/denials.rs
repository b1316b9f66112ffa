//! What a box was refused, for the agent and the person behind it.

use std::collections::VecDeque;

use ipnet::IpNet;
use sandkeep_model::Timestamp;
use serde::{Deserialize, Serialize};

use crate::policy::{Asked, Reason};

/// More different refusals than this push out the oldest.
const KEPT: usize = 256;

/// How something was tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Via {
    Dns,
    Tcp,
    Tls,
    Http,
}

impl Via {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dns => "dns",
            Self::Tcp => "tcp",
            Self::Tls => "tls",
            Self::Http => "http",
        }
    }
}

/// One refusal, however often it was met.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Denial {
    pub via: Via,
    /// A name or an address, as far as it was known.
    pub host: String,
    /// Zero for a lookup.
    pub port: u16,
    pub reason: Reason,
    /// Where its address is the reason: the range it lies in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<IpNet>,
    /// Where the connection was let through and one request in it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<Asked>,
    pub why: String,
    pub hint: String,
    pub first: Timestamp,
    pub last: Timestamp,
    pub count: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Denials {
    ring: VecDeque<Denial>,
}

impl Denials {
    /// Takes one down. Says what is to be reported, if anything.
    pub fn add(&mut self, denial: Denial) -> Option<Denial> {
        let merged = match self.take(&denial) {
            Some(mut old) => {
                old.last = denial.last;
                old.count += 1;
                old
            }
            None => denial,
        };
        // A box that tries the same again and again must not fill the audit log: after the first
        // time it is reported at each doubling of the count.
        let report = merged.count.is_power_of_two();
        self.push(merged);
        if report {
            self.ring.back().cloned()
        } else {
            None
        }
    }

    /// One that was written down, as it was then.
    pub fn restore(&mut self, denial: Denial) {
        self.take(&denial);
        self.push(denial);
    }

    fn take(&mut self, same: &Denial) -> Option<Denial> {
        let known = self.ring.iter().position(|other| {
            other.via == same.via
                && other.host == same.host
                && other.port == same.port
                && other.why == same.why
        });
        known.and_then(|at| self.ring.remove(at))
    }

    fn push(&mut self, denial: Denial) {
        if self.ring.len() >= KEPT {
            self.ring.pop_front();
        }
        self.ring.push_back(denial);
    }

    pub fn oldest_first(&self) -> Vec<Denial> {
        self.ring.iter().cloned().collect()
    }

    pub fn into_oldest_first(self) -> Vec<Denial> {
        self.ring.into()
    }

    /// Newest first.
    pub fn all(&self) -> Vec<Denial> {
        self.ring.iter().rev().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denial(host: &str) -> Denial {
        Denial {
            via: Via::Tcp,
            host: host.to_owned(),
            port: 22,
            reason: Reason::NoRule,
            range: None,
            request: None,
            why: "because".to_owned(),
            hint: String::new(),
            first: Timestamp::from_millis(1),
            last: Timestamp::now(),
            count: 1,
        }
    }

    #[test]
    fn the_same_is_counted_and_reported_ever_less_often() {
        let mut denials = Denials::default();
        let reports = (0..100)
            .filter_map(|_| denials.add(denial("a.test")))
            .count();
        assert_eq!(reports, 7);
        assert_eq!(denials.all().len(), 1);
        assert_eq!(denials.all()[0].count, 100);
    }

    #[test]
    fn the_oldest_goes() {
        let mut denials = Denials::default();
        for at in 0..300 {
            denials.add(denial(&format!("n{at}.test")));
        }
        assert_eq!(denials.all().len(), KEPT);
        assert_eq!(denials.all()[0].host, "n299.test");
    }
}
