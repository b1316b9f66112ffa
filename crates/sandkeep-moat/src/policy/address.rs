//! Addresses no box reaches, whatever its policy says, unless the operator opened them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// Why an address is out of reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forbidden {
    Loopback,
    Private,
    LinkLocal,
    Metadata,
    Reserved,
    Multicast,
}

impl Forbidden {
    pub const fn words(self) -> &'static str {
        match self {
            Self::Loopback => "a loopback address",
            Self::Private => "a private address",
            Self::LinkLocal => "a link-local address",
            Self::Metadata => "a cloud metadata address",
            Self::Reserved => "a reserved address",
            Self::Multicast => "a multicast or broadcast address",
        }
    }
}

/// Decides on addresses that were dialled or resolved. The operator's exceptions are the only ones.
#[derive(Debug, Clone, Default)]
pub struct AddressGuard {
    opened: Vec<IpNet>,
}

impl AddressGuard {
    /// `opened`: private ranges the operator lets boxes reach where their policy names them.
    pub fn new(opened: Vec<IpNet>) -> Self {
        Self { opened }
    }

    /// `None` when the address may be dialled at all.
    pub fn refuses(&self, address: IpAddr) -> Option<Forbidden> {
        let found = classify(address)?;
        let opened = self.opened.iter().any(|net| net.contains(&address));
        // Metadata services hand out the host's own credentials: there is no opening these.
        if opened && found != Forbidden::Metadata {
            None
        } else {
            Some(found)
        }
    }
}

const METADATA_V4: [Ipv4Addr; 3] = [
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(169, 254, 170, 2),
    Ipv4Addr::new(100, 100, 100, 200),
];
const METADATA_V6: [Ipv6Addr; 1] = [Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)];

fn classify(address: IpAddr) -> Option<Forbidden> {
    match address {
        IpAddr::V4(v4) => classify_v4(v4),
        IpAddr::V6(v6) => classify_v6(v6),
    }
}

fn classify_v4(v4: Ipv4Addr) -> Option<Forbidden> {
    let [a, b, c, _] = v4.octets();
    if METADATA_V4.contains(&v4) {
        return Some(Forbidden::Metadata);
    }
    match (a, b, c) {
        (127, ..) => Some(Forbidden::Loopback),
        (10, ..) | (172, 16..=31, _) | (192, 168, _) | (100, 64..=127, _) => {
            Some(Forbidden::Private)
        }
        (169, 254, _) => Some(Forbidden::LinkLocal),
        (0, ..)
        | (192, 0, 0 | 2)
        | (198, 18 | 19, _)
        | (198, 51, 100)
        | (203, 0, 113)
        | (192, 88, 99) => Some(Forbidden::Reserved),
        (224..=239, ..) => Some(Forbidden::Multicast),
        (240..=255, ..) if v4 == Ipv4Addr::BROADCAST => Some(Forbidden::Multicast),
        (240..=255, ..) => Some(Forbidden::Reserved),
        _ => None,
    }
}

fn classify_v6(v6: Ipv6Addr) -> Option<Forbidden> {
    if METADATA_V6.contains(&v6) {
        return Some(Forbidden::Metadata);
    }
    let s = v6.segments();
    let inner = |high: u16, low: u16| {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        Ipv4Addr::new(a, b, c, d)
    };
    match s {
        [0, 0, 0, 0, 0, 0, 0, 1] => Some(Forbidden::Loopback),
        [0, 0, 0, 0, 0, 0, 0, 0] => Some(Forbidden::Reserved),
        // An IPv4 address inside an IPv6 one reaches what the IPv4 one reaches.
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0, 0, 0, 0, 0, 0, high, low] => {
            classify_v4(inner(high, low)).or(Some(Forbidden::Reserved))
        }
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => classify_v4(inner(high, low)),
        [0x64, 0xff9b, 1, ..] => Some(Forbidden::Private),
        [0x2002, high, low, ..] => classify_v4(inner(high, low)).or(Some(Forbidden::Reserved)),
        [0x2001, 0, ..] | [0x100, 0, 0, 0, ..] | [0x2001, 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => {
            Some(Forbidden::Reserved)
        }
        [0xfe80..=0xfebf, ..] => Some(Forbidden::LinkLocal),
        [0xfec0..=0xfeff, ..] | [0xfc00..=0xfdff, ..] => Some(Forbidden::Private),
        [0xff00..=0xffff, ..] => Some(Forbidden::Multicast),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_ssrf_every_known_address() {
        for text in [
            "169.254.169.254",
            "169.254.170.2",
            "100.100.100.200",
            "fd00:ec2::254",
            "::ffff:169.254.169.254",
            "64:ff9b::a9fe:a9fe",
        ] {
            let guard =
                AddressGuard::new(vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()]);
            let address: IpAddr = text.parse().unwrap();
            assert!(AddressGuard::default().refuses(address).is_some(), "{text}");
            if !text.starts_with("::ffff") && !text.starts_with("64:") {
                assert_eq!(guard.refuses(address), Some(Forbidden::Metadata), "{text}");
            }
        }
    }

    #[test]
    fn inner_addresses_are_refused_and_public_ones_are_not() {
        for text in [
            "127.0.0.1",
            "10.1.2.3",
            "172.31.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "0.0.0.0",
            "255.255.255.255",
            "224.0.0.1",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "ff02::1",
            "2002:7f00:1::",
            "2001::1",
            "::127.0.0.1",
        ] {
            assert!(
                AddressGuard::default()
                    .refuses(text.parse().unwrap())
                    .is_some(),
                "{text}"
            );
        }
        for text in [
            "1.1.1.1",
            "9.255.255.255",
            "172.32.0.1",
            "2606:4700::1111",
            "64:ff9b::101:101",
        ] {
            assert_eq!(
                AddressGuard::default().refuses(text.parse().unwrap()),
                None,
                "{text}"
            );
        }
    }

    #[test]
    fn the_operator_opens_a_range() {
        let guard = AddressGuard::new(vec!["10.20.0.0/16".parse().unwrap()]);
        assert_eq!(guard.refuses("10.20.3.4".parse().unwrap()), None);
        assert!(guard.refuses("10.21.3.4".parse().unwrap()).is_some());
    }
}
