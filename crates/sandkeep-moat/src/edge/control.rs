//! Our hand on the rules of one sandbox, as long as it is attached.

use std::{collections::HashMap, io, net::IpAddr};

use super::{
    netlink::NetlinkSocket,
    plan::{Kinds, Plan},
    rules::{self, Ground},
};

#[derive(Debug)]
pub struct Control {
    /// Of the sandbox's namespace.
    socket: NetlinkSocket,
    ground: Ground,
    plan: Plan,
    /// What the kernel has.
    given: HashMap<IpAddr, Kinds>,
}

impl Control {
    /// Writes the rules. Where the kernel cannot tell of what it refuses, it refuses all the same.
    pub fn take(
        socket: NetlinkSocket,
        mut ground: Ground,
        plan: Plan,
        given: HashMap<IpAddr, Kinds>,
    ) -> io::Result<Self> {
        let install = |ground| rules::all(ground, &plan, &given).send_on(&socket);
        match install(ground) {
            Err(_) if ground.told => {
                ground.told = false;
                install(ground)?;
            }
            done => done?,
        }
        Ok(Self {
            socket,
            ground,
            plan,
            given,
        })
    }

    pub const fn tells(&self) -> bool {
        self.ground.told
    }

    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Another policy, and what was given by its rules.
    pub fn replace(&mut self, plan: Plan, given: HashMap<IpAddr, Kinds>) -> io::Result<()> {
        if plan == self.plan && given == self.given {
            return Ok(());
        }
        rules::all(self.ground, &plan, &given).send_on(&self.socket)?;
        (self.plan, self.given) = (plan, given);
        Ok(())
    }

    /// Brings these addresses to their kinds. It is in the kernel when this returns.
    pub fn give(&mut self, wanted: &[(IpAddr, Kinds)]) -> io::Result<()> {
        let changes: Vec<(IpAddr, Kinds, Kinds)> = wanted
            .iter()
            .map(|(address, new)| (*address, self.known(*address), *new))
            .filter(|(_, old, new)| old != new)
            .collect();
        if changes.is_empty() || !self.plan.has_names() {
            return Ok(());
        }
        rules::change(&changes).send_on(&self.socket)?;
        for (address, _, new) in changes {
            match new {
                0 => self.given.remove(&address),
                new => self.given.insert(address, new),
            };
        }
        Ok(())
    }

    fn known(&self, address: IpAddr) -> Kinds {
        self.given.get(&address).copied().unwrap_or(0)
    }

    /// What the kernel was given, for those who look whether it still should be.
    pub fn given(&self) -> Vec<IpAddr> {
        self.given.keys().copied().collect()
    }
}
