//! Streams that are broken off before their end.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// An extension of requests: whoever answers marks it when the answer is broken off, and the
/// connection of the request is reset and not closed as if all were well.
#[derive(Debug, Clone, Default)]
pub struct Cut(Arc<AtomicBool>);

impl Cut {
    pub fn mark(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub fn is_marked(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
