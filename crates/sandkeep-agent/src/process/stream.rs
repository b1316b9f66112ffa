//! From one process to its readers.
//!
//! Every reader has a short queue, so memory is bounded. A full queue holds the process back, as
//! a full pipe would: output is never lost while its reader is attached. But one reader must not
//! hold back the others for ever, so with several of them the one that takes nothing for
//! [`PATIENCE`] is cut off. Without readers output is thrown away.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc::{self, error::SendTimeoutError, error::TrySendError};

const QUEUED_FRAMES: usize = 8;
/// How long a reader may hold back others.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a reader gets; frames are encoded once for all of them.
#[derive(Debug, Clone)]
pub(super) enum Item {
    Data(Bytes),
    End(Bytes),
}

/// The readers of a process.
#[derive(Debug, Default)]
pub(super) struct Fan(Mutex<Readers>);

#[derive(Debug, Default)]
struct Readers {
    next_id: u64,
    attached: Vec<Reader>,
    end: Option<Bytes>,
}

#[derive(Debug, Clone)]
struct Reader {
    id: u64,
    queue: mpsc::Sender<Item>,
}

impl Fan {
    /// Attaches a reader: it sees what comes from now on, or only the end if that has come.
    /// A queue that closes without an end means the reader was cut off.
    pub(super) fn attach(&self) -> mpsc::Receiver<Item> {
        let (queue, receiver) = mpsc::channel(QUEUED_FRAMES);
        let mut readers = self.readers();
        if let Some(end) = &readers.end {
            // The queue is new, so there is room.
            let _ = queue.try_send(Item::End(end.clone()));
        } else {
            readers.next_id += 1;
            let id = readers.next_id;
            readers.attached.push(Reader { id, queue });
        }
        receiver
    }

    pub(super) fn has_readers(&self) -> bool {
        self.readers()
            .attached
            .iter()
            .any(|reader| !reader.queue.is_closed())
    }

    /// Gives output to every reader, waiting for those that are behind.
    pub(super) async fn publish(&self, frame: Bytes) {
        let readers = self.readers().attached.clone();
        self.deliver(readers, &Item::Data(frame)).await;
    }

    /// Remembers the end for readers to come. Those attached get it from the returned delivery.
    pub(super) fn finish(&self, end: Bytes) -> impl Future<Output = ()> + '_ {
        let attached = {
            let mut readers = self.readers();
            readers.end = Some(end.clone());
            readers.attached.clone()
        };
        async move {
            self.deliver(attached, &Item::End(end)).await;
            self.readers().attached.clear();
        }
    }

    async fn deliver(&self, readers: Vec<Reader>, item: &Item) {
        let mut behind = Vec::new();
        for reader in readers {
            match reader.queue.try_send(item.clone()) {
                Ok(()) => {}
                Err(TrySendError::Full(_)) => behind.push(reader),
                Err(TrySendError::Closed(_)) => self.detach(reader.id),
            }
        }
        for reader in behind {
            self.wait_for(&reader, item).await;
        }
    }

    async fn wait_for(&self, reader: &Reader, item: &Item) {
        loop {
            match reader.queue.send_timeout(item.clone(), PATIENCE).await {
                Ok(()) => return,
                Err(SendTimeoutError::Closed(_)) => return self.detach(reader.id),
                // A lone reader harms nobody; ask again whether it still is alone.
                Err(SendTimeoutError::Timeout(_)) if self.is_alone(reader.id) => {}
                Err(SendTimeoutError::Timeout(_)) => return self.detach(reader.id),
            }
        }
    }

    fn is_alone(&self, id: u64) -> bool {
        !self
            .readers()
            .attached
            .iter()
            .any(|other| other.id != id && !other.queue.is_closed())
    }

    fn detach(&self, id: u64) {
        self.readers().attached.retain(|reader| reader.id != id);
    }

    fn readers(&self) -> MutexGuard<'_, Readers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap()
    }

    fn frame(number: u8) -> Bytes {
        Bytes::copy_from_slice(&[number])
    }

    #[test]
    fn a_reader_that_takes_nothing_is_cut_off_and_others_go_on() {
        runtime().block_on(async {
            let fan = Fan::default();
            let mut stuck = fan.attach();
            let mut healthy = fan.attach();
            let published = async {
                for number in 0..20 {
                    fan.publish(frame(number)).await;
                }
                fan.finish(frame(99)).await;
            };
            let read = async {
                let mut seen = Vec::new();
                while let Some(item) = healthy.recv().await {
                    let (Item::Data(bytes) | Item::End(bytes)) = item;
                    seen.push(bytes[0]);
                }
                seen
            };
            let ((), seen) = tokio::join!(published, read);
            assert_eq!(seen, (0..20).chain([99]).collect::<Vec<_>>());
            let mut left = 0;
            while let Some(item) = stuck.recv().await {
                assert!(matches!(item, Item::Data(_)), "cut off before the end");
                left += 1;
            }
            assert_eq!(left, QUEUED_FRAMES);
        });
    }

    #[test]
    fn a_lone_slow_reader_loses_nothing() {
        runtime().block_on(async {
            let fan = Fan::default();
            let mut slow = fan.attach();
            let published = async {
                for number in 0..12 {
                    fan.publish(frame(number)).await;
                }
                fan.finish(frame(99)).await;
            };
            let read = async {
                let mut count = 0;
                loop {
                    tokio::time::sleep(PATIENCE * 3).await;
                    match slow.recv().await {
                        Some(Item::Data(_)) => count += 1,
                        Some(Item::End(_)) => return count,
                        None => panic!("cut off"),
                    }
                }
            };
            let ((), count) = tokio::join!(published, read);
            assert_eq!(count, 12);
        });
    }

    #[test]
    fn a_late_reader_sees_the_end_alone() {
        runtime().block_on(async {
            let fan = Fan::default();
            fan.publish(frame(1)).await;
            fan.finish(frame(9)).await;
            let mut late = fan.attach();
            assert!(matches!(late.recv().await, Some(Item::End(bytes)) if bytes[0] == 9));
            assert!(late.recv().await.is_none());
        });
    }
}
