//! What this level needs of the host, each with what to do about it.

use crate::{
    network,
    release::{self, Release},
};
use sandkeep_host::cgroup::layout::Layout;
use sandkeep_ward::Check;
use std::path::Path;

const INSTALL: &str = "install it: script/server builds the newest where Go is installed; else take \
    gVisor's own apt repository (docs/gvisor.md), or `apt install runsc` (on Debian 12 from bookworm-backports)";

const NEWER: &str = "take a newer one: script/server builds it where Go is installed; else gVisor's own apt \
    repository has it (docs/gvisor.md)";

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
    let Some(path) = release::find(given) else {
        return match given {
            Some(given) => Check::missing(
                NAME,
                format!("{} is not a file", given.display()),
                "correct the setting `runsc`, or leave it out",
            ),
            None => Check::missing(NAME, "not installed", INSTALL),
        };
    };
    let release = match Release::ask(path).await {
        Ok(release) => release,
        Err(error) => return Check::missing(NAME, error.message, INSTALL),
    };
    if let Err(error) = release.check_age() {
        return Check::missing(NAME, error.message, INSTALL);
    }
    let found = format!("{} at {}", release.version, release.program.display());
    match release.odd() {
        Some(odd) => Check::warning(NAME, format!("{found}: {odd}"), NEWER),
        None => Check::ok(NAME, found),
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
