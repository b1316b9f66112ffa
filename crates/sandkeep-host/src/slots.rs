//! Which range of host ids belongs to which box.
//!
//! Two boxes that run at the same time never share a range: a process that got out of one
//! box would still be nobody in the other.

use crate::{files::box_dirs, work::lock};
use sandkeep_model::{Code, Error, Result, SandboxId};
use std::{
    collections::{BTreeSet, HashMap},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

pub const IDS_PER_BOX: u32 = 65_536;

#[derive(Debug)]
pub struct Slots {
    base: u32,
    count: u32,
    taken: Mutex<BTreeSet<u32>>,
}

/// A range held by one box; given back when dropped.
#[derive(Debug)]
pub struct Slot {
    number: u32,
    slots: Arc<Slots>,
}

impl Slots {
    pub fn new(base: u32, count: u32) -> Result<Arc<Self>> {
        let end = u64::from(base) + u64::from(count) * u64::from(IDS_PER_BOX);
        // Ids above 2^31 break `ping_group_range` and many programs.
        if base < IDS_PER_BOX || count == 0 || end > 1 << 31 {
            return Err(Error::invalid(
                "id_base",
                format!("{count} ranges of host ids from {base} do not fit between 65536 and 2^31"),
            )
            .hint("leave id_base and id_slots at their defaults"));
        }
        Ok(Arc::new(Self {
            base,
            count,
            taken: Mutex::new(BTreeSet::new()),
        }))
    }

    fn taken(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lowest free range.
    pub fn take(self: &Arc<Self>) -> Result<Slot> {
        let mut taken = self.taken();
        let number = (0..self.count)
            .find(|number| !taken.contains(number))
            .ok_or_else(|| {
                Error::new(
                    Code::ResourceExhausted,
                    format!("all {} ranges of user ids are in use", self.count),
                )
                .hint("end boxes that are not needed, or raise id_slots")
            })?;
        taken.insert(number);
        drop(taken);
        Ok(Slot {
            number,
            slots: Arc::clone(self),
        })
    }

    /// Takes one range that a box already has; `None` when somebody else holds it.
    pub fn reclaim(self: &Arc<Self>, number: u32) -> Option<Slot> {
        (number < self.count && self.taken().insert(number)).then(|| Slot {
            number,
            slots: Arc::clone(self),
        })
    }
}

impl Slot {
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// The host id that is root in the box.
    pub fn first_id(&self) -> u32 {
        self.slots.base + self.number * IDS_PER_BOX
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.taken().remove(&self.number);
    }
}

/// The ranges of boxes that an earlier server left, until they are adopted or cleared away.
#[derive(Debug)]
pub struct Reserved {
    slots: Arc<Slots>,
    left: Mutex<HashMap<SandboxId, Slot>>,
}

impl Reserved {
    /// Those of all boxes that have a directory here; `number` reads what one has noted.
    pub fn of(state_dir: &Path, slots: &Arc<Slots>, number: impl Fn(&Path) -> Option<u32>) -> Self {
        let left = box_dirs(state_dir)
            .into_iter()
            .filter_map(|(id, directory)| Some((id, slots.reclaim(number(&directory)?)?)))
            .collect();
        Self {
            slots: Arc::clone(slots),
            left: Mutex::new(left),
        }
    }

    /// The range of a box that is adopted. One that somebody else holds is no reason to lose a box.
    pub fn hand_over(&self, id: &SandboxId, number: u32) -> Option<Slot> {
        let slot = lock(&self.left)
            .remove(id)
            .filter(|slot| slot.number() == number)
            .or_else(|| self.slots.reclaim(number));
        if slot.is_none() {
            tracing::warn!(%id, slot = number, "the ids of the box are held twice");
        }
        slot
    }

    /// Of a box that was cleared away.
    pub fn give_back(&self, id: &SandboxId) {
        lock(&self.left).remove(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_boxes_that_were_left_are_kept_for_them() {
        let state = tempfile::tempdir().unwrap();
        let ids = [0, 1].map(|_| SandboxId::random());
        for (number, id) in ids.iter().enumerate() {
            let directory = state.path().join(id.as_str());
            std::fs::create_dir(&directory).unwrap();
            std::fs::write(directory.join("slot"), number.to_string()).unwrap();
        }
        let slots = Slots::new(1_000_000, 3).unwrap();
        let reserved = Reserved::of(state.path(), &slots, |directory| {
            let text = std::fs::read_to_string(directory.join("slot")).ok()?;
            text.parse().ok()
        });
        let fresh = slots.take().unwrap();
        assert_eq!(fresh.number(), 2);
        let slot = reserved.hand_over(&ids[0], 0).unwrap();
        assert_eq!(slot.number(), 0);
        assert!(reserved.hand_over(&ids[0], 0).is_none(), "held already");
        reserved.give_back(&ids[1]);
        assert_eq!(slots.take().unwrap().number(), 1);
    }

    #[test]
    fn ranges_never_overlap_and_come_back() {
        let slots = Slots::new(1_000_000, 3).unwrap();
        let (a, b, c) = (
            slots.take().unwrap(),
            slots.take().unwrap(),
            slots.take().unwrap(),
        );
        assert_eq!(
            [a.first_id(), b.first_id(), c.first_id()],
            [1_000_000, 1_065_536, 1_131_072]
        );
        assert_eq!(slots.take().unwrap_err().code, Code::ResourceExhausted);
        drop(b);
        assert_eq!(slots.take().unwrap().number(), 1);
    }

    #[test]
    fn a_range_found_again_is_not_given_out() {
        let slots = Slots::new(1_000_000, 3).unwrap();
        let held = slots.reclaim(0).unwrap();
        assert!(slots.reclaim(0).is_none());
        assert!(slots.reclaim(3).is_none());
        assert_eq!(slots.take().unwrap().number(), 1);
        drop(held);
    }

    #[test]
    fn ranges_that_reach_host_users_or_overflow_are_refused() {
        assert!(Slots::new(0, 10).is_err());
        assert!(Slots::new(0x7000_0000, 5000).is_err());
        assert!(Slots::new(u32::MAX, 1).is_err());
    }
}
