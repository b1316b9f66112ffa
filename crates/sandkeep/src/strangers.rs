//! Connections that have not shown the key: they are let in, but not in the way of those who have.
//!
//! Anybody can open a connection and say nothing, or ask again and again for what needs no key.
//! Such connections may take most of the places; then the oldest that is at rest goes for each
//! new one.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tokio_util::sync::CancellationToken;

/// How many are looked at to find one at rest.
const LOOKED_AT: usize = 64;

#[derive(Debug)]
pub struct Strangers {
    most: usize,
    here: AtomicUsize,
    /// Oldest first. Those that have ended or are known now are taken out when they are met.
    queue: Mutex<VecDeque<Arc<Visitor>>>,
}

/// One connection.
#[derive(Debug, Default)]
pub struct Visitor {
    known: AtomicBool,
    over: AtomicBool,
    /// Requests that are not answered to their end.
    busy: AtomicUsize,
    pub cut: CancellationToken,
}

impl Visitor {
    pub fn begin(self: &Arc<Self>) -> Request {
        self.busy.fetch_add(1, Ordering::Relaxed);
        Request(Arc::clone(self))
    }

    fn counts(&self) -> bool {
        !self.known.load(Ordering::Relaxed) && !self.over.load(Ordering::Relaxed)
    }
}

/// A request under way; it ends when dropped.
#[derive(Debug)]
pub struct Request(Arc<Visitor>);

impl Drop for Request {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection that is here; it is gone when dropped.
#[derive(Debug)]
pub struct Visit {
    strangers: Arc<Strangers>,
    pub visitor: Arc<Visitor>,
}

impl Visit {
    /// It has shown the key.
    pub fn is_known(&self) {
        if !self.visitor.known.swap(true, Ordering::Relaxed) {
            self.strangers.here.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.visitor.over.store(true, Ordering::Relaxed);
        self.is_known();
    }
}

impl Strangers {
    /// A quarter of the places is for those who are known.
    pub fn among(places: usize) -> Arc<Self> {
        Arc::new(Self {
            most: (places - places / 4).max(1),
            here: AtomicUsize::new(0),
            queue: Mutex::default(),
        })
    }

    /// Lets one more in. `None`: they are too many, and all of them are busy.
    pub fn enter(self: &Arc<Self>) -> Option<Visit> {
        if self.here.load(Ordering::Relaxed) >= self.most && !self.send_one_away() {
            return None;
        }
        let visitor = Arc::new(Visitor::default());
        self.here.fetch_add(1, Ordering::Relaxed);
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        // Those who are gone or known are not kept in mind for ever.
        for _ in 0..2 {
            if queue.front().is_some_and(|oldest| !oldest.counts()) {
                queue.pop_front();
            }
        }
        queue.push_back(Arc::clone(&visitor));
        drop(queue);
        Some(Visit {
            strangers: Arc::clone(self),
            visitor,
        })
    }

    fn send_one_away(&self) -> bool {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..LOOKED_AT.min(queue.len()) {
            let Some(oldest) = queue.pop_front() else {
                break;
            };
            if !oldest.counts() {
                continue;
            }
            if oldest.busy.load(Ordering::Relaxed) == 0 {
                oldest.cut.cancel();
                return true;
            }
            queue.push_back(oldest);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_at_rest_goes_and_who_is_known_or_busy_stays() {
        let strangers = Strangers::among(4);
        let visits: Vec<Visit> = (0..3).filter_map(|_| strangers.enter()).collect();
        let cut = |at: usize| visits[at].visitor.cut.is_cancelled();
        let request = visits[0].visitor.begin();
        visits[1].is_known();
        let next = [strangers.enter().unwrap(), strangers.enter().unwrap()];
        assert_eq!([cut(0), cut(1), cut(2)], [false, false, true]);
        assert!(!next[0].visitor.cut.is_cancelled());
        drop(request);
        let _third = strangers.enter().unwrap();
        assert!(!cut(1));
    }

    #[test]
    fn where_all_are_busy_no_more_are_let_in() {
        let strangers = Strangers::among(4);
        let visits: Vec<Visit> = (0..3).filter_map(|_| strangers.enter()).collect();
        let requests: Vec<Request> = visits.iter().map(|visit| visit.visitor.begin()).collect();
        assert!(strangers.enter().is_none());
        drop(requests);
        assert!(strangers.enter().is_some());
        drop(visits);
    }

    #[test]
    fn nothing_is_kept_of_those_who_are_gone() {
        let strangers = Strangers::among(100);
        for _ in 0..10_000 {
            drop(strangers.enter());
        }
        assert_eq!(strangers.here.load(Ordering::Relaxed), 0);
        assert!(strangers.queue.lock().unwrap().len() < 4);
    }
}
