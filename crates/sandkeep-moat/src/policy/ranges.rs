//! Sets of addresses of one family, as ranges: what the kernel is told, and what is looked up fast.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// Sorted ranges of numbers that do not touch each other, both ends included.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ranges(Vec<(u128, u128)>);

impl Ranges {
    fn of(mut ranges: Vec<(u128, u128)>) -> Self {
        ranges.sort_unstable();
        let mut joined: Vec<(u128, u128)> = Vec::with_capacity(ranges.len());
        for (low, high) in ranges {
            match joined.last_mut() {
                Some(last) if low <= last.1.saturating_add(1) => last.1 = last.1.max(high),
                _ => joined.push((low, high)),
            }
        }
        Self(joined)
    }

    /// This set less the other.
    fn without(&self, other: &Self) -> Self {
        let mut left = Vec::new();
        for &(low, high) in &self.0 {
            let mut from = Some(low);
            for &(out_low, out_high) in &other.0 {
                let Some(start) = from else { break };
                if out_high < start || out_low > high {
                    continue;
                }
                if out_low > start {
                    left.push((start, out_low - 1));
                }
                from = out_high.checked_add(1).filter(|next| *next <= high);
            }
            left.extend(from.map(|start| (start, high)));
        }
        Self(left)
    }

    fn contains(&self, number: u128) -> bool {
        let after = self.0.partition_point(|(low, _)| *low <= number);
        after > 0 && self.0[after - 1].1 >= number
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (u128, u128)> + '_ {
        self.0.iter().copied()
    }
}

/// A set of addresses of both families.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Addresses {
    pub v4: Ranges,
    pub v6: Ranges,
}

impl Addresses {
    pub fn of<'a>(nets: impl IntoIterator<Item = &'a IpNet>) -> Self {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for net in nets {
            match net {
                IpNet::V4(net) => v4.push((number_v4(net.network()), number_v4(net.broadcast()))),
                IpNet::V6(net) => v6.push((net.network().to_bits(), net.broadcast().to_bits())),
            }
        }
        Self {
            v4: Ranges::of(v4),
            v6: Ranges::of(v6),
        }
    }

    /// Whether every address of the network is in it.
    pub fn covers(&self, net: &IpNet) -> bool {
        let left = Self::of([net]).without(self);
        left.v4.is_empty() && left.v6.is_empty()
    }

    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self {
            v4: self.v4.without(&other.v4),
            v6: self.v6.without(&other.v6),
        }
    }

    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let both = |a: &Ranges, b: &Ranges| Ranges::of(a.iter().chain(b.iter()).collect());
        Self {
            v4: both(&self.v4, &other.v4),
            v6: both(&self.v6, &other.v6),
        }
    }

    /// With the addresses that stand for the IPv4 ones behind a translator (NAT64).
    #[must_use]
    pub fn and_translated(&self) -> Self {
        let prefix = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0).to_bits();
        let translated = self
            .v4
            .iter()
            .map(|(low, high)| (prefix + low, prefix + high));
        Self {
            v4: self.v4.clone(),
            v6: Ranges::of(self.v6.iter().chain(translated).collect()),
        }
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(v4) => self.v4.contains(number_v4(v4)),
            IpAddr::V6(v6) => self.v6.contains(v6.to_bits()),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.v4.is_empty() && self.v6.is_empty()
    }
}

fn number_v4(address: Ipv4Addr) -> u128 {
    address.to_bits().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(nets: &[&str]) -> Addresses {
        let nets: Vec<IpNet> = nets.iter().map(|net| net.parse().unwrap()).collect();
        Addresses::of(&nets)
    }

    fn has(set: &Addresses, address: &str) -> bool {
        set.contains(address.parse().unwrap())
    }

    #[test]
    fn ranges_join_and_are_taken_out() {
        let ten = set(&[
            "10.0.0.0/8",
            "10.1.0.0/16",
            "11.0.0.0/8",
            "255.255.255.255/32",
        ]);
        assert_eq!(ten.v4.0.len(), 2);
        let less = ten.without(&set(&["10.5.0.0/16", "9.0.0.0/8", "255.255.255.255/32"]));
        for (address, there) in [
            ("10.4.255.255", true),
            ("10.5.0.0", false),
            ("10.5.255.255", false),
            ("10.6.0.0", true),
            ("11.255.255.255", true),
            ("12.0.0.0", false),
            ("255.255.255.255", false),
        ] {
            assert_eq!(has(&less, address), there, "{address}");
        }
        assert!(less.without(&set(&["0.0.0.0/0"])).is_empty());
        assert_eq!(less.without(&set(&[])), less);
    }

    #[test]
    fn every_address_and_none() {
        let all = set(&["::/0", "0.0.0.0/0"]);
        assert!(has(&all, "::") && has(&all, "ffff::") && has(&all, "255.255.255.255"));
        assert!(!has(&Addresses::default(), "1.1.1.1"));
    }

    #[test]
    fn translated_addresses() {
        let closed = set(&["10.0.0.0/8"]).and_translated();
        assert!(has(&closed, "64:ff9b::a01:203") && !has(&closed, "64:ff9b::b01:203"));
    }
}
