//! Boxes begin, work and end.

use super::{
    agent,
    bench::{Bench, SMALL, Stage, spec},
    run,
};
use crate::{BoxSpec, Verdict};
use sandkeep_model::{Code, SandboxId};
use std::{path::PathBuf, sync::Arc};

/// A host on which the suite runs has everything, and every check says what it found.
pub async fn checks_find_nothing_missing(bench: &dyn Bench) {
    let checks = bench.ward().check().await;
    assert!(!checks.is_empty(), "a ward looks at something");
    for check in checks {
        assert_ne!(check.verdict, Verdict::Missing, "{check:?}");
        assert!(!check.found.is_empty(), "{check:?}");
        assert_eq!(
            check.fix.is_some(),
            check.verdict != Verdict::Ok,
            "{check:?}"
        );
    }
}

pub async fn a_box_starts_and_answers(bench: &dyn Bench) {
    let stage = Stage::new(bench).await;
    // Twice: every connection is fresh.
    drop(agent(stage.ward.as_ref(), &stage.live.id).await);
    drop(agent(stage.ward.as_ref(), &stage.live.id).await);
    stage.end().await;
}

pub async fn commands_run_in_the_box(bench: &dyn Bench) {
    let stage = Stage::new(bench).await;
    let output = stage.run("echo out; echo err >&2; hostname; exit 7").await;
    assert_eq!(output.exit_code, 7);
    assert_eq!(output.stdout, format!("out\n{}\n", stage.live.id));
    assert_eq!(output.stderr, "err\n");
    let output = stage.run("echo kept > /root/file && cat /root/file").await;
    assert_eq!(output.stdout, "kept\n");
    stage.end().await;
}

/// A second box of the same name is refused, and the first one does not notice.
pub async fn one_id_one_box(bench: &dyn Bench) {
    let stage = Stage::new(bench).await;
    let twin = BoxSpec {
        id: stage.live.id.clone(),
        ..spec(bench, SMALL)
    };
    let error = stage.ward.start(twin).await.expect_err("the id is taken");
    assert_eq!(error.code, Code::Conflict);
    assert!(stage.run("true").await.success());
    stage.end().await;
}

pub async fn unknown_boxes_are_not_found(bench: &dyn Bench) {
    let ward = bench.ward();
    let id = SandboxId::random();
    let connected = ward.connect(&id).await;
    assert_eq!(
        connected.err().map(|error| error.code),
        Some(Code::NotFound)
    );
    let usage = ward.usage(&id).await.expect_err("no box, no usage");
    assert_eq!(usage.code, Code::NotFound);
    let limits = ward.set_limits(&id, &SMALL).await;
    assert_eq!(limits.err().map(|error| error.code), Some(Code::NotFound));
}

pub async fn a_root_that_is_not_there_leaves_nothing(bench: &dyn Bench) {
    let ward = bench.ward();
    let good = spec(bench, SMALL);
    let bad = BoxSpec {
        root: PathBuf::from("/nowhere/at/all"),
        ..good.clone()
    };
    ward.start(bad).await.expect_err("there is no such root");
    // The same id can be used at once: nothing was left in its place.
    let live = ward.start(good).await.expect("the box starts");
    ward.destroy(&live.id).await.expect("the box is destroyed");
    assert_eq!(bench.traces(&live), Vec::<String>::new());
}

pub async fn destroy_leaves_nothing(bench: &dyn Bench) {
    let stage = Stage::new(bench).await;
    // Children that ignore signals and have left their session must go, too.
    let output = stage
        .run("for n in 1 2 3; do (trap '' TERM HUP; setsid sleep 1000 >/dev/null 2>&1 &) ; done")
        .await;
    assert!(output.success(), "{output:?}");
    assert!(
        !bench.traces(&stage.live).is_empty(),
        "a live box has traces"
    );
    stage
        .ward
        .destroy(&stage.live.id)
        .await
        .expect("the box is destroyed");
    assert_eq!(bench.traces(&stage.live), Vec::<String>::new());
    let connected = stage.ward.connect(&stage.live.id).await;
    assert_eq!(
        connected.err().map(|error| error.code),
        Some(Code::NotFound)
    );
}

pub async fn destroying_twice_is_no_error(bench: &dyn Bench) {
    let stage = Stage::new(bench).await;
    let (one, other) = tokio::join!(
        stage.ward.destroy(&stage.live.id),
        stage.ward.destroy(&stage.live.id)
    );
    one.expect("the first destroy succeeds");
    other.expect("a destroy at the same time succeeds");
    stage
        .ward
        .destroy(&stage.live.id)
        .await
        .expect("a late destroy succeeds");
    stage
        .ward
        .destroy(&SandboxId::random())
        .await
        .expect("destroying what never was succeeds");
}

pub async fn many_boxes_side_by_side(bench: &dyn Bench) {
    let ward = bench.ward();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..bench.side_by_side() {
        let (ward, spec) = (Arc::clone(&ward), spec(bench, SMALL));
        tasks.spawn(async move {
            let live = ward.start(spec).await.expect("the box starts");
            let sleeper = "setsid sleep 1000 >/dev/null 2>&1 </dev/null &";
            let output = run(ward.as_ref(), &live.id, sleeper).await;
            assert!(output.success(), "{output:?}");
            live
        });
    }
    let all = tasks.join_all().await;
    for live in &all {
        let output = run(ward.as_ref(), &live.id, "hostname; pgrep -cx sleep").await;
        // A box sees its own processes only: one sleeper, not one of each box.
        assert_eq!(output.stdout, format!("{}\n1\n", live.id), "{output:?}");
    }
    let mut tasks = tokio::task::JoinSet::new();
    for live in all {
        let ward = Arc::clone(&ward);
        tasks.spawn(async move {
            ward.destroy(&live.id).await.expect("the box is destroyed");
            live
        });
    }
    for live in tasks.join_all().await {
        assert_eq!(bench.traces(&live), Vec::<String>::new());
    }
}
