//! Boxes that stand still.

use super::{
    bench::{Bench, Stage},
    run,
};
use crate::{Adoption, Ward};
use sandkeep_model::{Code, SandboxId};
use std::{sync::Arc, time::Duration};
use tokio::time::sleep;

/// A loop that uses the CPU and counts in a file.
const BUSY: &str = "nohup sh -c 'n=0; while :; do n=$((n+1)); echo $n > /run/count; done' \
     >/dev/null 2>&1 & echo $!";
const LOOKS: u32 = 600;

async fn cpu(ward: &Arc<dyn Ward>, id: &SandboxId) -> u64 {
    ward.usage(id).await.expect("usage is read").cpu_usec
}

/// Waits until the box has used CPU again.
async fn moves(ward: &Arc<dyn Ward>, id: &SandboxId, since: u64) {
    for _ in 0..LOOKS {
        if cpu(ward, id).await > since {
            return;
        }
        sleep(Duration::from_millis(50)).await;
    }
    panic!("the box does not go on");
}

pub(super) async fn assert_still(ward: &Arc<dyn Ward>, id: &SandboxId) {
    // What was under way on another CPU when it was stopped may still be counted.
    sleep(Duration::from_millis(200)).await;
    let before = cpu(ward, id).await;
    sleep(Duration::from_millis(500)).await;
    assert_eq!(cpu(ward, id).await, before, "a frozen box uses no CPU");
}

pub async fn a_frozen_box_stands_still_and_goes_on(bench: &dyn Bench) {
    let Stage { ward, live } = Stage::new(bench).await;
    let id = &live.id;
    let output = run(ward.as_ref(), id, BUSY).await;
    assert!(output.success(), "{output:?}");
    moves(&ward, id, cpu(&ward, id).await).await;
    ward.freeze(id).await.expect("it is frozen");
    ward.freeze(id).await.expect("it is frozen already");
    assert_still(&ward, id).await;
    let stood = cpu(&ward, id).await;
    ward.thaw(id).await.expect("it is thawed");
    ward.thaw(id).await.expect("it runs already");
    moves(&ward, id, stood).await;
    let looked = format!("kill -0 {}", output.stdout.trim());
    let output = run(ward.as_ref(), id, &looked).await;
    assert!(output.success(), "the same process: {output:?}");
    ward.destroy(id).await.expect("the box is destroyed");
}

pub async fn a_frozen_box_can_be_destroyed(bench: &dyn Bench) {
    let Stage { ward, live } = Stage::new(bench).await;
    assert!(run(ward.as_ref(), &live.id, BUSY).await.success());
    ward.freeze(&live.id).await.expect("it is frozen");
    ward.destroy(&live.id).await.expect("the box is destroyed");
    assert_eq!(bench.traces(&live), Vec::<String>::new());
}

pub async fn a_frozen_box_is_adopted(bench: &dyn Bench) {
    let Stage { ward, live } = Stage::new(bench).await;
    let output = run(ward.as_ref(), &live.id, "echo here > /run/note").await;
    assert!(output.success(), "{output:?}");
    ward.freeze(&live.id).await.expect("it is frozen");
    drop(ward);

    let ward = bench.ward();
    let found = ward.adopt(&live).await.expect("it is looked for");
    assert_eq!(found, Adoption::Alive);
    assert_still(&ward, &live.id).await;
    ward.thaw(&live.id).await.expect("it is thawed");
    let output = run(ward.as_ref(), &live.id, "cat /run/note").await;
    assert_eq!(output.stdout, "here\n", "the same box, with its memory");
    ward.freeze(&live.id).await.expect("it is frozen again");
    drop(ward);

    // A box nobody knows any more goes, frozen or not.
    let ward = bench.ward();
    ward.sweep(&std::collections::HashSet::new())
        .await
        .expect("the host is swept");
    assert_eq!(bench.traces(&live), Vec::<String>::new());
}

pub async fn freezing_what_is_not_there_is_refused(bench: &dyn Bench) {
    let ward = bench.ward();
    let nobody = SandboxId::random();
    let frozen = ward.freeze(&nobody).await.expect_err("there is no box");
    assert_eq!(frozen.code, Code::NotFound);
    let thawed = ward.thaw(&nobody).await.expect_err("there is no box");
    assert_eq!(thawed.code, Code::NotFound);
}
