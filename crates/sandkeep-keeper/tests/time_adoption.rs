//! The server dies in the middle of pauses, wake-ups and rollbacks.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::{fs, sync::atomic::Ordering};

use sandkeep_keeper::{PauseWish, PointWish};
use sandkeep_model::{Pause, PauseMode, PointId, Sandbox, State, Timestamp};
use sandkeep_store::{Store, TimeStep, WardNote};
use sandkeep_vault::Keep;
use support::{World, agent, reaches, request, runs, stopped, until};

fn dies<T: Send + 'static>(world: &World, work: impl AsyncFnOnce(&World) -> T) -> T {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let done = runtime.block_on(work(world));
    runtime.shutdown_background();
    done
}

fn next<T>(world: &mut World, work: impl AsyncFnOnce(&World) -> T) -> T {
    let engine = world.ward.has_engine.load(Ordering::SeqCst);
    world.forget_ward();
    world.ward.has_engine.store(engine, Ordering::SeqCst);
    tokio::runtime::Runtime::new()
        .unwrap()
        .block_on(work(world))
}

fn world(engine: bool) -> World {
    let world = tokio::runtime::Runtime::new()
        .unwrap()
        .block_on(World::new());
    world.ward.has_engine.store(engine, Ordering::SeqCst);
    world
}

async fn paused(world: &World, wish: PauseWish) -> (Sandbox, i32) {
    let keeper = world.keeper().await;
    let made = keeper.create(request()).await.unwrap();
    let pid = world.ward.pid(&made.id);
    (keeper.pause(&made.id, wish).await.unwrap(), pid)
}

/// Puts the ledger into the state a server left that died half-way.
async fn rewind(world: &World, row: &Sandbox, to: State, pause: Option<Pause>) {
    let store = Store::open(world.ledger()).await.unwrap();
    let mut time = row.time.clone();
    time.pause = pause;
    let step = TimeStep {
        from: row.state,
        to,
        time: &time,
        ward: WardNote::Keep,
        end_at: row.end_at,
        also: None,
    };
    assert!(store.step(&row.id, step).await.unwrap());
}

#[test]
fn boxes_that_rest_are_found_resting_and_can_be_woken() {
    for (engine, wish, expected) in [
        (false, PauseWish::Memory, PauseMode::Ram),
        (true, PauseWish::Memory, PauseMode::Disk),
        (false, PauseWish::Files, PauseMode::Filesystem),
    ] {
        let mut world = world(engine);
        let (row, pid) = dies(&world, async |world| paused(world, wish).await);
        next(&mut world, async |world| {
            let keeper = world.keeper().await;
            let found = keeper.get(&row.id).await.unwrap();
            assert_eq!(found, row, "{expected:?}");
            assert_eq!(found.time.pause.unwrap().mode, expected);
            assert_eq!(runs(pid), expected == PauseMode::Ram);
            keeper.resume(&row.id, None, true).await.unwrap();
            agent(&keeper, &row.id).await.health().await.unwrap();
        });
    }
}

#[test]
fn a_frozen_box_whose_host_was_restarted_keeps_its_files() {
    let mut world = world(false);
    let (row, pid) = dies(&world, async |world| {
        let (row, pid) = paused(world, PauseWish::Memory).await;
        let disk = world.vault.disk(&row.id).await.unwrap().path;
        fs::write(disk.join("note"), "kept").unwrap();
        (row, pid)
    });
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process_group(pid, rustix::process::Signal::KILL).unwrap();
    next(&mut world, async |world| {
        until("the process is gone", async || {
            (!runs(pid.as_raw_nonzero().get())).then_some(())
        })
        .await;
        let keeper = world.keeper().await;
        let found = keeper.get(&row.id).await.unwrap();
        let pause = found.time.pause.unwrap();
        assert_eq!(pause.mode, PauseMode::Filesystem);
        assert!(pause.why.unwrap().contains("memory was lost"));
        keeper.resume(&row.id, None, true).await.unwrap();
        let disk = world.vault.disk(&row.id).await.unwrap().path;
        assert_eq!(fs::read_to_string(disk.join("note")).unwrap(), "kept");
    });
}

#[test]
fn a_box_that_was_being_paused_goes_on() {
    let mut world = world(true);
    let (row, pid) = dies(&world, async |world| {
        let keeper = world.keeper().await;
        let row = keeper.create(request()).await.unwrap();
        let pid = world.ward.pid(&row.id);
        let group = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process_group(group, rustix::process::Signal::STOP).unwrap();
        assert!(stopped(pid));
        // The memory was written already; nobody had been told.
        let draft = world.vault.begin_point(PointId::random()).await.unwrap();
        let draft = world.vault.take_disk(draft, &row.id).await.unwrap();
        world
            .vault
            .publish_point(draft, &row.id, Keep::ForGood)
            .await
            .unwrap();
        rewind(world, &row, State::Pausing, None).await;
        (row, pid)
    });
    next(&mut world, async |world| {
        let keeper = world.keeper().await;
        let found = keeper.get(&row.id).await.unwrap();
        assert_eq!(found.state, State::Running);
        assert!(runs(pid));
        agent(&keeper, &row.id).await.health().await.unwrap();
        assert_eq!(world.vault.points().await.unwrap(), []);
    });
}

#[test]
fn a_wake_up_or_rollback_that_was_cut_off_is_finished() {
    let mut world = world(false);
    let (row, point, pid) = dies(&world, async |world| {
        let keeper = world.keeper().await;
        let made = keeper.create(request()).await.unwrap();
        let disk = world.vault.disk(&made.id).await.unwrap().path;
        fs::write(disk.join("note"), "then").unwrap();
        let point = keeper
            .snapshot(&made.id, PointWish::default())
            .await
            .unwrap();
        fs::write(disk.join("note"), "now").unwrap();
        let row = keeper.get(&made.id).await.unwrap();
        let pause = Pause {
            mode: PauseMode::Filesystem,
            why: None,
            point: Some(point.id.clone()),
            touched: true,
            at: Timestamp::now(),
        };
        // As a rollback leaves it that died right after its first word.
        rewind(world, &row, State::Resuming, Some(pause)).await;
        (row, point, world.ward.pid(&made.id))
    });
    next(&mut world, async |world| {
        let store = Store::open(world.ledger()).await.unwrap();
        let mut events = store.subscribe();
        let keeper = world.keeper_with(store).await;
        reaches(&mut events, &row.id, State::Running).await;
        assert!(!runs(pid), "what it was is gone");
        let disk = world.vault.disk(&row.id).await.unwrap().path;
        assert_eq!(fs::read_to_string(disk.join("note")).unwrap(), "then");
        agent(&keeper, &row.id).await.health().await.unwrap();
        let kept = keeper.points(Some(&row.id)).await.unwrap();
        assert_eq!(kept, std::slice::from_ref(&point));
    });
}

#[test]
fn points_nobody_knows_are_swept_and_known_ones_stay() {
    let mut world = world(false);
    let point = dies(&world, async |world| {
        let keeper = world.keeper().await;
        let made = keeper.create(request()).await.unwrap();
        let draft = world.vault.begin_point(PointId::random()).await.unwrap();
        let draft = world.vault.take_disk(draft, &made.id).await.unwrap();
        world
            .vault
            .publish_point(draft, &made.id, Keep::ForGood)
            .await
            .unwrap();
        keeper
            .snapshot(&made.id, PointWish::default())
            .await
            .unwrap()
    });
    next(&mut world, async |world| {
        let keeper = world.keeper().await;
        assert_eq!(
            world.vault.points().await.unwrap(),
            std::slice::from_ref(&point.id)
        );
        let all = keeper.points(None).await.unwrap();
        assert_eq!(all, std::slice::from_ref(&point));
    });
}
