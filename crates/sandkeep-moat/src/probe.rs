//! Whether this host can have a moat at all.

use std::{collections::HashMap, fs::File, net::IpAddr, os::fd::OwnedFd, thread};

use rustix::thread::{UnshareFlags, unshare_unsafe};
use sandkeep_model::{Error, Result};
use tokio::sync::oneshot;

use crate::{
    edge::{self, Plan},
    policy::{AddressGuard, Policy},
};

/// What this host can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Able {
    /// The kernel tells of connections it refuses with their first packet. Without it they are
    /// refused all the same, but are not in the list of denials.
    pub tells_refusals: bool,
}

/// Makes an edge with every kind of rule in a namespace of its own and lets it go again; the error
/// says what is missing.
pub async fn probe() -> Result<Able> {
    let everything = serde_json::json!({
        "default": "open", "deny": ["192.0.2.0/24"], "allow": ["192.0.2.7:22", "a.test:443"]
    });
    let policy = Policy::from_json(&everything)?;
    let plan = Plan::of(&policy, &AddressGuard::default());
    let given = HashMap::from([(IpAddr::from([192, 0, 2, 9]), 1)]);
    let namespace = fresh_namespace().await?;
    let edge = edge::build(namespace, plan, given).await?;
    Ok(Able {
        tells_refusals: edge.refusals.is_some(),
    })
}

async fn fresh_namespace() -> Result<OwnedFd> {
    let (answer, wait) = oneshot::channel();
    let failed = |error: &dyn std::fmt::Display| {
        Error::host_not_ready(format!("no network namespace can be made: {error}"))
            .hint("the server needs CAP_SYS_ADMIN for the moat")
    };
    // The thread ends in the new namespace; no worker of the runtime is ever in it.
    thread::Builder::new()
        .name("moat-probe".to_owned())
        .stack_size(128 * 1024)
        .spawn(move || {
            // SAFETY: only the network namespace of this one thread changes; no descriptor
            // table or file system state is taken apart.
            let made = unsafe { unshare_unsafe(UnshareFlags::NEWNET) }
                .map_err(std::io::Error::from)
                .and_then(|()| File::open("/proc/thread-self/ns/net"));
            // A caller that went away has no use for the answer.
            drop(answer.send(made));
        })
        .map_err(|error| failed(&error))?;
    let made = wait
        .await
        .map_err(|_| Error::internal("the thread that looks at the host ended early"))?;
    made.map(OwnedFd::from).map_err(|error| failed(&error))
}
