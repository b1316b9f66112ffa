//! What this level needs of the host, each with what to do about it.

use crate::{
    kernel::Kernel,
    network,
    qemu::{self, Accel},
};
use sandkeep_host::{cgroup::layout::Layout, work::blocking};
use sandkeep_ward::Check;
use std::path::{Path, PathBuf};

const INSTALL_QEMU: &str = "install it: `apt install qemu-system-x86`, or elsewhere what has \
    qemu-system-x86_64; script/server does it on Debian";
const INSTALL_KERNEL: &str = "script/server fetches it on Debian (the package \
    linux-image-cloud-amd64, unpacked and not installed); see docs/microvm.md";

/// Whether a machine was really run by what is said to run machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    Tried,
    /// Only looked at: a host may offer a KVM that runs nothing.
    Offered,
}

pub async fn all(
    qemu: Option<&Path>,
    kernel: Option<&Path>,
    accel: Accel,
    proof: Proof,
) -> Vec<Check> {
    let qemu = qemu.map(PathBuf::from);
    let program = blocking(move || Ok(program(qemu.as_deref(), accel)))
        .await
        .unwrap_or_else(|error| Check::missing("qemu", error.message, INSTALL_QEMU));
    vec![
        program,
        machine_kernel(kernel),
        acceleration(accel, proof),
        tun(),
        root(),
        cgroups(),
        sandkeep_own_kernel::cable(network::make()).await,
    ]
}

fn program(given: Option<&Path>, accel: Accel) -> Check {
    const NAME: &str = "qemu";
    if std::env::consts::ARCH != "x86_64" {
        return Check::missing(
            NAME,
            format!("machines of {} are not supported", std::env::consts::ARCH),
            "use another isolation level",
        );
    }
    let Some(path) = qemu::find(given, accel) else {
        return Check::missing(NAME, "not installed", INSTALL_QEMU);
    };
    match qemu::version(&path) {
        Ok(version) if qemu::major(&version).is_some_and(|major| major >= qemu::OLDEST) => {
            Check::ok(NAME, format!("{version} at {}", path.display()))
        }
        Ok(version) => Check::missing(
            NAME,
            format!("{version} is too old, {} or newer is needed", qemu::OLDEST),
            INSTALL_QEMU,
        ),
        Err(error) => Check::missing(NAME, error.message, INSTALL_QEMU),
    }
}

fn machine_kernel(given: Option<&Path>) -> Check {
    const NAME: &str = "kernel of machines";
    match Kernel::find(given) {
        Some(kernel) => Check::ok(NAME, kernel.image.display().to_string()),
        None => Check::missing(NAME, "not there", INSTALL_KERNEL),
    }
}

fn acceleration(accel: Accel, proof: Proof) -> Check {
    const NAME: &str = "acceleration";
    match accel {
        Accel::Kvm if proof == Proof::Offered => Check::ok(
            NAME,
            "kvm is offered: the server boots a machine on it before it relies on it",
        ),
        Accel::Kvm => Check::ok(NAME, "kvm: machines run on the processor itself"),
        Accel::Tcg => Check::warning(
            NAME,
            "emulated: machines run 10 to 25 times slower than the host, and QEMU does not count \
             emulation as a security boundary; the jail of QEMU is what holds",
            "use a host with working KVM (a processor with vmx or svm, and /dev/kvm)",
        ),
    }
}

fn tun() -> Check {
    const NAME: &str = "tun";
    if Path::new("/dev/net/tun").exists() {
        return Check::ok(NAME, "/dev/net/tun");
    }
    Check::missing(NAME, "there is no /dev/net/tun", "modprobe tun")
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
