//! Boxes that are being made.

use crate::work::lock;
use sandkeep_model::{Error, Result, SandboxId};
use std::{collections::HashSet, sync::Mutex};

/// Nobody may sweep these away, or start them a second time.
#[derive(Debug, Default)]
pub struct Starting(Mutex<HashSet<SandboxId>>);

/// One of them, until it is dropped.
#[derive(Debug)]
pub struct Begun<'a> {
    starting: &'a Starting,
    id: SandboxId,
}

impl Starting {
    /// Refused when it is being made already, or `there`.
    pub fn begin(&self, id: &SandboxId, there: bool) -> Result<Begun<'_>> {
        if there || !lock(&self.0).insert(id.clone()) {
            return Err(Error::conflict(format!("box {id} is there already"))
                .hint("end it first, or use another id"));
        }
        Ok(Begun {
            starting: self,
            id: id.clone(),
        })
    }

    pub fn contains(&self, id: &SandboxId) -> bool {
        lock(&self.0).contains(id)
    }

    pub fn names(&self) -> Vec<String> {
        lock(&self.0).iter().map(ToString::to_string).collect()
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        lock(&self.starting.0).remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_is_not_begun_twice() {
        let (starting, id) = (Starting::default(), SandboxId::random());
        assert!(starting.begin(&id, true).is_err());
        let begun = starting.begin(&id, false).unwrap();
        assert!(starting.contains(&id));
        assert!(starting.begin(&id, false).is_err());
        drop(begun);
        assert!(starting.names().is_empty());
        starting.begin(&id, false).unwrap();
    }
}
