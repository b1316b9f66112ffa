//! The server dies and comes back; boxes do not.

use super::{
    bench::{Bench, SMALL, Stage, spec},
    run,
};
use crate::{Adoption, WardEvent};
use std::{collections::HashSet, time::Duration};
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(20);

pub async fn a_box_is_adopted_after_a_restart(bench: &dyn Bench) {
    let Stage { ward, live } = Stage::new(bench).await;
    let output = run(ward.as_ref(), &live.id, "echo here > /run/note").await;
    assert!(output.success(), "{output:?}");
    drop(ward);

    let ward = bench.ward();
    let mut events = ward.events().expect("nobody has taken the events");
    assert_eq!(
        ward.adopt(&live).await.expect("it is looked for"),
        Adoption::Alive
    );
    // Asking again changes nothing.
    assert_eq!(
        ward.adopt(&live).await.expect("it is looked for"),
        Adoption::Alive
    );
    let output = run(ward.as_ref(), &live.id, "cat /run/note").await;
    assert_eq!(output.stdout, "here\n", "the same box, with its memory");
    ward.set_limits(&live.id, &SMALL)
        .await
        .expect("limits can be set");
    assert!(ward.usage(&live.id).await.expect("usage is read").pids > 0);
    // New boxes live beside it.
    let other = ward
        .start(spec(bench, SMALL))
        .await
        .expect("another box starts");
    ward.destroy(&other.id).await.expect("it is destroyed");
    bench.kill(&live);
    let event = timeout(SOON, events.recv())
        .await
        .expect("the end of an adopted box is reported")
        .expect("the stream goes on");
    assert!(
        matches!(&event, WardEvent::Exited { id, .. } if *id == live.id),
        "{event:?}"
    );
    ward.destroy(&live.id).await.expect("the box is destroyed");
    assert_eq!(bench.traces(&live), Vec::<String>::new());
}

pub async fn a_dead_box_is_gone(bench: &dyn Bench) {
    let Stage { ward, live } = Stage::new(bench).await;
    drop(ward);
    bench.kill(&live);
    let ward = bench.ward();
    assert_eq!(
        ward.adopt(&live).await.expect("it is looked for"),
        Adoption::Gone
    );
    assert_eq!(bench.traces(&live), Vec::<String>::new());
}

pub async fn sweep_clears_the_unknown_only(bench: &dyn Bench) {
    let Stage { ward, live: kept } = Stage::new(bench).await;
    let forgotten = ward
        .start(spec(bench, SMALL))
        .await
        .expect("another box starts");
    drop(ward);

    let ward = bench.ward();
    assert_eq!(
        ward.adopt(&kept).await.expect("it is looked for"),
        Adoption::Alive
    );
    let known = HashSet::from([kept.id.clone()]);
    let swept = ward.sweep(&known).await.expect("the host is swept");
    assert!(swept.processes >= 1, "{swept:?}");
    assert_eq!(bench.traces(&forgotten), Vec::<String>::new());
    assert!(run(ward.as_ref(), &kept.id, "true").await.success());

    // What nobody adopted yet but somebody knows is spared, too.
    drop(ward);
    let ward = bench.ward();
    ward.sweep(&known).await.expect("the host is swept");
    assert_eq!(
        ward.adopt(&kept).await.expect("it is looked for"),
        Adoption::Alive
    );
    assert!(run(ward.as_ref(), &kept.id, "true").await.success());
    // A box of this very ward that nobody knows goes like the rest.
    ward.sweep(&HashSet::new())
        .await
        .expect("the host is swept");
    assert_eq!(bench.traces(&kept), Vec::<String>::new());
}
