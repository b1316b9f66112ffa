//! The handle everybody writes with.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Sender, channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use sandkeep_files::{DirLock, PrivateDir};
use sandkeep_model::{Code, Error, Result};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError, oneshot};

use crate::{
    Actor, Entry, Filter, Head, Reader, Verdict,
    open::find_end,
    verify::verify_files,
    writer::{Message, Status, Writer},
};

#[derive(Debug, Clone, Copy)]
pub struct AuditConfig {
    /// A segment that grew to this is closed and the next begins.
    pub segment_bytes: u64,
    /// How long a line may be written but not durable.
    pub sync_every: Duration,
    /// How often a log that could not be written is tried again while nobody writes.
    pub retry_every: Duration,
    /// Entries that may wait to be written.
    pub queue: usize,
}

impl Default for AuditConfig {
    fn default() -> Self {
        Self {
            segment_bytes: 64 * 1024 * 1024,
            sync_every: Duration::from_millis(50),
            retry_every: Duration::from_millis(500),
            queue: 8192,
        }
    }
}

/// An open log. Copies share it; the last one dropped makes everything durable.
#[derive(Clone)]
pub struct Audit {
    inner: Arc<Inner>,
}

struct Inner {
    dir: PathBuf,
    status: Arc<Status>,
    room: Arc<Semaphore>,
    /// Taken when the log is closed.
    sender: Option<Sender<Message>>,
    thread: Option<JoinHandle<()>>,
    _lock: DirLock,
}

impl Audit {
    pub fn open(dir: &Path) -> Result<Self> {
        Self::open_with(dir, AuditConfig::default())
    }

    pub fn open_with(dir: &Path, config: AuditConfig) -> Result<Self> {
        let private = PrivateDir::open(dir)?;
        let lock = private.lock()?;
        let mut end = find_end(dir)?;
        private.sync()?;
        let repaired = end.repaired.take();
        let status = Arc::new(Status {
            failing: AtomicBool::new(false),
            lost: AtomicU64::new(0),
            head: Mutex::new(end.head),
        });
        let (sender, queue) = channel();
        let writer = Writer::new(private, Arc::clone(&status), config, end);
        let thread = std::thread::Builder::new()
            .name("audit".into())
            .spawn(move || writer.run(&queue))?;
        let audit = Self {
            inner: Arc::new(Inner {
                dir: dir.to_owned(),
                status,
                room: Arc::new(Semaphore::new(config.queue)),
                sender: Some(sender),
                thread: Some(thread),
                _lock: lock,
            }),
        };
        if let Some(action) = repaired {
            tracing::warn!(?action, "the audit log was not closed well");
            audit.record(Entry::now(Actor::server(), None, action))?;
        }
        Ok(audit)
    }

    /// Writes an entry and returns its number. It survives our own death from then on; after
    /// [`Audit::flush`] that of the machine too. Waits while the queue is full.
    pub async fn append(&self, entry: Entry) -> Result<u64> {
        let permit = Arc::clone(&self.inner.room)
            .acquire_owned()
            .await
            .map_err(|_| closed())?;
        let (reply, answer) = oneshot::channel();
        self.send(entry, permit, Some(reply))?;
        answer.await.map_err(|_| closed())?
    }

    /// Waits while the queue is full. Whoever waits here before doing what will be recorded is
    /// held back until the log keeps up.
    pub async fn room(&self) {
        // Closing is found out by whoever writes.
        drop(self.inner.room.acquire().await);
    }

    /// Whether [`Audit::room`] would wait.
    pub fn is_full(&self) -> bool {
        self.inner.room.available_permits() == 0
    }

    /// Puts an entry in the queue; when that is full the entry waits for its place in a task of
    /// its own. For what has happened already and can not be held back any more: such entries
    /// must come from something whose beginning waited for [`Audit::room`].
    pub fn record_in_turn(&self, entry: Entry) {
        let audit = self.clone();
        match Arc::clone(&self.inner.room).try_acquire_owned() {
            Ok(permit) => {
                // A closed log is closed for everybody; its end was told when it closed.
                let _ = self.send(entry, permit, None);
            }
            Err(TryAcquireError::Closed) => {}
            Err(TryAcquireError::NoPermits) => {
                tokio::spawn(async move {
                    if let Err(error) = audit.append(entry).await {
                        tracing::error!(%error, "an event is not in the audit log");
                    }
                });
            }
        }
    }

    /// Puts an entry in the queue and does not wait. A full queue is an error, and the number of
    /// entries lost so is put on record as soon as there is room.
    pub fn record(&self, entry: Entry) -> Result<()> {
        match Arc::clone(&self.inner.room).try_acquire_owned() {
            Ok(permit) => self.send(entry, permit, None),
            Err(TryAcquireError::NoPermits) => {
                self.inner.status.lost.fetch_add(1, Ordering::AcqRel);
                Err(Error::new(
                    Code::ResourceExhausted,
                    "the queue of the audit log is full",
                )
                .hint("the disk of the state directory is too slow or stuck"))
            }
            Err(TryAcquireError::Closed) => Err(closed()),
        }
    }

    /// Returns when everything written before is durable.
    pub async fn flush(&self) -> Result<()> {
        let (reply, answer) = oneshot::channel();
        self.sender()?
            .send(Message::Flush(reply))
            .map_err(|_| closed())?;
        answer.await.map_err(|_| closed())?
    }

    /// False while entries are being lost: the last write or sync failed, or the queue ran over.
    /// Whether to go on without a record is for the caller to decide.
    pub fn healthy(&self) -> bool {
        let status = &self.inner.status;
        !status.failing.load(Ordering::Acquire) && status.lost.load(Ordering::Acquire) == 0
    }

    /// The end of the log as written so far.
    pub fn head(&self) -> Head {
        *self
            .inner
            .status
            .head
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Walks the whole chain. Reads files: not for an async thread.
    pub fn verify(&self) -> Result<Verdict> {
        // Taken first: everything up to here must be found.
        let head = self.head();
        verify_files(&self.inner.dir, Some(&head))
    }

    /// Entries that match, one by one. Reads files: not for an async thread.
    pub fn read(&self, filter: Filter) -> Result<Reader> {
        Reader::new(&self.inner.dir, filter)
    }

    fn send(
        &self,
        entry: Entry,
        permit: OwnedSemaphorePermit,
        reply: Option<oneshot::Sender<Result<u64>>>,
    ) -> Result<()> {
        let entry = Box::new(entry);
        self.sender()?
            .send(Message::Append {
                entry,
                permit,
                reply,
            })
            .map_err(|_| closed())
    }

    fn sender(&self) -> Result<&Sender<Message>> {
        self.inner.sender.as_ref().ok_or_else(closed)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the writer was already reported by its own thread.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Audit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Audit")
            .field("dir", &self.inner.dir)
            .field("head", &self.head())
            .field("healthy", &self.healthy())
            .finish()
    }
}

fn closed() -> Error {
    Error::internal("the audit log is closed")
}
