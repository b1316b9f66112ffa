//! Watchers that are asked for their events.

use super::{Source, readiness, ready};
use crate::fs::run_blocking;
use rustix::rand::{GetRandomFlags, getrandom};
use sandkeep_agent_api::ConnectError;
use sandkeep_agent_api::filesystem::{FilesystemEvent, WatcherEventsResponse};
use std::collections::{HashMap, VecDeque};
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

/// Watchers of each kind at once.
const MAX_WATCHERS: usize = 256;
/// Events kept for a watcher nobody asks; the oldest go first.
const MAX_EVENTS: usize = 10_000;
/// How often the kernel is asked again while it says that it has more.
const MAX_ROUNDS: usize = 8;
/// One not asked for so long makes room for a new one when all places are
/// taken: its owner has most likely gone.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// All polled watchers, and a count of the streaming ones.
#[derive(Debug)]
pub(crate) struct Watchers {
    polled: Mutex<HashMap<String, Polled>>,
    streams: Arc<Semaphore>,
}

impl Default for Watchers {
    fn default() -> Self {
        Self {
            polled: Mutex::default(),
            streams: Arc::new(Semaphore::new(MAX_WATCHERS)),
        }
    }
}

/// One watcher: what it saw, and the task that keeps the kernel's queue short.
#[derive(Debug)]
struct Polled {
    queue: Arc<Mutex<Queue>>,
    task: AbortHandle,
    asked: Instant,
}

impl Drop for Polled {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Debug)]
struct Queue {
    source: Source,
    events: VecDeque<FilesystemEvent>,
}

impl Queue {
    /// Takes over what the kernel has; says whether it has more. Blocks, but
    /// not for as long as somebody keeps on writing.
    fn fill(&mut self) -> bool {
        for _ in 0..MAX_ROUNDS {
            let (events, more) = self.source.drain();
            for event in events {
                push(&mut self.events, event);
            }
            if !more {
                return false;
            }
        }
        true
    }
}

/// Adds an event, unless it only repeats the one before.
fn push(events: &mut VecDeque<FilesystemEvent>, event: FilesystemEvent) {
    if let Some(last) = events.back_mut()
        && last.name == event.name
        && last.event_type == event.event_type
    {
        *last = event;
        return;
    }
    if events.len() == MAX_EVENTS {
        events.pop_front();
    }
    events.push_back(event);
}

impl Watchers {
    /// Takes a watcher in; gives its id.
    pub(super) fn add(&self, source: Source) -> Result<String, ConnectError> {
        let id = random_id()?;
        let mut polled = self.lock();
        if polled.len() >= MAX_WATCHERS {
            let oldest = polled.iter().min_by_key(|(_, watcher)| watcher.asked);
            let forgotten = oldest
                .filter(|(_, watcher)| watcher.asked.elapsed() > FORGOTTEN)
                .map(|(id, _)| id.clone())
                .ok_or_else(too_many)?;
            polled.remove(&forgotten);
        }
        let fd = readiness(source.watch.fd())?;
        let queue = Arc::new(Mutex::new(Queue {
            source,
            events: VecDeque::new(),
        }));
        let filled = Arc::clone(&queue);
        let task = tokio::spawn(async move {
            while ready(&fd).await.is_ok() {
                loop {
                    let queue = Arc::clone(&filled);
                    match run_blocking(move || lock(&queue).fill()).await {
                        Ok(true) => {}
                        Ok(false) => break,
                        Err(_) => return,
                    }
                }
            }
        });
        polled.insert(
            id.clone(),
            Polled {
                queue,
                task: task.abort_handle(),
                asked: Instant::now(),
            },
        );
        Ok(id)
    }

    /// Everything a watcher saw until this very moment.
    pub(crate) async fn events(&self, id: &str) -> Result<WatcherEventsResponse, ConnectError> {
        let queue = {
            let mut polled = self.lock();
            let watcher = polled.get_mut(id).ok_or_else(|| {
                ConnectError::not_found(format!("watcher with id {id} not found"))
            })?;
            watcher.asked = Instant::now();
            Arc::clone(&watcher.queue)
        };
        let events = run_blocking(move || {
            let mut queue = lock(&queue);
            // The kernel queues an event before the call that caused it
            // returns, so this sees all that the caller knows of.
            queue.fill();
            std::mem::take(&mut queue.events)
        })
        .await?;
        Ok(WatcherEventsResponse {
            events: events.into(),
        })
    }

    /// Ends a watcher; one that is not there is ended already.
    pub(crate) fn remove(&self, id: &str) {
        self.lock().remove(id);
    }

    /// A place for one streaming watch.
    pub(super) fn reserve_stream(&self) -> Result<OwnedSemaphorePermit, ConnectError> {
        Arc::clone(&self.streams)
            .try_acquire_owned()
            .map_err(|_| too_many())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Polled>> {
        lock(&self.polled)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn too_many() -> ConnectError {
    ConnectError::resource_exhausted(format!(
        "{MAX_WATCHERS} watchers are open already: remove some first"
    ))
}

fn random_id() -> Result<String, ConnectError> {
    let mut bytes = [0; 10];
    getrandom(&mut bytes, GetRandomFlags::empty())
        .map_err(|error| ConnectError::internal(format!("no random numbers: {error}")))?;
    Ok(bytes.iter().fold(String::from("w"), |mut id, byte| {
        // Writing into a string does not fail.
        let _ = write!(id, "{byte:02x}");
        id
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandkeep_agent_api::filesystem::EventType;

    fn event(name: &str, event_type: EventType) -> FilesystemEvent {
        FilesystemEvent {
            name: name.into(),
            event_type,
            entry: None,
        }
    }

    #[test]
    fn repeats_are_one_event_and_the_oldest_go_first() {
        let mut events = VecDeque::new();
        for _ in 0..3 {
            push(&mut events, event("a", EventType::Write));
        }
        push(&mut events, event("a", EventType::Chmod));
        push(&mut events, event("a", EventType::Write));
        assert_eq!(events.len(), 3);
        for number in 0..MAX_EVENTS {
            push(&mut events, event(&number.to_string(), EventType::Create));
        }
        assert_eq!(events.len(), MAX_EVENTS);
        assert_eq!(events[0].name, "0");
    }
}
