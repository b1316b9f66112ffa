//! Dialling out, to nothing but checked addresses.

use std::{io, net::IpAddr, time::Duration};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use sandkeep_netlink::{Found, route_to};
use socket2::{SockRef, TcpKeepalive};
use tokio::{net::TcpStream, time::timeout};

use crate::{
    denials::Via,
    policy::{Forbidden, Host, Reason, Refusal},
    state::{Attempt, BoxState},
};

const DEADLINE: Duration = Duration::from_secs(10);
/// How long one address has before the next is tried beside it.
const HEAD_START: Duration = Duration::from_millis(250);
const MAX_TRIED: usize = 8;
const KEEPALIVE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub enum DialError {
    /// The policy or the guard says no.
    Refused(Refusal),
    /// The other side can not be reached.
    Failed(io::Error),
}

impl From<io::Error> for DialError {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

/// Resolves the name here and dials what was resolved. `seen`, the address the box dialled, goes
/// first when it is one of them.
pub async fn name(
    state: &BoxState,
    host: &Host,
    port: u16,
    seen: Option<IpAddr>,
) -> Result<TcpStream, DialError> {
    let policy = state.policy();
    let good = match host {
        Host::Address(address) => policy
            .allows_resolved(host, port, *address, state.guard())
            .refusal()
            .map_or(Ok(vec![*address]), Err),
        Host::Name(_) => {
            let looked = state.shared.resolver.look(host).await;
            looked.open_to(host, port, &policy, state.guard())
        }
    };
    let good = match good {
        Ok(good) => good,
        Err(refusal) if refusal.reason.is_of_a_lookup() => {
            let failed = io::Error::other(refusal.why.clone());
            let attempt = Attempt {
                via: Via::Dns,
                host: host.to_string(),
                port: 0,
            };
            state.deny(&attempt, refusal);
            return Err(DialError::Failed(failed));
        }
        Err(refusal) => return Err(DialError::Refused(refusal)),
    };
    let good = elsewhere(&in_turn(&good, seen))?;
    Ok(race(&good, port).await?)
}

/// Those that are not delivered on this machine: asked of the kernel at the moment of dialling, so
/// that an address it has just got, or has only by a route, is none either.
fn elsewhere(addresses: &[IpAddr]) -> Result<Vec<IpAddr>, DialError> {
    let mut own = None;
    let mut good = Vec::new();
    for address in addresses {
        match route_to(*address)? {
            Found::Ours => own = Some(address),
            // That nothing leads there is told by the dialling.
            Found::Elsewhere | Found::Nowhere => good.push(*address),
        }
    }
    match own {
        Some(address) if good.is_empty() => Err(DialError::Refused(Refusal::new(
            Reason::OwnAddress,
            format!(
                "{address} is {}, which no sandbox can reach",
                Forbidden::Own.words()
            ),
            "no rule or setting opens it: run what sandboxes need on another machine, or in a sandbox",
        ))),
        _ => Ok(good),
    }
}

/// Dials one address that a rule names or our resolver gave.
pub async fn address(state: &BoxState, address: IpAddr, port: u16) -> Result<TcpStream, DialError> {
    if let Some(refusal) = Refusal::of_address(state.guard(), address, None) {
        return Err(DialError::Refused(refusal));
    }
    Ok(race(&elsewhere(&[address])?, port).await?)
}

/// The families take turns, so that a broken one costs little.
fn in_turn(addresses: &[IpAddr], first: Option<IpAddr>) -> Vec<IpAddr> {
    let first = first.filter(|address| addresses.contains(address));
    let rest = |v6: bool| {
        addresses
            .iter()
            .copied()
            .filter(move |address| address.is_ipv6() == v6 && Some(*address) != first)
    };
    let (mut v6, mut v4) = (rest(true), rest(false));
    let mut order: Vec<IpAddr> = first.into_iter().collect();
    loop {
        let before = order.len();
        order.extend(v6.next());
        order.extend(v4.next());
        if order.len() == before {
            order.truncate(MAX_TRIED);
            return order;
        }
    }
}

async fn race(addresses: &[IpAddr], port: u16) -> io::Result<TcpStream> {
    let stream = timeout(DEADLINE, async {
        let mut waiting = addresses.iter().copied();
        // In this task: a try that is one of one needs no other.
        let mut tries = FuturesUnordered::new();
        let mut last: io::Error = io::ErrorKind::AddrNotAvailable.into();
        loop {
            if let Some(address) = waiting.next() {
                tries.push(TcpStream::connect((address, port)));
            }
            let next = tries.next();
            let done = if waiting.len() == 0 {
                next.await
            } else {
                match timeout(HEAD_START, next).await {
                    Ok(done) => done,
                    Err(_) => continue,
                }
            };
            match done {
                Some(Ok(stream)) => return Ok(stream),
                Some(Err(error)) => last = error,
                None => return Err(last),
            }
        }
    })
    .await??;
    stream.set_nodelay(true)?;
    // A peer that vanished is noticed some day, also on a quiet connection.
    SockRef::from(&stream).set_tcp_keepalive(
        &TcpKeepalive::new()
            .with_time(KEEPALIVE)
            .with_interval(KEEPALIVE / 4),
    )?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_take_turns_after_the_one_seen() {
        let a: Vec<IpAddr> = ["1.1.1.1", "1.1.1.2", "2606::1", "2606::2"]
            .iter()
            .map(|text| text.parse().unwrap())
            .collect();
        assert_eq!(in_turn(&a, Some(a[1])), [a[1], a[2], a[0], a[3]]);
        assert_eq!(
            in_turn(&a, Some("9.9.9.9".parse().unwrap())),
            [a[2], a[0], a[3], a[1]]
        );
    }
}
