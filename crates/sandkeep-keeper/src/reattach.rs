//! Boxes of an earlier run get their moat back while the server answers already.
//!
//! Until then they reach nothing: their namespaces have no way out, and nobody listens where
//! their connections are turned to.

use std::{sync::Arc, time::Duration};

use futures_util::StreamExt;
use sandkeep_model::State;

use crate::{core::Core, registry::Entry};

/// Moats made side by side; the rest of the server has work to do, too.
const AT_ONCE: usize = 4;
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(60);

impl Core {
    /// Attaches these boxes, and those that fail again and again until it works.
    pub async fn reattach(self: Arc<Self>, boxes: Vec<Arc<Entry>>) {
        if boxes.is_empty() || self.config.network.moat.is_none() {
            return;
        }
        let work = async {
            let mut waiting = boxes;
            let mut pause = FIRST_RETRY;
            loop {
                let count = waiting.len();
                waiting = futures_util::stream::iter(waiting)
                    .map(|entry| self.attach_again(entry))
                    .buffer_unordered(AT_ONCE)
                    .filter_map(std::future::ready)
                    .collect()
                    .await;
                let done = count - waiting.len();
                tracing::info!(
                    done,
                    waiting = waiting.len(),
                    "adopted boxes have their network again"
                );
                if waiting.is_empty() {
                    return;
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LAST_RETRY);
            }
        };
        self.closing.run_until_cancelled(work).await;
    }

    /// Gives the box back when it has to be tried again.
    async fn attach_again(&self, entry: Arc<Entry>) -> Option<Arc<Entry>> {
        // Gets it when it goes on, which may take long; nobody is to wait for that.
        if entry.state() == State::Pausing {
            return None;
        }
        // Whoever ends it or gives it another policy meanwhile was first, or waits for us.
        let turn = entry.turn.lock().await;
        // One that rests gets its moat when it wakes.
        if entry.state() != State::Running || entry.reach.attached() {
            return None;
        }
        let attached = self.attach(&entry).await;
        drop(turn);
        match attached {
            Ok(()) => None,
            Err(error) => {
                tracing::error!(id = %entry.id, %error, "an adopted box has no network yet");
                Some(entry)
            }
        }
    }
}
