//! Wake-ups that failed. Whoever waited for one is answered as the one who tried it was: to
//! try again for each of them would let the last wait as many times as long.

use std::sync::Mutex;

use sandkeep_model::Error;

use crate::sync::lock;

#[derive(Debug, Default)]
pub struct FailedWakes(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    count: u64,
    /// The last one, and whether it was tried with memory.
    last: Option<(Error, bool)>,
}

/// When somebody came.
#[derive(Debug, Clone, Copy)]
pub struct Came(u64);

impl FailedWakes {
    /// For whoever is about to wait.
    pub fn came(&self) -> Came {
        Came(lock(&self.0).count)
    }

    pub fn tell(&self, error: &Error, memory: bool) {
        let mut told = lock(&self.0);
        told.count += 1;
        told.last = Some((error.clone(), memory));
    }

    /// What the same wake-up came to since then, if it failed. One without memory may work
    /// where one with memory does not.
    pub fn since(&self, came: Came, memory: bool) -> Option<Error> {
        let told = lock(&self.0);
        let (error, tried) = told.last.as_ref()?;
        (told.count > came.0 && *tried == memory).then(|| error.clone())
    }
}
