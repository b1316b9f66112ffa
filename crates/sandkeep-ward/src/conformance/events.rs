//! What a ward notices by itself.

use super::bench::{Bench, Stage};
use crate::WardEvent;
use std::time::Duration;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(20);

pub async fn events_can_be_taken_once(bench: &dyn Bench) {
    let ward = bench.ward();
    assert!(ward.events().is_some());
    assert!(ward.events().is_none());
}

pub async fn a_box_that_ends_by_itself_is_reported(bench: &dyn Bench) {
    let stage = Stage::new(bench).await;
    let mut events = stage.ward.events().expect("nobody has taken the events");
    bench.kill(&stage.live);
    let event = timeout(SOON, events.recv())
        .await
        .expect("the end is reported")
        .expect("the stream goes on");
    assert_eq!(
        event,
        WardEvent::Exited {
            id: stage.live.id.clone(),
            out_of_memory: false
        }
    );
    let live = stage.live.clone();
    stage.end().await;
    assert_eq!(bench.traces(&live), Vec::<String>::new());
}

/// The end of a box that was asked for is not reported, so the next news is another's.
pub async fn a_destroyed_box_is_no_news(bench: &dyn Bench) {
    let first = Stage::new(bench).await;
    let ward = std::sync::Arc::clone(&first.ward);
    let mut events = ward.events().expect("nobody has taken the events");
    first.end().await;
    let second = ward
        .start(super::bench::spec(bench, super::bench::SMALL))
        .await
        .expect("the box starts");
    bench.kill(&second);
    let event = timeout(SOON, events.recv())
        .await
        .expect("the end is reported")
        .expect("the stream goes on");
    assert!(
        matches!(&event, WardEvent::Exited { id, .. } if *id == second.id),
        "{event:?}"
    );
    ward.destroy(&second.id)
        .await
        .expect("the box is destroyed");
}
