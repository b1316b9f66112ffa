//! Connections that have not shown the key: they are let in, but not in the way of those who have.
//!
//! Anybody can open a connection and say nothing, or ask again and again for what needs no key.
//! Such connections may take most of the places; then the oldest that is at rest goes for each
//! new one. Where all of them are busy, new ones are on probation: they have few places of their own,
//! the oldest goes for each new one, and they are answered only if their first request shows the key.

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
    /// How many may be on probation at once.
    most_on_probation: usize,
    probation: Mutex<VecDeque<Arc<Visitor>>>,
}

/// One connection.
#[derive(Debug, Default)]
pub struct Visitor {
    known: AtomicBool,
    over: AtomicBool,
    /// Let in only to show the key.
    on_probation: bool,
    /// Requests that are not answered to their end.
    busy: AtomicUsize,
    pub cut: CancellationToken,
}

impl Visitor {
    pub fn begin(self: &Arc<Self>) -> Request {
        self.busy.fetch_add(1, Ordering::Relaxed);
        Request(Arc::clone(self))
    }

    /// Whether it is to be sent away without an answer, for it has not shown the key.
    pub fn is_not_answered(&self) -> bool {
        self.on_probation && !self.known.load(Ordering::Relaxed)
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
        if !self.visitor.known.swap(true, Ordering::Relaxed) && !self.visitor.on_probation {
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
            most_on_probation: (places / 8).max(1),
            probation: Mutex::default(),
        })
    }

    /// Lets one more in, on probation where they are too many and all of them are busy.
    pub fn enter(self: &Arc<Self>) -> Visit {
        if self.here.load(Ordering::Relaxed) >= self.most && !self.send_one_away() {
            return self.try_out();
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
        Visit {
            strangers: Arc::clone(self),
            visitor,
        }
    }

    /// Who has the key must be able to show it, whatever others do.
    fn try_out(self: &Arc<Self>) -> Visit {
        let visitor = Arc::new(Visitor {
            on_probation: true,
            ..Visitor::default()
        });
        let mut queue = self
            .probation
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        queue.retain(|one| one.counts());
        while queue.len() >= self.most_on_probation {
            if let Some(oldest) = queue.pop_front() {
                oldest.cut.cancel();
            }
        }
        queue.push_back(Arc::clone(&visitor));
        drop(queue);
        Visit {
            strangers: Arc::clone(self),
            visitor,
        }
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
        let visits: Vec<Visit> = (0..3).map(|_| strangers.enter()).collect();
        let cut = |at: usize| visits[at].visitor.cut.is_cancelled();
        let request = visits[0].visitor.begin();
        visits[1].is_known();
        let next = [strangers.enter(), strangers.enter()];
        assert_eq!([cut(0), cut(1), cut(2)], [false, false, true]);
        assert!(!next[0].visitor.cut.is_cancelled());
        drop(request);
        let _third = strangers.enter();
        assert!(!cut(1));
    }

    #[test]
    fn where_all_are_busy_new_ones_can_only_show_the_key() {
        let strangers = Strangers::among(16);
        let visits: Vec<Visit> = (0..12).map(|_| strangers.enter()).collect();
        let requests: Vec<Request> = visits.iter().map(|visit| visit.visitor.begin()).collect();
        assert!(visits.iter().all(|visit| !visit.visitor.is_not_answered()));
        let [first, second] = [strangers.enter(), strangers.enter()];
        assert!(first.visitor.is_not_answered() && second.visitor.is_not_answered());
        first.is_known();
        assert!(!first.visitor.is_not_answered());
        // Who has shown it stays; the oldest of the others goes for a new one.
        let [third, _fourth] = [strangers.enter(), strangers.enter()];
        assert!(!first.visitor.cut.is_cancelled());
        assert!(second.visitor.cut.is_cancelled() && !third.visitor.cut.is_cancelled());
        drop(requests);
        assert!(!strangers.enter().visitor.is_not_answered());
        drop((visits, first, second, third));
        assert_eq!(strangers.here.load(Ordering::Relaxed), 0);
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
