//! The one thread that writes.
//!
//! It takes what has gathered in the queue, writes it in one go and makes it durable a moment
//! later, so that many events share one `fdatasync`. A line that was written survives our own
//! death at once, and that of the machine after the next sync.

use std::{
    fs::File,
    io::Write as _,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use sandkeep_files::PrivateDir;
use sandkeep_model::{Error, Result};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::{Action, Actor, AuditConfig, Entry, Head, line::seal, open::End, segment::Segment};

/// What the disk is asked for before it is needed: entries must be written when it is full.
const AHEAD: u64 = 8 << 20;
const LEAST: u64 = 64 << 10;
/// Lines that go out in one write.
const MAX_BATCH: usize = 256;

pub(crate) enum Message {
    Append {
        entry: Box<Entry>,
        /// Given back when the entry left the queue.
        permit: OwnedSemaphorePermit,
        reply: Option<oneshot::Sender<Result<u64>>>,
    },
    Flush(oneshot::Sender<Result<()>>),
}

/// What others may know of the writer.
pub(crate) struct Status {
    pub failing: AtomicBool,
    /// Entries nobody wrote down, not yet on record themselves.
    pub lost: AtomicU64,
    pub head: Mutex<Head>,
}

pub(crate) struct Writer {
    dir: PrivateDir,
    status: Arc<Status>,
    config: AuditConfig,
    segment: Segment,
    file: File,
    size: u64,
    /// Up to here the disk has room for the segment, whoever fills it.
    allocated: u64,
    head: Head,
    /// When the oldest line not yet durable was written.
    unsynced: Option<Instant>,
    /// Set by a failed sync: the kernel may have dropped what it could not write, and a later
    /// sync would not tell. Nothing is trusted until the log is opened anew.
    broken: Option<Error>,
}

type Waiting = Vec<(Option<oneshot::Sender<Result<u64>>>, u64)>;

impl Writer {
    pub fn new(dir: PrivateDir, status: Arc<Status>, config: AuditConfig, end: End) -> Self {
        Self {
            dir,
            status,
            config,
            segment: end.segment,
            file: end.file,
            size: end.size,
            allocated: 0,
            head: end.head,
            unsynced: None,
            broken: None,
        }
    }

    /// Runs until every sender is gone.
    pub fn run(mut self, queue: &Receiver<Message>) {
        loop {
            let first = match self.patience() {
                None => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(patience) => queue.recv_timeout(patience),
            };
            let mut flushes = Vec::new();
            match first {
                Ok(first) => {
                    let rest = std::iter::from_fn(|| queue.try_recv().ok());
                    let batch = std::iter::once(first).chain(rest).take(MAX_BATCH);
                    self.write(batch.collect(), &mut flushes);
                }
                Err(RecvTimeoutError::Timeout) => self.write(Vec::new(), &mut flushes),
                Err(RecvTimeoutError::Disconnected) => {
                    let _ = self.sync();
                    return;
                }
            }
            let due = self
                .unsynced
                .is_some_and(|since| since.elapsed() >= self.config.sync_every);
            if due || !flushes.is_empty() {
                let synced = self.sync();
                for flush in flushes {
                    // Whoever asked may have gone away.
                    let _ = flush.send(synced.clone());
                }
            }
        }
    }

    /// How long to wait for the next entry before something else is to be done.
    fn patience(&self) -> Option<Duration> {
        let sync = self
            .unsynced
            .map(|since| self.config.sync_every.saturating_sub(since.elapsed()));
        let lost = self.status.lost.load(Ordering::Acquire) > 0;
        sync.or(lost.then_some(self.config.retry_every))
    }

    /// Writes what came, and before it how many entries were lost, if any were.
    fn write(&mut self, batch: Vec<Message>, flushes: &mut Vec<oneshot::Sender<Result<()>>>) {
        let mut text = String::new();
        let mut waiting: Waiting = Vec::new();
        let mut head = self.head;
        // After the batch was taken: what was lost before a flush was asked for is told by it.
        let lost = self.status.lost.swap(0, Ordering::AcqRel);
        if lost > 0 {
            let entry = Entry::now(Actor::server(), None, Action::EntriesLost { count: lost });
            self.add(&entry, None, lost, &mut head, &mut text, &mut waiting);
        }
        for message in batch {
            match message {
                Message::Flush(reply) => flushes.push(reply),
                Message::Append {
                    entry,
                    permit,
                    reply,
                } => {
                    self.add(&entry, reply, 1, &mut head, &mut text, &mut waiting);
                    drop(permit);
                }
            }
        }
        self.put(&text, head, waiting);
    }

    /// Adds a line to `text`. If the segment is full, what was gathered goes out first.
    fn add(
        &mut self,
        entry: &Entry,
        reply: Option<oneshot::Sender<Result<u64>>>,
        stands_for: u64,
        head: &mut Head,
        text: &mut String,
        waiting: &mut Waiting,
    ) {
        let mut line = String::new();
        let mut sealed = seal(entry, *head, &mut line);
        let full = self.size + (text.len() + line.len()) as u64 > self.config.segment_bytes;
        if full && self.size + text.len() as u64 > 0 {
            self.put(text, *head, std::mem::take(waiting));
            text.clear();
            // After a failure the head is where it was, and the line must be made again.
            *head = self.head;
            let turned = self.next_segment();
            line.clear();
            sealed = turned.and_then(|()| seal(entry, *head, &mut line));
        }
        match sealed {
            Ok(new) => {
                *head = new;
                text.push_str(&line);
                waiting.push((reply, stands_for));
            }
            Err(error) => self.fail(vec![(reply, stands_for)], &error),
        }
    }

    /// Writes lines that end in `head` and tells those who wait.
    fn put(&mut self, text: &str, head: Head, waiting: Waiting) {
        if text.is_empty() {
            return;
        }
        self.allocate(text.len() as u64);
        let written = match &self.broken {
            Some(error) => Err(error.clone()),
            None => self
                .file
                .write_all(text.as_bytes())
                .map_err(|error| self.segment.doing("writing", error)),
        };
        if let Err(error) = written {
            self.take_back();
            self.fail(waiting, &error);
            return;
        }
        let mut seq = head.seq - waiting.len() as u64;
        self.size += text.len() as u64;
        self.head = head;
        *self
            .status
            .head
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = head;
        self.unsynced.get_or_insert_with(Instant::now);
        self.status.failing.store(false, Ordering::Release);
        for (reply, _) in waiting {
            seq += 1;
            if let Some(reply) = reply {
                let _ = reply.send(Ok(seq));
            }
        }
    }

    /// Room for what is about to be written, and for a while after it. Without it the log goes on
    /// as long as the disk has some.
    fn allocate(&mut self, bytes: u64) {
        let ahead = self.ahead();
        if self.size + bytes + ahead / 2 <= self.allocated {
            return;
        }
        match allocate(&self.file, self.size, bytes + ahead) {
            Ok(()) => self.allocated = self.size + bytes + ahead,
            Err(error) => tracing::debug!(%error, "no room is set aside for the audit log"),
        }
    }

    fn ahead(&self) -> u64 {
        self.config.segment_bytes.clamp(LEAST, AHEAD)
    }

    /// A full disk takes part of a line. It must not stay: the next line would be glued to it.
    fn take_back(&mut self) {
        // With the end of the file goes what was set aside behind it.
        self.allocated = 0;
        if self.broken.is_none()
            && let Err(error) = self.file.set_len(self.size)
        {
            self.broken = Some(self.segment.doing("taking back half a line of", error));
        }
    }

    fn fail(&self, waiting: Waiting, error: &Error) {
        if !self.status.failing.swap(true, Ordering::AcqRel) {
            tracing::error!(error = %error, "the audit log can not be written");
        }
        for (reply, stands_for) in waiting {
            self.status.lost.fetch_add(stands_for, Ordering::AcqRel);
            if let Some(reply) = reply {
                let _ = reply.send(Err(error.clone().context("writing the audit log")));
            }
        }
    }

    fn next_segment(&mut self) -> Result<()> {
        self.sync()?;
        let next = Segment::new(self.dir.path(), self.head.seq + 1);
        let file = next.open_to_write()?;
        let ahead = self.ahead();
        let room = allocate(&file, 0, ahead).or_else(|_| allocate(&file, 0, LEAST));
        if let Err(error) = room
            && error.kind() == std::io::ErrorKind::StorageFull
        {
            // Behind the end of the old one there is still room.
            drop(file);
            return std::fs::remove_file(&next.path)
                .map_err(|error| next.doing("giving up", error));
        }
        // What was set aside behind the end of the old one is given back.
        if let Err(error) = self.file.set_len(self.size) {
            tracing::debug!(%error, "the room behind a segment stays");
        }
        self.dir.sync()?;
        self.segment = next;
        self.file = file;
        self.size = 0;
        self.allocated = 0;
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        if self.unsynced.take().is_some()
            && let Err(error) = self.file.sync_data()
        {
            let error = self
                .segment
                .doing("making durable", error)
                .hint("start the server again once the disk is well");
            tracing::error!(error = %error, "the audit log can not be made durable");
            self.status.failing.store(true, Ordering::Release);
            self.broken = Some(error.clone());
            return Err(error);
        }
        Ok(())
    }
}

/// The length of the file stays what it is.
fn allocate(file: &File, from: u64, bytes: u64) -> std::io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    fallocate(file, FallocateFlags::KEEP_SIZE, from, bytes)?;
    Ok(())
}
