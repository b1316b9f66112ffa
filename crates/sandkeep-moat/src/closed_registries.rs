//! Whether sandboxes could reach the package registries of this host at all.

use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use ipnet::IpNet;
use tokio::time::timeout;

use crate::{
    dns::{Resolver, UpstreamDns},
    policy::{AddressGuard, Host, Policy, Reason, Refusal, Registries},
};

const WITHIN: Duration = Duration::from_secs(5);
const AT_ONCE: usize = 16;

/// A registry that no policy opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClosedRegistry {
    pub host: Host,
    pub refusal: Refusal,
    /// What would have to be opened.
    pub addresses: Vec<IpNet>,
}

/// Looks up the registries that this host's package clients are configured for, each once. Those
/// that are not answered in time are left out.
pub async fn closed_registries(dns: UpstreamDns, allow_private: Vec<IpNet>) -> Vec<ClosedRegistry> {
    let guard = AddressGuard::new(allow_private);
    let resolver = Resolver::new(dns, guard.clone());
    let registries = Registries::of_this_host();
    let look = |(host, port): (Host, u16)| {
        let (resolver, guard) = (&resolver, &guard);
        async move {
            let (refusal, addresses) = match &host {
                Host::Address(address) => (
                    Refusal::of_address(guard, *address, None)?,
                    vec![IpNet::from(*address)],
                ),
                Host::Name(_) => {
                    let looked = timeout(WITHIN, resolver.look(&host)).await.ok()?;
                    let refusal = looked.open_to(&host, port, &Policy::open(), guard).err()?;
                    let withheld = looked.withheld.into_iter().map(IpNet::from);
                    (refusal, withheld.collect())
                }
            };
            (refusal.reason == Reason::ClosedRange).then_some(ClosedRegistry {
                host,
                refusal,
                addresses,
            })
        }
    };
    let found: Vec<Option<ClosedRegistry>> = stream::iter(registries.hosts())
        .map(look)
        .buffered(AT_ONCE)
        .collect()
        .await;
    found.into_iter().flatten().collect()
}
