//! Who talks to a box, and when somebody did last.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use sandkeep_ward::Channel;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Notify,
    time::Instant,
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::sync::lock;

/// How long clients get to let go of a box that is paused. Who does not is cut by the freeze.
const LET_GO: Duration = Duration::from_secs(3);
/// How long whoever keeps unused connections gets to give them back.
const GIVE_BACK: Duration = Duration::from_millis(200);

pub struct Activity {
    /// Cuts the connections there are now; those made later have another.
    gate: Mutex<CancellationToken>,
    open: AtomicUsize,
    closed: Notify,
    /// Who waits for an answer: a command that runs, a file that is carried.
    waiting: AtomicUsize,
    /// Rung when connections that only wait for their next use are to be given back.
    give_back: Notify,
    last: Mutex<Instant>,
}

/// What on a connection counts as somebody wanting something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counts {
    /// What is said to the box. Its answers do not: agents say now and then that they live.
    Words,
    /// Bytes in both directions.
    Traffic,
}

impl Default for Activity {
    fn default() -> Self {
        Self {
            gate: Mutex::default(),
            open: AtomicUsize::new(0),
            closed: Notify::new(),
            waiting: AtomicUsize::new(0),
            give_back: Notify::new(),
            last: Mutex::new(Instant::now()),
        }
    }
}

impl Activity {
    /// Fires when the connections there are now are cut.
    pub fn gate(&self) -> CancellationToken {
        lock(&self.gate).clone()
    }

    /// For good: nobody gets in any more.
    pub fn close(&self) {
        lock(&self.gate).cancel();
    }

    /// Cuts everybody who is connected and waits until they have let go.
    pub async fn cut(&self) {
        let old = std::mem::take(&mut *lock(&self.gate));
        old.cancel();
        if !self.left_within(LET_GO).await {
            tracing::warn!("a client does not let go of a box that is paused");
        }
    }

    /// Asks for the connections that nobody uses right now; `true` when none is left then.
    pub async fn unused(&self) -> bool {
        self.give_back.notify_waiters();
        self.left_within(GIVE_BACK).await
    }

    /// Fires when connections that are not in use are wanted back.
    pub async fn wanted_back(self: Arc<Self>) {
        self.give_back.notified().await;
    }

    async fn left_within(&self, time: Duration) -> bool {
        let gone = async {
            loop {
                let closed = self.closed.notified();
                if self.open.load(Ordering::Acquire) == 0 {
                    return;
                }
                closed.await;
            }
        };
        tokio::time::timeout(time, gone).await.is_ok()
    }

    pub fn touch(&self) {
        *lock(&self.last) = Instant::now();
    }

    /// How long nobody wanted anything; `None` while somebody waits for an answer. A terminal
    /// or another connection that is open and silent is nobody.
    pub fn idle_for(&self) -> Option<Duration> {
        (self.waiting.load(Ordering::Acquire) == 0).then(|| lock(&self.last).elapsed())
    }

    /// Somebody waits for an answer for as long as this is kept.
    pub fn hold(self: &Arc<Self>) -> Hold {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        Hold(Arc::clone(self))
    }

    /// Counts whoever is about to connect. To be called before the state is looked at: who
    /// comes too late for a cut then sees the state that came before it.
    pub fn enter(self: &Arc<Self>, counts: Counts) -> Visit {
        self.open.fetch_add(1, Ordering::AcqRel);
        self.touch();
        Visit {
            counts,
            cut: Box::pin(self.gate().cancelled_owned()),
            activity: Arc::clone(self),
        }
    }
}

/// Somebody who waits for an answer of a box.
pub struct Hold(Arc<Activity>);

impl std::fmt::Debug for Hold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hold")
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.touch();
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Somebody who talks to a box.
pub struct Visit {
    counts: Counts,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    activity: Arc<Activity>,
}

impl Visit {
    pub fn over(self, channel: Channel) -> Channel {
        Box::new(Watched {
            channel,
            visit: self,
        })
    }

    fn poll_cut(&mut self, cx: &mut Context<'_>) -> std::io::Result<()> {
        if self.cut.as_mut().poll(cx).is_ready() {
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.activity.touch();
        self.activity.open.fetch_sub(1, Ordering::AcqRel);
        self.activity.closed.notify_waiters();
    }
}

/// A connection that ends when the box is paused.
struct Watched {
    channel: Channel,
    visit: Visit,
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        self.visit.poll_cut(cx)?;
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.channel).poll_read(cx, buf);
        if self.visit.counts == Counts::Traffic && buf.filled().len() > before {
            self.visit.activity.touch();
        }
        polled
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        self.visit.poll_cut(cx)?;
        self.visit.activity.touch();
        Pin::new(&mut self.channel).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.visit.poll_cut(cx)?;
        Pin::new(&mut self.channel).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.channel).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.channel.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        self.visit.poll_cut(cx)?;
        self.visit.activity.touch();
        Pin::new(&mut self.channel).poll_write_vectored(cx, bufs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    #[tokio::test]
    async fn a_cut_ends_every_connection_and_lets_new_ones_in() {
        let activity = Arc::new(Activity::default());
        let (near, mut far) = tokio::io::duplex(64);
        let mut channel = activity.enter(Counts::Words).over(Box::new(near));
        far.write_all(b"x").await.unwrap();
        assert_eq!(channel.read_u8().await.unwrap(), b'x');
        assert!(!activity.unused().await, "somebody has it");
        let told = activity.gate();
        let reader = tokio::spawn(async move { channel.read_u8().await });
        activity.cut().await;
        assert!(told.is_cancelled());
        assert!(reader.await.unwrap().is_err());
        assert!(activity.unused().await);

        let (near, mut far) = tokio::io::duplex(64);
        let mut channel = activity.enter(Counts::Words).over(Box::new(near));
        far.write_all(b"y").await.unwrap();
        assert_eq!(channel.read_u8().await.unwrap(), b'y');
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_is_somebody_and_who_is_silent_is_not() {
        let activity = Arc::new(Activity::default());
        let minute = Duration::from_secs(60);
        let after_a_minute = async || {
            tokio::time::advance(minute).await;
            activity.idle_for()
        };
        let (near, mut far) = tokio::io::duplex(64);
        let mut terminal = activity.enter(Counts::Words).over(Box::new(near));
        assert_eq!(after_a_minute().await, Some(minute));
        // An agent that says it lives is nobody; a keystroke is somebody.
        far.write_all(b"alive").await.unwrap();
        terminal.read_exact(&mut [0; 5]).await.unwrap();
        assert_eq!(activity.idle_for(), Some(minute));
        terminal.write_all(b"k").await.unwrap();
        assert_eq!(activity.idle_for(), Some(Duration::ZERO));

        let (near, mut far) = tokio::io::duplex(64);
        let mut port = activity.enter(Counts::Traffic).over(Box::new(near));
        assert_eq!(after_a_minute().await, Some(minute));
        far.write_all(b"news").await.unwrap();
        port.read_exact(&mut [0; 4]).await.unwrap();
        assert_eq!(activity.idle_for(), Some(Duration::ZERO));

        let command = activity.hold();
        assert_eq!(after_a_minute().await, None);
        drop(command);
        assert_eq!(activity.idle_for(), Some(Duration::ZERO));
    }

    #[tokio::test]
    async fn unused_connections_are_given_back_when_asked() {
        let activity = Arc::new(Activity::default());
        let visit = activity.enter(Counts::Words);
        let keeper = tokio::spawn(Arc::clone(&activity).wanted_back());
        tokio::task::yield_now().await;
        let (unused, ()) = tokio::join!(activity.unused(), async {
            keeper.await.unwrap();
            drop(visit);
        });
        assert!(unused);
    }
}
