//! How often what came back stopped in the middle of a secret, and who may go on after that.
//!
//! A site that gives back what the box chose lets it guess: a guess that is right so far is cut off,
//! a wrong one is not. So right guesses are counted, and after a few the secret is not used for this
//! box any more. Guesses that are wrong can not be told from ordinary answers; there may be only so
//! many in a second.

use std::{
    collections::HashMap,
    fmt,
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use sandkeep_model::{SandboxId, Secret};

use super::{
    automaton::Owners,
    needles::{Needles, Sought},
};

/// Then the secret is suspended for the box.
pub const MOST_NEAR_MISSES: u32 = 3;
/// Between two ends of what came back that could be guesses, from all streams of a box.
const BETWEEN_GUESSES: Duration = Duration::from_millis(50);
/// So many may come at once after a rest.
const GUESSES_AT_ONCE: u32 = 20;
/// Boxes nothing happened to are forgotten when there are more.
const MANY: usize = 1024;

/// Of all boxes of a server, from its start on: longer than a box is attached.
#[derive(Debug, Default)]
pub struct Standings(Mutex<HashMap<SandboxId, Arc<Standing>>>);

impl Standings {
    pub fn of(&self, id: &SandboxId) -> Arc<Standing> {
        let mut all = lock(&self.0);
        if !all.contains_key(id) && all.len() >= MANY {
            all.retain(|_, own| Arc::strong_count(own) > 1 || !own.is_spotless());
        }
        Arc::clone(all.entry(id.clone()).or_default())
    }
}

/// Of one box.
#[derive(Default)]
pub struct Standing {
    secrets: Mutex<HashMap<String, Misses>>,
    /// When the next one could come if all came as early as they may.
    next: Mutex<Option<Instant>>,
    hasher: RandomState,
    /// What its connections look for, by the mark of the texts, as long as one of them does.
    sought: Mutex<HashMap<u64, Weak<Sought>>>,
}

struct Misses {
    /// Of which value: that of the last request. Only its mark, a hash with a key of this process.
    value: u64,
    count: u32,
    last: Option<Instant>,
}

impl fmt::Debug for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Standing")
    }
}

impl Standing {
    /// Whether this value may be used. What was counted for another value, or before somebody set
    /// what is bound to the box, is forgotten.
    pub fn admits(&self, name: &str, value: &Secret, set: Option<Instant>) -> bool {
        let mut secrets = lock(&self.secrets);
        let value = self.mark(value);
        let fresh = || Misses {
            value,
            count: 0,
            last: None,
        };
        let misses = secrets.entry(name.to_owned()).or_insert_with(fresh);
        if misses.value != value
            || misses
                .last
                .is_some_and(|last| set.is_some_and(|set| last < set))
        {
            *misses = fresh();
        }
        misses.count < MOST_NEAR_MISSES
    }

    /// How many there were with this one. What an answer to an earlier value tells is of no use any
    /// more.
    fn near_miss(&self, name: &str, value: u64) -> u32 {
        match lock(&self.secrets).get_mut(name) {
            Some(misses) if misses.value == value => {
                misses.count = misses.count.saturating_add(1);
                misses.last = Some(Instant::now());
                misses.count
            }
            _ => 1,
        }
    }

    pub fn mark(&self, value: &Secret) -> u64 {
        self.hasher.hash_one(value.expose())
    }

    /// Made once for all connections: it is some hundred kilobytes.
    pub fn sought(&self, needles: &Needles) -> Arc<Sought> {
        let mark = self.hasher.hash_one(needles);
        if let Some(shared) = lock(&self.sought).get(&mark).and_then(Weak::upgrade) {
            return shared;
        }
        let made = Arc::new(needles.sought());
        let mut all = lock(&self.sought);
        all.retain(|_, other| other.strong_count() > 0);
        all.insert(mark, Arc::downgrade(&made));
        made
    }

    fn is_suspended(&self, name: &str, value: u64) -> bool {
        lock(&self.secrets)
            .get(name)
            .is_some_and(|misses| misses.value == value && misses.count >= MOST_NEAR_MISSES)
    }

    fn is_spotless(&self) -> bool {
        lock(&self.secrets).values().all(|misses| misses.count == 0)
    }

    /// From when on the end of what came may be shown, if it could be a guess.
    pub fn turn(&self) -> Instant {
        let now = Instant::now();
        let mut next = lock(&self.next);
        let rested = now.checked_sub(BETWEEN_GUESSES * GUESSES_AT_ONCE);
        let earliest = rested.unwrap_or(now);
        let turn = next.map_or(earliest, |next| next.max(earliest)) + BETWEEN_GUESSES;
        *next = Some(turn);
        turn.max(now)
    }
}

/// The secrets one answer is searched for.
#[derive(Debug)]
pub struct Watched {
    pub standing: Arc<Standing>,
    /// By their numbers, and marks of their values.
    pub secrets: Vec<(String, u64)>,
}

impl Watched {
    pub fn is_suspended(&self) -> bool {
        (self.secrets.iter()).any(|(name, value)| self.standing.is_suspended(name, *value))
    }

    /// Counts it for all it may be of. Gives their names and counts.
    pub fn near_miss(&self, of: Owners) -> Vec<(&str, u32)> {
        (self.secrets.iter().enumerate())
            .filter(|(at, _)| of & (1 << (*at).min(63)) != 0)
            .map(|(_, (name, value))| (name.as_str(), self.standing.near_miss(name, *value)))
            .collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_misses_suspend_one_value_until_it_is_set_again() {
        let standings = Standings::default();
        let id = SandboxId::random();
        let (one, other) = (Secret::new("one value"), Secret::new("other value"));
        let watched = Watched {
            standing: standings.of(&id),
            secrets: vec![("key".to_owned(), standings.of(&id).mark(&one))],
        };
        for count in 1..=MOST_NEAR_MISSES {
            assert!(standings.of(&id).admits("key", &one, None));
            assert!(!watched.is_suspended());
            assert_eq!(watched.near_miss(1), [("key", count)]);
        }
        // Not after the connection either, nor for what was set before.
        let before = Instant::now().checked_sub(Duration::from_secs(1));
        assert!(watched.is_suspended());
        drop(watched);
        assert!(!standings.of(&id).admits("key", &one, before));
        assert!(standings.of(&id).admits("else", &one, None));
        assert!(standings.of(&SandboxId::random()).admits("key", &one, None));
        assert!(standings.of(&id).admits("key", &one, Some(Instant::now())));
        let mark = standings.of(&id).mark(&one);
        for _ in 0..MOST_NEAR_MISSES {
            standings.of(&id).near_miss("key", mark);
        }
        assert!(!standings.of(&id).admits("key", &one, None));
        assert!(standings.of(&id).admits("key", &other, None));
        // Streams of before do not count against it.
        for _ in 0..MOST_NEAR_MISSES {
            standings.of(&id).near_miss("key", mark);
        }
        assert!(standings.of(&id).admits("key", &other, None));
    }

    #[test]
    fn boxes_with_misses_are_not_forgotten_for_others() {
        let standings = Standings::default();
        let id = SandboxId::random();
        let value = Secret::new("one value");
        assert!(standings.of(&id).admits("key", &value, None));
        let mark = standings.of(&id).mark(&value);
        standings.of(&id).near_miss("key", mark);
        for _ in 0..2 * MANY {
            drop(standings.of(&SandboxId::random()));
        }
        assert!(!standings.of(&id).is_spotless());
        assert!(lock(&standings.0).len() <= MANY + 1);
    }

    #[test]
    fn connections_share_what_they_look_for_and_nothing_stays() {
        let standing = Standing::default();
        let needles = |value: &str| {
            let mut needles = Needles::default();
            needles.of(0);
            needles.add_value(value);
            needles
        };
        let one = standing.sought(&needles("first value"));
        let same = standing.sought(&needles("first value"));
        let other = standing.sought(&needles("other value"));
        assert!(Arc::ptr_eq(&one, &same) && !Arc::ptr_eq(&one, &other));
        drop((one, same));
        standing.sought(&needles("third value"));
        assert_eq!(lock(&standing.sought).len(), 2);
        assert!(
            standing
                .sought(&needles("third value"))
                .is_in([&b"a third value"[..]].into_iter())
        );
    }

    #[test]
    fn guesses_take_turns() {
        let standing = Standing::default();
        let start = Instant::now();
        let turns: Vec<_> = (0..GUESSES_AT_ONCE + 20).map(|_| standing.turn()).collect();
        assert!(turns.is_sorted());
        let last = turns.last().unwrap().duration_since(start);
        assert!(last >= BETWEEN_GUESSES * 19, "{last:?}");
    }
}
