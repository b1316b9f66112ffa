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

pub struct Activity {
    /// Cuts the connections there are now; those made later have another.
    gate: Mutex<CancellationToken>,
    open: AtomicUsize,
    closed: Notify,
    last: Mutex<Instant>,
}

impl Default for Activity {
    fn default() -> Self {
        Self {
            gate: Mutex::default(),
            open: AtomicUsize::new(0),
            closed: Notify::new(),
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
        let gone = async {
            loop {
                let closed = self.closed.notified();
                if self.open.load(Ordering::Acquire) == 0 {
                    return;
                }
                closed.await;
            }
        };
        if tokio::time::timeout(LET_GO, gone).await.is_err() {
            tracing::warn!("a client does not let go of a box that is paused");
        }
    }

    pub fn touch(&self) {
        *lock(&self.last) = Instant::now();
    }

    /// How long nobody wanted anything; `None` while somebody is connected.
    pub fn idle_for(&self) -> Option<Duration> {
        (self.open.load(Ordering::Acquire) == 0).then(|| lock(&self.last).elapsed())
    }

    /// Counts whoever is about to connect. To be called before the state is looked at: who
    /// comes too late for a cut then sees the state that came before it.
    pub fn enter(self: &Arc<Self>) -> Visit {
        self.open.fetch_add(1, Ordering::AcqRel);
        self.touch();
        Visit {
            cut: Box::pin(self.gate().cancelled_owned()),
            activity: Arc::clone(self),
        }
    }
}

/// Somebody who talks to a box.
pub struct Visit {
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
        Pin::new(&mut self.channel).poll_read(cx, buf)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        self.visit.poll_cut(cx)?;
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
        assert!(activity.idle_for().is_some());
        let (near, mut far) = tokio::io::duplex(64);
        let mut channel = activity.enter().over(Box::new(near));
        assert_eq!(activity.idle_for(), None);
        far.write_all(b"x").await.unwrap();
        assert_eq!(channel.read_u8().await.unwrap(), b'x');
        let told = activity.gate();
        let reader = tokio::spawn(async move { channel.read_u8().await });
        activity.cut().await;
        assert!(told.is_cancelled());
        assert!(reader.await.unwrap().is_err());
        assert!(activity.idle_for().is_some());

        let (near, mut far) = tokio::io::duplex(64);
        let mut channel = activity.enter().over(Box::new(near));
        far.write_all(b"y").await.unwrap();
        assert_eq!(channel.read_u8().await.unwrap(), b'y');
    }
}
