//! What this level needs of the host, each with what to do about it.

use crate::{network, runsc};
use sandkeep_host::cgroup::layout::Layout;
use sandkeep_ward::Check;
use std::path::Path;

const INSTALL: &str = "install it: on Debian 13 and newer `apt install runsc`, on Debian 12 the same \
    from bookworm-backports, elsewhere as gvisor.dev says; script/server does it on Debian";

pub async fn all(given: Option<&Path>) -> Vec<Check> {
    vec![
        program(given).await,
        root(),
        cgroups(),
        sandkeep_own_kernel::cable(network::make()).await,
    ]
}

async fn program(given: Option<&Path>) -> Check {
    const NAME: &str = "runsc";
    let Some(path) = runsc::find(given) else {
        return Check::missing(NAME, "not installed", INSTALL);
    };
    let version = match runsc::version(&path).await {
        Ok(version) => version,
        Err(error) => return Check::missing(NAME, error.message, INSTALL),
    };
    match runsc::date(&version) {
        Some(date) if date >= runsc::OLDEST => {
            Check::ok(NAME, format!("{version} at {}", path.display()))
        }
        Some(_) => Check::missing(
            NAME,
            format!("{version} is too old, {} or newer is needed", runsc::OLDEST),
            INSTALL,
        ),
        None => Check::missing(
            NAME,
            format!("the version {version:?} can not be read"),
            INSTALL,
        ),
    }
}

fn root() -> Check {
    const NAME: &str = "root";
    if rustix::process::geteuid().is_root() {
        return Check::ok(NAME, "the server runs as root");
    }
    Check::missing(
        NAME,
        "the server does not run as root",
        "run it as root or with sudo",
    )
}

fn cgroups() -> Check {
    const NAME: &str = "cgroups";
    match Layout::of_this_host().and_then(|layout| layout.kind()) {
        Ok(_) => Check::ok(NAME, "cpu, memory and pids"),
        Err(error) => Check::missing(NAME, error.message, error.hint.unwrap_or_default()),
    }
}
