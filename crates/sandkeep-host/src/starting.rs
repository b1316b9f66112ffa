//! Boxes that are being made.

use crate::work::lock;
use sandkeep_model::{Code, Error, Result, SandboxId};
use std::{
    collections::HashSet,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::{
    sync::{Notify, oneshot},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

/// How often what is still being made is ended again.
const AGAIN: Duration = Duration::from_millis(200);
/// Whoever makes a box has come to an end by then, once its processes are killed.
const ENDED: Duration = Duration::from_secs(60);

/// Nobody may sweep these away, or start them a second time.
#[derive(Debug, Default, Clone)]
pub struct Starting(Arc<Ids>);

#[derive(Debug, Default)]
struct Ids {
    begun: Mutex<HashSet<SandboxId>>,
    /// Rung whenever one is over.
    over: Notify,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub struct Begun {
    starting: Starting,
    id: SandboxId,
}

impl Starting {
    /// Refused when it is being made already, or `there`.
    pub fn begin(&self, id: &SandboxId, there: bool) -> Result<Begun> {
        if there {
            return Err(Error::conflict(format!("box {id} is there already"))
                .hint("end it first, or use another id"));
        }
        if !lock(&self.0.begun).insert(id.clone()) {
            return Err(Error::conflict(format!(
                "box {id} is still being started for somebody else"
            ))
            .hint("try again when that has come to an end")
            .retryable(true));
        }
        Ok(Begun {
            starting: self.clone(),
            id: id.clone(),
        })
    }

    pub fn contains(&self, id: &SandboxId) -> bool {
        lock(&self.0.begun).contains(id)
    }

    pub fn names(&self) -> Vec<String> {
        let begun = lock(&self.0.begun);
        begun.iter().map(ToString::to_string).collect()
    }

    async fn over(&self, id: &SandboxId) {
        loop {
            let mut over = std::pin::pin!(self.0.over.notified());
            // Before it is looked: nothing rings unheard.
            over.as_mut().enable();
            if !self.contains(id) {
                return;
            }
            over.await;
        }
    }

    /// Ends a box by `destroy`, and waits until nobody makes it any more: somebody who gave up
    /// may have left that behind, and whoever starts it anew must not meet it.
    pub async fn end<F>(&self, id: &SandboxId, destroy: impl Fn() -> F) -> Result<()>
    where
        F: Future<Output = Result<()>>,
    {
        let until = Instant::now() + ENDED;
        loop {
            destroy().await?;
            if !self.contains(id) {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(Error::new(
                    Code::DeadlineExceeded,
                    format!("box {id} is still being started"),
                )
                .hint("try again in a minute")
                .retryable(true));
            }
            // What was made meanwhile is ended in the next round.
            let _late = timeout(AGAIN, self.over(id)).await;
        }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        lock(&self.starting.0.begun).remove(&self.id);
        self.starting.0.over.notify_waiters();
    }
}

/// Brings a box to life in a task of its own: a caller that goes away must not leave half a box.
/// `start` is told when nobody waits for it any more; it may come to its end sooner then. `unwanted`
/// ends a box that nobody waited for, and until then nobody begins it anew.
pub async fn born<T, S, U>(
    begun: Begun,
    start: impl FnOnce(CancellationToken) -> S,
    unwanted: impl FnOnce(SandboxId) -> U + Send + 'static,
) -> Result<T>
where
    T: Send + 'static,
    S: Future<Output = Result<T>> + Send + 'static,
    U: Future<Output = Result<()>> + Send,
{
    let (mut tell, told) = oneshot::channel();
    let abandoned = CancellationToken::new();
    let start = start(abandoned.clone());
    tokio::spawn(async move {
        let mut start = std::pin::pin!(start);
        let made = tokio::select! {
            // Polled once more only if it has not ended.
            made = &mut start => made,
            () = tell.closed() => {
                abandoned.cancel();
                start.await
            }
        };
        if let Err((Ok(_nobody), begun)) = tell.send((made, begun))
            && let Err(error) = unwanted(begun.id.clone()).await
        {
            tracing::error!(id = %begun.id, %error, "a box that nobody waited for was not ended");
        }
    });
    let (made, _begun) = told
        .await
        .map_err(|_| Error::internal("the task that starts the box ended early"))?;
    made
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_box_is_not_begun_twice() {
        let (starting, id) = (Starting::default(), SandboxId::random());
        assert!(starting.begin(&id, true).is_err());
        let begun = starting.begin(&id, false).unwrap();
        assert!(starting.contains(&id));
        let again = starting.begin(&id, false).unwrap_err();
        assert!(again.retryable, "it is over soon");
        drop(begun);
        assert!(starting.names().is_empty());
        starting.begin(&id, false).unwrap();
    }

    #[tokio::test]
    async fn a_box_could_not_be_woken_again_after_a_start_that_took_too_long() {
        let (starting, id) = (Starting::default(), SandboxId::random());
        let (go, gone) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
        let begun = starting.begin(&id, false).unwrap();
        let start = |abandoned: CancellationToken| {
            let go = Arc::clone(&go);
            async move {
                abandoned.cancelled().await;
                go.notified().await;
                Ok("a box")
            }
        };
        let unwanted = {
            let (gone, starting) = (Arc::clone(&gone), starting.clone());
            async move |id: SandboxId| {
                tokio::task::yield_now().await;
                assert!(starting.contains(&id), "nobody begins it before it is gone");
                gone.fetch_add(1, Ordering::SeqCst);
                Ok(())
            }
        };
        // Whoever wanted it gives up.
        let waiting = born(begun, start, unwanted);
        assert!(timeout(Duration::from_millis(10), waiting).await.is_err());
        assert!(starting.begin(&id, false).is_err());
        let destroy = || async {
            // With its processes gone the start comes to its end.
            go.notify_one();
            Ok(())
        };
        starting.end(&id, destroy).await.unwrap();
        assert_eq!(gone.load(Ordering::SeqCst), 1);
        starting.begin(&id, false).unwrap();
    }
}
