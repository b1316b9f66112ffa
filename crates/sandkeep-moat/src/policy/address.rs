//! Addresses no box reaches, whatever its policy says, unless the operator opened them.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{Arc, LazyLock, PoisonError, RwLock},
};

use ipnet::IpNet;

use super::Addresses;

/// Why an address is out of reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forbidden {
    Loopback,
    Private,
    LinkLocal,
    Metadata,
    Reserved,
    Multicast,
    /// An address of the machine the server runs on.
    Own,
}

impl Forbidden {
    pub const fn words(self) -> &'static str {
        match self {
            Self::Loopback => "a loopback address",
            Self::Private => "a private address",
            Self::LinkLocal => "a link-local address",
            Self::Metadata => "an address of a cloud's own services (metadata)",
            Self::Reserved => "a reserved address",
            Self::Multicast => "a multicast or broadcast address",
            Self::Own => "an address of the server's own machine",
        }
    }

    /// Whether the operator can open addresses of this kind.
    pub const fn can_be_opened(self) -> bool {
        matches!(self, Self::Private | Self::Reserved)
    }
}

/// Decides on addresses that were dialled or resolved. The operator's exceptions are the only
/// ones, and there are none for the machine itself and for the services of its cloud.
#[derive(Debug, Clone, Default)]
pub struct AddressGuard {
    opened: Vec<IpNet>,
    never: Vec<IpNet>,
    own: Arc<RwLock<Addresses>>,
}

impl AddressGuard {
    /// `opened`: private ranges the operator lets boxes reach where their policy names them.
    pub fn new(opened: Vec<IpNet>) -> Self {
        Self {
            opened,
            ..Self::default()
        }
    }

    /// Networks that cannot be opened, besides those known here.
    #[must_use]
    pub fn never(mut self, never: Vec<IpNet>) -> Self {
        self.never = never;
        self
    }

    /// What this machine answers to from now on. Says whether that is something new.
    pub fn set_own(&self, own: Addresses) -> bool {
        let mut before = self.own.write().unwrap_or_else(PoisonError::into_inner);
        let changed = *before != own;
        *before = own;
        changed
    }

    /// `None` when the address may be dialled at all.
    pub fn refuses(&self, address: IpAddr) -> Option<Forbidden> {
        let found = classify(address);
        if found.is_some_and(|found| !found.can_be_opened()) {
            return found;
        }
        let own = self.own.read().unwrap_or_else(PoisonError::into_inner);
        let is_own = |address| own.contains(address) || self.is_never(address);
        let inner = match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(v6) => embedded_v4(v6).map(IpAddr::V4),
        };
        if is_own(address) || inner.is_some_and(is_own) {
            // Also where the range could be opened: it opens nothing here.
            return Some(
                found
                    .filter(|found| !found.can_be_opened())
                    .unwrap_or(Forbidden::Own),
            );
        }
        found.filter(|_| !self.opened.iter().any(|net| net.contains(&address)))
    }

    /// The range that makes this address one of the closed ones. `None` for those of this machine,
    /// and for those that are not closed.
    pub fn range_of(&self, address: IpAddr) -> Option<IpNet> {
        let plain = |address| {
            let fits = |(_, net): &&(Forbidden, IpNet)| net.contains(&address);
            TABLE.iter().find(fits).map(|(_, net)| *net)
        };
        let inner = match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(v6) => embedded_v4(v6).map(IpAddr::V4),
        };
        inner.and_then(plain).or_else(|| plain(address))
    }

    /// Whether opening this network opens nothing at all: every address in it stays closed.
    pub fn never_opens(net: &IpNet) -> Option<Forbidden> {
        TABLE
            .iter()
            .find(|(_, closed)| closed.contains(net))
            .map(|(why, _)| *why)
            .filter(|why| !why.can_be_opened())
    }

    fn is_never(&self, address: IpAddr) -> bool {
        self.never.iter().any(|net| net.contains(&address))
    }

    /// Every address that is refused, for those who must know beforehand.
    pub fn closed(&self) -> Addresses {
        let soft = TABLE.iter().filter(|(why, _)| why.can_be_opened());
        let hard = TABLE.iter().filter(|(why, _)| !why.can_be_opened());
        let soft = Addresses::of(soft.map(|(_, net)| net)).and_translated();
        let hard = Addresses::of(hard.map(|(_, net)| net).chain(&self.never));
        let own = self.own.read().unwrap_or_else(PoisonError::into_inner);
        soft.without(&Addresses::of(&self.opened))
            .and(&hard.and(&own).and_translated())
    }
}

/// What is closed, and why. The first that fits counts.
static TABLE: LazyLock<Vec<(Forbidden, IpNet)>> = LazyLock::new(|| {
    use Forbidden::{LinkLocal, Loopback, Metadata, Multicast, Private, Reserved};
    let closed: [(Forbidden, &[&str]); 7] = [
        // Services that hand out the machine's own credentials, or control it. There is no
        // opening these.
        (
            Metadata,
            &[
                // AWS, Azure, Google, Oracle, IBM, DigitalOcean, Hetzner, OpenStack and others;
                // name servers, clocks and licence servers of AWS beside it.
                "169.254.169.0/24",
                // AWS: roles of tasks, identities of pods (ECS, EKS).
                "169.254.170.0/24",
                "fd00:ec2::/32",
                // Azure: WireServer.
                "168.63.129.16/32",
                // Google.
                "fd20:ce::/64",
                // Oracle.
                "fd00:c1::/64",
                "192.0.0.192/32",
                // Alibaba: metadata and name servers.
                "100.100.100.200/32",
                "100.100.2.136/32",
                "100.100.2.138/32",
                // Scaleway.
                "169.254.42.42/32",
                "fd00:42::/64",
                // Tencent.
                "169.254.0.23/32",
                // Kubernetes: the name server of a node.
                "169.254.20.10/32",
            ],
        ),
        (Loopback, &["127.0.0.0/8", "::1/128"]),
        (
            Private,
            &[
                "10.0.0.0/8",
                "172.16.0.0/12",
                "192.168.0.0/16",
                "100.64.0.0/10",
                "fc00::/7",
                "fec0::/10",
                "64:ff9b:1::/48",
            ],
        ),
        (LinkLocal, &["169.254.0.0/16", "fe80::/10"]),
        (
            Reserved,
            &[
                "0.0.0.0/8",
                "192.0.0.0/24",
                "192.0.2.0/24",
                "198.18.0.0/15",
                "198.51.100.0/24",
                "203.0.113.0/24",
                "192.88.99.0/24",
                // IPv4 inside IPv6, and what a relay (6to4, Teredo) would make of it.
                "::/96",
                "::ffff:0:0/96",
                "::ffff:0:0:0/96",
                "2002::/16",
                "2001::/32",
                "100::/64",
                "2001:db8::/32",
                "3fff::/20",
            ],
        ),
        (
            Multicast,
            &["224.0.0.0/4", "255.255.255.255/32", "ff00::/8"],
        ),
        (Reserved, &["240.0.0.0/4"]),
    ];
    closed
        .into_iter()
        .flat_map(|(why, nets)| {
            nets.iter().map(move |net| {
                (
                    why,
                    net.parse().expect("the networks above are well-formed"),
                )
            })
        })
        .collect()
});

fn classify(address: IpAddr) -> Option<Forbidden> {
    let plain = |address| {
        let fits = |(_, net): &&(Forbidden, IpNet)| net.contains(&address);
        TABLE.iter().find(fits).map(|(why, _)| *why)
    };
    let IpAddr::V6(v6) = address else {
        return plain(address);
    };
    // An IPv4 address inside an IPv6 one reaches what the IPv4 one reaches.
    match embedded_v4(v6).and_then(|inner| plain(inner.into())) {
        Some(why) if plain(address) != Some(Forbidden::Loopback) => Some(why),
        _ => plain(address),
    }
}

/// The IPv4 address a machine or relay would take out of this one: mapped, compatible, translated
/// (NAT64), 6to4, ISATAP.
fn embedded_v4(v6: Ipv6Addr) -> Option<Ipv4Addr> {
    let s = v6.segments();
    let (high, low) = match s {
        // Not an address of a machine: unspecified, and loopback.
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => return None,
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low] => (high, low),
        [0, 0, 0, 0, 0xffff, 0, high, low] => (high, low),
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => (high, low),
        [0x2002, high, low, ..] => (high, low),
        [_, _, _, _, 0 | 0x200, 0x5efe, high, low] => (high, low),
        _ => return None,
    };
    Some(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_ssrf_every_known_address() {
        let opened = vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()];
        let guard = AddressGuard::new(opened);
        for text in [
            "169.254.169.254",
            "169.254.169.253",
            "169.254.170.2",
            "169.254.170.23",
            "168.63.129.16",
            "100.100.100.200",
            "192.0.0.192",
            "169.254.42.42",
            "169.254.0.23",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
            // The same inside IPv6: mapped, compatible, SIIT, NAT64, 6to4, ISATAP.
            "::ffff:169.254.169.254",
            "::169.254.169.254",
            "::ffff:0:168.63.129.16",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b::a83f:8110",
            "2002:a83f:8110::1",
            "2606:4700::5efe:168.63.129.16",
            "2606:4700::200:5efe:a9fe:a9fe",
        ] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(guard.refuses(address), Some(Forbidden::Metadata), "{text}");
        }
        // Beforehand, too: what is refused whatever was opened is closed for the kernel.
        assert!(guard.closed().contains("168.63.129.16".parse().unwrap()));
        assert!(
            guard
                .closed()
                .contains("64:ff9b::a9fe:a9fe".parse().unwrap())
        );
    }

    #[test]
    fn the_hosts_own_public_address_is_closed_whatever_is_opened() {
        let guard = AddressGuard::new(vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()]);
        let own = ["8.8.4.99/32", "2606:4700::99/128", "9.9.9.0/24"];
        let own: Vec<IpNet> = own.iter().map(|net| net.parse().unwrap()).collect();
        assert_eq!(guard.refuses("8.8.4.99".parse().unwrap()), None);
        assert!(guard.set_own(Addresses::of(&own)));
        assert!(!guard.set_own(Addresses::of(&own)));
        for text in [
            "8.8.4.99",
            "2606:4700::99",
            "9.9.9.7",
            "64:ff9b::808:463",
            "2002:808:463::1",
            "::ffff:8.8.4.99",
            "::8.8.4.99",
        ] {
            let address: IpAddr = text.parse().unwrap();
            assert!(guard.refuses(address).is_some(), "{text}");
        }
        for text in ["8.8.4.99", "2606:4700::99", "64:ff9b::808:463"] {
            assert!(guard.closed().contains(text.parse().unwrap()), "{text}");
        }
        assert_eq!(guard.refuses("8.8.4.98".parse().unwrap()), None);
        // It has lost the address.
        guard.set_own(Addresses::default());
        assert_eq!(guard.refuses("8.8.4.99".parse().unwrap()), None);
    }

    #[test]
    fn what_is_closed_is_what_is_refused() {
        let guard = AddressGuard::new(vec!["10.20.0.0/16".parse().unwrap()])
            .never(vec!["10.20.7.0/24".parse().unwrap()]);
        let closed = guard.closed();
        for text in [
            "10.20.3.4",
            "10.20.7.4",
            "10.21.3.4",
            "1.1.1.1",
            "127.0.0.1",
            "240.0.0.1",
            "::1",
            "::",
            "fe80::1",
            "2606:4700::1111",
            "64:ff9b::101:101",
            "64:ff9b::a00:1",
            "2002::1",
            "ff02::1",
            "169.254.1.1",
            "172.32.0.1",
            "172.31.255.255",
        ] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(
                closed.contains(address),
                guard.refuses(address).is_some(),
                "{text}"
            );
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
