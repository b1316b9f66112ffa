//! What `--self-test` takes away from a throw-away sandbox.
//!
//! None of it is a mode of the server: the server that verify starts is the same program with the
//! same settings. A sandbox is weakened either by an ordinary wish (a policy or limits that the
//! attack can live with, a secret given to it openly) or from outside, with what root of the host
//! can do to any process: the probe is started by verify itself, in the sandbox's namespaces but
//! without part of what surrounds a program there (see `enter`), or something of the host is
//! mounted into it.

use serde::Serialize;
use std::fmt;

use crate::check::Level;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Weakness {
    /// The probe runs without the seccomp filter, with the capabilities of the sandbox.
    SeccompOff,
    /// Without the filter, and with every capability in the sandbox's user namespace.
    AllCapabilities,
    /// As root of the host itself, outside of the sandbox's user namespace: "privileged".
    HostRoot,
    /// In the network of the server instead of its own: nothing stands before the outside.
    OpenMoat,
    /// Outside of the sandbox's cgroups.
    NoCgroup,
    /// A directory of the host, with a socket in it, is mounted into the sandbox.
    HostMount,
    /// The host's /proc is mounted into the sandbox.
    HostProc,
    /// A device node is the same inode in two sandboxes.
    SharedNode,
    /// A terminal file system without a limit is mounted into the sandbox.
    FreeTerminals,
    /// The pool is mounted again, without `nosuid`.
    SuidPool,
    /// The limits are far above what the check holds the sandbox to.
    LimitsLifted,
    /// The policy allows everything outside.
    OpenPolicy,
    /// The value of the secret is in the sandbox's environment.
    SecretInside,
    /// The secret is sent by the program in the sandbox, and no edge looks at answers.
    NoEdge,
    /// The sandbox under attack is the attacker's own: what must be kept apart is not.
    SameSandbox,
    /// The attack's own trace is left on the host by verify, as a broken host would have it.
    Planted,
}

impl Weakness {
    pub const fn words(self) -> &'static str {
        match self {
            Self::SeccompOff => "no seccomp filter",
            Self::AllCapabilities => "every capability of its user namespace",
            Self::HostRoot => "root of the host",
            Self::OpenMoat => "the network of the server",
            Self::NoCgroup => "outside of its cgroups",
            Self::HostMount => "a directory of the host mounted in",
            Self::HostProc => "the host's /proc mounted in",
            Self::SharedNode => "a device node shared by two sandboxes",
            Self::FreeTerminals => "terminals without a limit",
            Self::SuidPool => "the pool mounted without nosuid",
            Self::LimitsLifted => "limits far above the attack",
            Self::OpenPolicy => "a policy that allows everything",
            Self::SecretInside => "the secret in its environment",
            Self::NoEdge => "the secret sent without the edge",
            Self::SameSandbox => "the victim is the attacker's own sandbox",
            Self::Planted => "the trace of the attack left on the host",
        }
    }

    /// Whether it can be done to a sandbox of this level. Into an own kernel nobody can reach
    /// from outside.
    pub const fn possible(self, level: Level) -> bool {
        match self {
            Self::SeccompOff
            | Self::AllCapabilities
            | Self::HostRoot
            | Self::OpenMoat
            | Self::NoCgroup
            | Self::HostMount
            | Self::HostProc
            | Self::SharedNode
            | Self::FreeTerminals => !level.own_kernel(),
            _ => true,
        }
    }

    /// The probe is started by verify in the sandbox, instead of by the sandbox's agent.
    pub const fn enters(self) -> bool {
        matches!(
            self,
            Self::SeccompOff
                | Self::AllCapabilities
                | Self::HostRoot
                | Self::OpenMoat
                | Self::NoCgroup
        )
    }
}

impl fmt::Display for Weakness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}
