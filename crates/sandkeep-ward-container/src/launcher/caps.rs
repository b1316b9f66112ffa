//! The capabilities root has in a box, as data.

use crate::failure::{Doing, Failure};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities,
};

/// What stays, each with its reason. All of them count only in the box's own user namespace.
///
/// Not here, on purpose: SYS_PTRACE (processes of one user can be traced without it, and
/// PID 1 can not be traced by anybody in the box), SYS_ADMIN, NET_ADMIN, MKNOD (device nodes
/// are refused in a user namespace anyway), DAC_READ_SEARCH, SYS_RESOURCE and the rest.
const KEPT: [(CapabilitySet, &str); 14] = [
    (CapabilitySet::CHOWN, "package managers, install"),
    (
        CapabilitySet::DAC_OVERRIDE,
        "root reads every file of its box",
    ),
    (
        CapabilitySet::FOWNER,
        "root changes modes of files of others",
    ),
    (
        CapabilitySet::FSETID,
        "keeps setuid bits when root changes a file",
    ),
    (
        CapabilitySet::KILL,
        "root ends processes of the box's users",
    ),
    (CapabilitySet::SETGID, "su, sudo, daemons that change user"),
    (CapabilitySet::SETUID, "su, sudo, daemons that change user"),
    (
        CapabilitySet::SETPCAP,
        "daemons that drop their own capabilities",
    ),
    (
        CapabilitySet::SETFCAP,
        "package managers put capabilities on files",
    ),
    (
        CapabilitySet::SYS_CHROOT,
        "chroot; the wall of the box is no chroot",
    ),
    (CapabilitySet::AUDIT_WRITE, "sudo and su ask for it"),
    (
        CapabilitySet::NET_BIND_SERVICE,
        "no power here (the network is the host's), but files marked with it must start",
    ),
    (
        CapabilitySet::NET_RAW,
        "no power here (the network is the host's), but ping is marked with it and must start",
    ),
    (
        CapabilitySet::SYS_NICE,
        "root changes the nice values of its own",
    ),
];

/// All of them.
pub fn kept() -> CapabilitySet {
    KEPT.iter()
        .fold(CapabilitySet::empty(), |all, (one, _)| all | *one)
}

/// Takes everything else out of the bounding set for ever.
///
/// The effective set is emptied too: exec gives root the bounding set again, but while it
/// looks at the agent's file root must not be able to read it. A program that can be run
/// but not read gets a process that can not be traced or looked into.
pub fn reduce() -> Result<(), Failure> {
    for number in 0..64 {
        let one = CapabilitySet::from_bits_retain(1 << number);
        if kept().contains(one) {
            continue;
        }
        match remove_capability_from_bounding_set(one) {
            // Past the last one this kernel knows.
            Err(rustix::io::Errno::INVAL) => break,
            other => other.doing("dropping capabilities")?,
        }
    }
    clear_ambient_capability_set().doing("clearing the ambient capabilities")?;
    set_capabilities(
        None,
        CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: kept(),
            inheritable: CapabilitySet::empty(),
        },
    )
    .doing("dropping capabilities")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_reaches_the_host_is_kept() {
        for never in [
            CapabilitySet::SYS_ADMIN,
            CapabilitySet::SYS_MODULE,
            CapabilitySet::SYS_PTRACE,
            CapabilitySet::SYS_RAWIO,
            CapabilitySet::DAC_READ_SEARCH,
            CapabilitySet::NET_ADMIN,
            CapabilitySet::SYS_BOOT,
            CapabilitySet::SYS_TIME,
            CapabilitySet::SYS_RESOURCE,
        ] {
            assert!(!kept().contains(never), "{never:?}");
        }
        assert!(KEPT.iter().all(|(_, why)| !why.is_empty()));
    }
}
