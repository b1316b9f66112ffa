//! Boxes that are being made.

use crate::work::lock;
use sandkeep_model::{Error, Result, SandboxId};
use std::{collections::HashSet, sync::Mutex};
use tokio::sync::oneshot;

/// Nobody may sweep these away, or start them a second time.
#[derive(Debug, Default)]
pub struct Starting(Mutex<HashSet<SandboxId>>);

/// One of them, until it is dropped.
#[derive(Debug)]
pub struct Begun<'a> {
    starting: &'a Starting,
    id: SandboxId,
}

impl Starting {
    /// Refused when it is being made already, or `there`.
    pub fn begin(&self, id: &SandboxId, there: bool) -> Result<Begun<'_>> {
        if there || !lock(&self.0).insert(id.clone()) {
            return Err(Error::conflict(format!("box {id} is there already"))
                .hint("end it first, or use another id"));
        }
        Ok(Begun {
            starting: self,
            id: id.clone(),
        })
    }

    pub fn contains(&self, id: &SandboxId) -> bool {
        lock(&self.0).contains(id)
    }

    pub fn names(&self) -> Vec<String> {
        lock(&self.0).iter().map(ToString::to_string).collect()
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        lock(&self.starting.0).remove(&self.id);
    }
}

/// Brings a box to life in a task of its own: a caller that goes away must not leave half a box.
/// `unwanted` ends one that nobody waited for.
pub async fn born<T, U>(
    id: SandboxId,
    start: impl Future<Output = Result<T>> + Send + 'static,
    unwanted: impl FnOnce(SandboxId) -> U + Send + 'static,
) -> Result<T>
where
    T: Send + 'static,
    U: Future<Output = Result<()>> + Send,
{
    let (tell, told) = oneshot::channel();
    tokio::spawn(async move {
        if let Err(Ok(_nobody)) = tell.send(start.await)
            && let Err(error) = unwanted(id.clone()).await
        {
            tracing::error!(%id, %error, "a box that nobody waited for was not ended");
        }
    });
    told.await
        .map_err(|_| Error::internal("the task that starts the box ended early"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_is_not_begun_twice() {
        let (starting, id) = (Starting::default(), SandboxId::random());
        assert!(starting.begin(&id, true).is_err());
        let begun = starting.begin(&id, false).unwrap();
        assert!(starting.contains(&id));
        assert!(starting.begin(&id, false).is_err());
        drop(begun);
        assert!(starting.names().is_empty());
        starting.begin(&id, false).unwrap();
    }
}
