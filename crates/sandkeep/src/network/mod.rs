//! The moat of this server, from its settings.

pub mod audit;
pub mod identity;
pub mod lane;
pub mod secrets;

use std::{net::IpAddr, path::PathBuf, sync::Arc};

use ipnet::IpNet;
use sandkeep_keeper::{DenialBell, NetworkConfig};
use sandkeep_moat::{
    Able, InsideDesk, Moat, MoatConfig, Profiles, UpstreamDns,
    policy::{Policy, Profile, Registries},
};
use sandkeep_model::{Error, Result};
use sandkeep_ward::Check;
use tokio::runtime::Handle;

use self::{audit::Witness, identity::Identities, secrets::Edge};
use crate::listed::Resolver;

/// What the operator decided about the network of boxes.
#[derive(Debug, Clone)]
pub struct NetworkSettings {
    /// For boxes whose create says nothing.
    pub standing: Profile,
    /// For builds of templates that say nothing. `None`: see [`builds`].
    pub builds: Option<Profile>,
    /// Private ranges that policies may name.
    pub allow_private: Vec<IpNet>,
    /// Open connections one box may have, whatever its policy says.
    pub connections: u32,
    /// Empty: those of this host.
    pub dns: Vec<Resolver>,
    /// Certificate authorities trusted besides those of this host, as PEM.
    pub upstream_ca: Option<PathBuf>,
}

/// What the moat works with.
pub struct Parts {
    pub edge: Edge,
    /// Rung by the witness.
    pub denials: DenialBell,
    pub witness: Arc<Witness>,
    pub identities: Arc<Identities>,
    pub room: Room,
}

/// What of the server the moat may use.
#[derive(Debug)]
pub struct Room {
    /// Connections of all boxes together.
    pub connections: u32,
    pub runtime: Option<Handle>,
    /// Where it is kept what boxes were told about names.
    pub memory: PathBuf,
}

/// Looks whether this host can have a moat, and makes it.
pub async fn network(
    settings: &NetworkSettings,
    profiles: &Profiles,
    parts: Parts,
) -> Result<NetworkConfig> {
    let Parts {
        edge,
        denials,
        witness,
        identities,
        room,
    } = parts;
    let authority_seed = Some(edge.store.subkey("authorities of boxes")?);
    let interceptor = edge.interceptor(settings.upstream_ca.as_deref())?;
    let moat = match sandkeep_moat::probe().await {
        Ok(able) => {
            if !able.tells_refusals {
                tracing::warn!("{NOT_TOLD}");
            }
            Some(Moat::new(MoatConfig {
                upstream_dns: upstream(&settings.dns),
                allow_private: settings.allow_private.clone(),
                hooks: witness,
                inside: Some(Arc::new(InsideDesk::new(Some(identities)))),
                interceptor: Some(Arc::new(interceptor)),
                authority_seed,
                never: cluster(),
                most_connections: settings.connections,
                most_in_all: room.connections,
                memory: Some(room.memory),
                runtime: room.runtime,
                ..MoatConfig::default()
            }))
        }
        Err(error) if settings.standing == Profile::AirGapped => {
            tracing::warn!(%error, "boxes have no network on this host");
            None
        }
        Err(error) => {
            return Err(error
                .context(format!(
                    "network_default is {}, but this host can not bound what boxes reach",
                    settings.standing
                ))
                .retryable(false));
        }
    };
    let standing = policy_of("network_default", settings.standing, profiles)?;
    let builds = match moat {
        // Nothing else could be kept to.
        None => Policy::air_gapped(),
        Some(_) => builds(settings, profiles)?,
    };
    Ok(NetworkConfig {
        moat,
        standing,
        builds,
        denials,
    })
}

/// What nobody chose opens what it can; what somebody chose and opens nothing is a mistake.
fn builds(settings: &NetworkSettings, profiles: &Profiles) -> Result<Policy> {
    match (settings.builds, settings.standing) {
        (Some(chosen), _) => policy_of("build_network_default", chosen, profiles),
        (None, Profile::Open) => Ok(Policy::open()),
        (None, _) => Ok(Policy::of(
            Profile::PackageRegistries,
            &profiles.registries(),
        )),
    }
}

fn policy_of(setting: &str, profile: Profile, profiles: &Profiles) -> Result<Policy> {
    let registries = match profile {
        Profile::PackageRegistries => profiles.registries(),
        _ => Registries::default(),
    };
    if profile == Profile::PackageRegistries && registries.is_empty() {
        return Err(Error::invalid(
            setting,
            "no package client of this host names a registry, so package-registries would open nothing",
        )
        .hint("configure apt, pip, npm, cargo or go on this host, or choose deny or open"));
    }
    Ok(Policy::of(profile, &registries))
}

const NOT_TOLD: &str = "this kernel does not tell of connections it refuses (no nfnetlink_log): those that no rule can allow are refused with their first packet, but are not in the list of denials";

/// The interface of the cluster the server is a part of, if it is of one: what can talk to it can
/// start programs on every machine of it.
fn cluster() -> Vec<IpNet> {
    ["KUBERNETES_SERVICE_HOST", "KUBERNETES_PORT_443_TCP_ADDR"]
        .iter()
        .filter_map(|name| std::env::var(name).ok()?.parse::<IpAddr>().ok())
        .map(IpNet::from)
        .collect()
}

fn upstream(dns: &[Resolver]) -> UpstreamDns {
    if dns.is_empty() {
        return UpstreamDns::System;
    }
    UpstreamDns::Servers(dns.iter().map(|resolver| resolver.0).collect())
}

/// For `doctor`: whether sandboxes could reach this host's own package registries, once a policy
/// lets them.
pub async fn registries(settings: &NetworkSettings) -> Check {
    const NAME: &str = "package registries";
    let closed =
        sandkeep_moat::closed_registries(upstream(&settings.dns), settings.allow_private.clone())
            .await;
    let Some(first) = closed.first() else {
        return Check::ok(
            NAME,
            "none of this host's lies in a range that is closed to sandboxes",
        );
    };
    let others = match closed.len() - 1 {
        0 => String::new(),
        1 => " (and one more)".to_owned(),
        more => format!(" (and {more} more)"),
    };
    let nets: Vec<IpNet> = closed
        .iter()
        .flat_map(|registry| registry.addresses.iter().copied())
        .collect();
    let nets: Vec<String> = IpNet::aggregate(&nets)
        .iter()
        .map(|net| format!("\"{net}\""))
        .collect();
    Check::warning(
        NAME,
        format!("no sandbox can reach them: {}{others}", first.refusal.why),
        format!(
            "to let policies such as package-registries open them, set allow_private = [{}], or a wider range",
            nets.join(", ")
        ),
    )
}

/// For `doctor`: boxes run without a moat, too, only without a network.
pub async fn check() -> Check {
    const NAME: &str = "network";
    match sandkeep_moat::probe().await {
        Ok(Able {
            tells_refusals: true,
        }) => Check::ok(NAME, "boxes can be given exactly the network they need"),
        Ok(_) => Check::warning(NAME, NOT_TOLD, "load the kernel module nfnetlink_log"),
        Err(error) => Check::warning(
            NAME,
            format!("boxes will have none: {}", error.message),
            error.hint.unwrap_or_else(|| "run it as root".to_owned()),
        ),
    }
}
