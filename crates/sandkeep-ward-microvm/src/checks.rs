//! What this level needs of the host, each with what to do about it.

use crate::{
    kernel::Kernel,
    kvm, network,
    program::{self, OLDEST},
    qemu::{Accel, Qemu},
};
use sandkeep_host::{cgroup::layout::Layout, work::blocking};
use sandkeep_ward::Check;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

const ACCELERATION: &str = "acceleration";
const INSTALL_QEMU: &str = "install it: `apt install qemu-system-x86`, or elsewhere what has \
    qemu-system-x86_64; script/server does it on Debian";
const INSTALL_KERNEL: &str = "script/server fetches it on Debian (the package \
    linux-image-cloud-amd64, unpacked and not installed); see docs/microvm.md";

/// What is known about who runs machines.
#[derive(Debug)]
pub enum Runs {
    /// This one does, and why it is emulated if it is.
    Tried(Arc<Qemu>, Option<String>),
    Unknown,
}

/// For whoever has no server: what one would find. Nothing is booted.
pub async fn look(qemu: Option<&Path>, kernel: Option<&Path>) -> Vec<Check> {
    all(qemu, kernel, Runs::Unknown).await
}

pub async fn all(qemu: Option<&Path>, kernel: Option<&Path>, runs: Runs) -> Vec<Check> {
    let qemu = qemu.map(PathBuf::from);
    let (program, acceleration) = match runs {
        Runs::Tried(qemu, why) => (
            found(&qemu.program, &qemu.version),
            match why {
                None => Check::ok(ACCELERATION, "kvm: machines run on the processor itself"),
                Some(why) => emulated(&why),
            },
        ),
        Runs::Unknown => blocking(move || Ok(offered(qemu.as_deref())))
            .await
            .unwrap_or_else(|error| {
                let missing = Check::missing("qemu", error.message, INSTALL_QEMU);
                (missing, emulated("QEMU could not be looked at"))
            }),
    };
    vec![
        program,
        machine_kernel(kernel),
        acceleration,
        tun(),
        root(),
        cgroups(),
        sandkeep_own_kernel::cable(network::make()).await,
    ]
}

/// The program and the acceleration that a server would choose, as far as can be seen without a machine.
fn offered(given: Option<&Path>) -> (Check, Check) {
    const NAME: &str = "qemu";
    if std::env::consts::ARCH != "x86_64" {
        let missing = Check::missing(
            NAME,
            format!("machines of {} are not supported", std::env::consts::ARCH),
            "use another isolation level",
        );
        return (missing, emulated("this is no x86-64"));
    }
    let mut why = kvm::offered().err();
    if why.is_none() {
        let candidates = program::candidates(given, Accel::Kvm);
        match candidates.iter().find(|found| found.lacks.is_none()) {
            Some(good) => {
                let offered = Check::ok(
                    ACCELERATION,
                    "kvm is offered: the server boots a machine on it before it relies on it",
                );
                return (described(&good.program), offered);
            }
            None => why = candidates.into_iter().find_map(|found| found.lacks),
        }
    }
    let program = match program::best(program::candidates(given, Accel::Tcg)) {
        None => Check::missing(NAME, "not installed", INSTALL_QEMU),
        Some(found) => match found.lacks {
            None => described(&found.program),
            Some(lacks) => Check::missing(
                NAME,
                format!("{}: {lacks}", found.program.display()),
                format!("{INSTALL_QEMU}; {OLDEST} or newer, built with seccomp"),
            ),
        },
    };
    let why = why.unwrap_or_else(|| "QEMU is not installed".to_owned());
    (program, emulated(&why))
}

fn described(program: &Path) -> Check {
    match program::version(program) {
        Ok(version) => found(program, &version),
        Err(error) => Check::missing("qemu", error.message, INSTALL_QEMU),
    }
}

fn found(program: &Path, version: &str) -> Check {
    Check::ok("qemu", format!("{version} at {}", program.display()))
}

fn machine_kernel(given: Option<&Path>) -> Check {
    const NAME: &str = "kernel of machines";
    match Kernel::find(given) {
        Some(kernel) => Check::ok(NAME, kernel.image.display().to_string()),
        None => Check::missing(NAME, "not there", INSTALL_KERNEL),
    }
}

fn emulated(why: &str) -> Check {
    Check::warning(
        ACCELERATION,
        format!(
            "emulated ({why}): machines run 10 to 25 times slower than the host, and QEMU does not count \
             emulation as a security boundary; the jail of QEMU is what holds"
        ),
        "use a host with working KVM (a processor with vmx or svm, and the module kvm_intel or kvm_amd)",
    )
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
