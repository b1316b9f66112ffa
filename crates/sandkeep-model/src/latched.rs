//! Futures that may be asked again.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

/// A future that says the same again when it is polled after its end. One that an arm of `select!`
/// polls by `&mut` may be polled once more by the next round, or by whoever looks why a round
/// ended; an `async fn` panics then.
pub struct Latched<T> {
    waiting: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    ended: Option<T>,
}

impl<T: Clone> Latched<T> {
    pub fn new(future: impl Future<Output = T> + Send + 'static) -> Self {
        Self {
            waiting: Some(Box::pin(future)),
            ended: None,
        }
    }
}

impl<T> std::fmt::Debug for Latched<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Latched")
            .field("ended", &self.ended.is_some())
            .finish_non_exhaustive()
    }
}

// The future is pinned on its own, and the value never is.
impl<T> Unpin for Latched<T> {}

impl<T: Clone> Future for Latched<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        if let Some(waiting) = &mut self.waiting
            && let Poll::Ready(value) = waiting.as_mut().poll(cx)
        {
            self.waiting = None;
            self.ended = Some(value);
        }
        match &self.ended {
            Some(value) => Poll::Ready(value.clone()),
            None => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[test]
    fn the_end_is_told_as_often_as_it_is_asked_for() {
        let mut latched = Latched::new(async { 7 });
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..3 {
            assert_eq!(Pin::new(&mut latched).poll(&mut cx), Poll::Ready(7));
        }
        let mut never = Latched::new(std::future::pending::<()>());
        assert!(Pin::new(&mut never).poll(&mut cx).is_pending());
    }
}
