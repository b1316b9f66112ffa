//! The addresses of the machine itself, kept current.

use std::{io, sync::Arc, time::Duration};

use ipnet::IpNet;
use sandkeep_netlink::{NetlinkSocket, address_changes, local_networks};
use tokio::{io::unix::AsyncFd, sync::watch, time::sleep};

use crate::{policy::Addresses, state::Shared};

/// Routes follow addresses a moment later, and changes come many at once.
const SETTLED_AFTER: Duration = Duration::from_millis(20);
/// Where changes cannot be heard, and for local routes that no address belongs to.
const LOOKED_AT_EVERY: Duration = Duration::from_secs(60);

/// Reads them, says so, and goes on following them. In the namespace of the threads it runs on.
pub async fn follow(shared: Arc<Shared>, ready: watch::Sender<bool>) {
    // Listening first: what changes while they are read is read again.
    let changes = listen();
    renew(&shared);
    ready.send_replace(true);
    let changes = match changes {
        Ok(changes) => Some(changes),
        Err(error) => {
            tracing::warn!(%error, "changes of this machine's addresses cannot be heard; they are looked at every minute");
            None
        }
    };
    loop {
        tokio::select! {
            () = heard(changes.as_ref()) => sleep(SETTLED_AFTER).await,
            () = sleep(LOOKED_AT_EVERY) => {}
        }
        if let Some(changes) = &changes {
            // One look answers all that were told until now.
            while changes.get_ref().take_up(|_, _| {}).is_ok() {}
        }
        if renew(&shared) {
            shared.own_changed.send_replace(());
        }
    }
}

fn listen() -> io::Result<AsyncFd<NetlinkSocket>> {
    let socket = address_changes()?;
    // SAFETY: the socket owns its descriptor and has the same one until it is dropped.
    Ok(unsafe { AsyncFd::register(socket) }?)
}

async fn heard(changes: Option<&AsyncFd<NetlinkSocket>>) {
    let Some(changes) = changes else {
        return std::future::pending().await;
    };
    if let Ok(mut ready) = changes.readable().await {
        ready.clear_ready();
    }
}

/// Says whether they are others than before.
fn renew(shared: &Shared) -> bool {
    match local_networks() {
        Ok(networks) => {
            let nets: Vec<IpNet> = networks
                .into_iter()
                .filter_map(|(address, bits)| IpNet::new(address, bits).ok())
                .collect();
            shared.guard.set_own(Addresses::of(&nets))
        }
        Err(error) => {
            // Each is asked for again before it is dialled.
            tracing::warn!(%error, "the addresses of this machine could not be read");
            false
        }
    }
}
