//! The warm pool.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::{collections::BTreeMap, sync::atomic::Ordering};

use sandkeep_model::{Code, GoneReason, LimitsWish, ListFilter, SandboxId, State};
use support::{World, agent, envs, pooled, request, story, until};

async fn world(size: usize) -> World {
    let mut world = World::new().await;
    world.config.pool.size = size;
    world
}

/// Ends everything, pool included, by opening the ledger with no pool.
async fn clear(mut world: World, keeper: sandkeep_keeper::Keeper) {
    for sandbox in keeper.list(&ListFilter::default()).await.unwrap().items {
        keeper.kill(&sandbox.id, GoneReason::Killed).await.unwrap();
    }
    keeper.shutdown().await;
    world.config.pool.size = 0;
    world.forget_ward();
    let _keeper = world.keeper().await;
    until("nothing is left", async || {
        let none = world.ward.alive().is_empty() && world.vault.disks().await.unwrap().is_empty();
        none.then_some(())
    })
    .await;
}

fn in_pool(world: &World) -> Vec<SandboxId> {
    let mut alive = world.ward.alive();
    alive.sort();
    alive
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_panics_does_not_end_the_filling() {
    let world = world(1).await;
    world.ward.faults.panic.store(1, Ordering::SeqCst);
    let keeper = world.keeper().await;
    pooled(&keeper, 1).await;
    assert_eq!(in_pool(&world).len(), 1);
    assert_eq!(world.ward.starts.load(Ordering::SeqCst), 2);
    clear(world, keeper).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_takes_a_waiting_box_and_the_pool_fills_again() {
    let world = world(2).await;
    let keeper = world.keeper().await;
    pooled(&keeper, 2).await;
    let waiting = in_pool(&world);
    // For clients there is nothing yet.
    assert!(
        keeper
            .list(&ListFilter::default())
            .await
            .unwrap()
            .items
            .is_empty()
    );
    assert!(keeper.events_after(0, None, 10).await.unwrap().is_empty());
    for id in &waiting {
        assert_eq!(keeper.get(id).await.unwrap_err().code, Code::NotFound);
        assert_eq!(keeper.get_any(id).await.unwrap_err().code, Code::NotFound);
        assert_eq!(
            keeper.kill(id, GoneReason::Killed).await.unwrap_err().code,
            Code::NotFound
        );
        assert!(keeper.access_token(id).is_none());
    }

    let mut wish = request();
    wish.metadata = BTreeMap::from([("who".into(), "me".into())]);
    let made = keeper.create(wish).await.unwrap();
    assert!(waiting.contains(&made.id));
    assert!(made.started_at >= made.created_at);
    assert_eq!(made.metadata["who"], "me");
    assert_eq!(keeper.access_token(&made.id).unwrap(), made.access_token);
    assert_eq!(story(&keeper, &made.id).await, ["running"]);
    let env = envs(&keeper, &made.id).await;
    assert_eq!(env["COLOUR"], "blue");
    assert_eq!(env["E2B_SANDBOX_ID"], made.id.as_str());
    assert_eq!(keeper.get(&made.id).await.unwrap(), made);

    pooled(&keeper, 2).await;
    assert_eq!(keeper.report().await.boxes, 1);
    clear(world, keeper).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn other_limits_are_set_on_a_waiting_box() {
    let world = world(1).await;
    let keeper = world.keeper().await;
    pooled(&keeper, 1).await;
    let waiting = in_pool(&world);
    let mut wish = request();
    wish.limits = LimitsWish {
        memory_mib: Some(77),
        disk_mib: Some(33),
        ..LimitsWish::default()
    };
    let made = keeper.create(wish).await.unwrap();
    assert_eq!(waiting, std::slice::from_ref(&made.id));
    assert_eq!(made.limits.memory_mib, 77);
    assert_eq!(world.ward.limits.lock().unwrap()[&made.id], made.limits);
    let disk = keeper.samples(&made.id, None, None).await.unwrap();
    assert_eq!(disk[0].disk_total, 33 << 20);
    clear(world, keeper).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_box_that_is_not_fit_is_replaced() {
    let world = world(1).await;
    let keeper = world.keeper().await;
    pooled(&keeper, 1).await;
    let waiting = in_pool(&world);
    world.ward.faults.set_limits.store(1, Ordering::SeqCst);
    let mut wish = request();
    wish.limits.memory_mib = Some(77);
    let made = keeper.create(wish).await.unwrap();
    assert_ne!(waiting, std::slice::from_ref(&made.id));
    assert_eq!(made.limits.memory_mib, 77);
    agent(&keeper, &made.id).await.health().await.unwrap();
    let first = keeper.get_any(&waiting[0]).await.unwrap();
    assert_eq!(first.state, State::Gone);
    assert!(matches!(first.gone, Some(GoneReason::CreateFailed { .. })));
    clear(world, keeper).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_box_that_dies_is_replaced() {
    let world = world(1).await;
    let keeper = world.keeper().await;
    pooled(&keeper, 1).await;
    let waiting = in_pool(&world);
    let pid = rustix::process::Pid::from_raw(world.ward.pid(&waiting[0])).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    until("another waiting box", async || {
        let now = in_pool(&world);
        (now.len() == 1 && now != waiting).then_some(())
    })
    .await;
    pooled(&keeper, 1).await;
    assert!(keeper.events_after(0, None, 10).await.unwrap().is_empty());
    clear(world, keeper).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pool_gives_way_on_a_full_server() {
    let mut world = world(2).await;
    world.config.max_boxes = 3;
    world.import("other").await;
    let keeper = world.keeper().await;
    pooled(&keeper, 2).await;
    let mut other = request();
    other.template = "other".parse().unwrap();
    let mut made = Vec::new();
    for _ in 0..3 {
        made.push(keeper.create(other.clone()).await.unwrap());
        let report = keeper.report().await;
        assert!(report.boxes + report.pooled <= 3);
    }
    let error = keeper.create(other).await.unwrap_err();
    assert_eq!(error.code, Code::ResourceExhausted);
    pooled(&keeper, 0).await;
    // Room again, and the pool takes it.
    keeper.kill(&made[0].id, GoneReason::Killed).await.unwrap();
    pooled(&keeper, 1).await;
    clear(world, keeper).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_creates_at_once_never_share_a_box() {
    let world = world(3).await;
    let keeper = world.keeper().await;
    pooled(&keeper, 3).await;
    let creates: Vec<_> = (0..12)
        .map(|_| {
            let keeper = keeper.clone();
            tokio::spawn(async move { keeper.create(request()).await.unwrap() })
        })
        .collect();
    let mut ids = Vec::new();
    for create in creates {
        ids.push(create.await.unwrap().id);
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 12);
    pooled(&keeper, 3).await;
    assert_eq!(in_pool(&world).len(), 15);
    clear(world, keeper).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_boxes_survive_a_restart_and_the_surplus_ends() {
    let mut world = world(3).await;
    let keeper = world.keeper().await;
    pooled(&keeper, 3).await;
    let waiting = in_pool(&world);
    keeper.shutdown().await;

    world.forget_ward();
    world.config.pool.size = 2;
    let keeper = world.keeper().await;
    let kept = until("the surplus is ended", async || {
        let alive = in_pool(&world);
        (alive.len() == 2).then_some(alive)
    })
    .await;
    pooled(&keeper, 2).await;
    assert!(kept.iter().all(|id| waiting.contains(id)));
    assert_eq!(world.ward.starts.load(Ordering::SeqCst), 0);
    let made = keeper.create(request()).await.unwrap();
    assert!(waiting.contains(&made.id));
    assert_eq!(envs(&keeper, &made.id).await["COLOUR"], "blue");
    clear(world, keeper).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_made_anew_makes_the_pool_anew() {
    let world = world(1).await;
    let keeper = world.keeper().await;
    pooled(&keeper, 1).await;
    let old = in_pool(&world);
    let base = "base".parse().unwrap();
    world.vault.remove_template(&base).await.unwrap();
    world.import("base").await;
    let made = keeper.create(request()).await.unwrap();
    assert!(!old.contains(&made.id));
    keeper.shutdown().await;

    // The same after a restart.
    world.vault.remove_template(&base).await.unwrap();
    world.import("base").await;
    let mut world = world;
    world.forget_ward();
    let keeper = world.keeper().await;
    pooled(&keeper, 1).await;
    assert!(in_pool(&world).iter().all(|id| !old.contains(id)));
    clear(world, keeper).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_can_not_be_filled_leaves_nothing_and_tries_again() {
    let world = world(1).await;
    world.ward.faults.start.store(1, Ordering::SeqCst);
    let keeper = world.keeper().await;
    pooled(&keeper, 1).await;
    until("it settles", async || {
        (world.vault.disks().await.unwrap().len() == 1).then_some(())
    })
    .await;
    assert_eq!(world.ward.starts.load(Ordering::SeqCst), 2);
    assert!(keeper.events_after(0, None, 10).await.unwrap().is_empty());
    clear(world, keeper).await;
}
