//! Work between tasks: locks that outlive a panic, calls that block.

use sandkeep_model::{Error, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::task;

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    task::spawn_blocking(work)
        .await
        .map_err(|error| Error::internal(format!("a blocking task failed: {error}")))?
}
