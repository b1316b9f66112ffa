//! Pauses, points, forks and rollbacks.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::{fs, path::PathBuf, sync::atomic::Ordering, time::Duration};

use sandkeep_keeper::{ForkWish, Keeper, PauseWish, PointUse, PointWish};
use sandkeep_model::{
    Code, CreateSandbox, Expiry, GoneReason, OnTimeout, PauseMode, SandboxId, State, TimeWish,
};
use support::{World, agent, envs, reaches, request, runs, stopped, story, until};

async fn disk(world: &World, id: &SandboxId) -> PathBuf {
    world.vault.disk(id).await.unwrap().path
}

async fn note(world: &World, id: &SandboxId, text: &str) {
    fs::write(disk(world, id).await.join("note"), text).unwrap();
}

async fn noted(world: &World, id: &SandboxId) -> String {
    fs::read_to_string(disk(world, id).await.join("note")).unwrap()
}

fn mode(sandbox: &sandkeep_model::Sandbox) -> PauseMode {
    sandbox.time.pause.as_ref().unwrap().mode
}

fn fork(count: u32) -> ForkWish {
    ForkWish {
        count,
        at: None,
        memory: None,
        expiry: None,
    }
}

async fn well(keeper: &Keeper, id: &SandboxId) {
    agent(keeper, id).await.health().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_not_be_written_stays_in_memory_and_says_why() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let made = keeper.create(request()).await.unwrap();
    let id = &made.id;
    let pid = world.ward.pid(id);
    let closed = keeper.closed(id);
    let paused = keeper.pause(id, PauseWish::Memory).await.unwrap();
    assert_eq!(paused.state, State::Paused);
    assert_eq!(mode(&paused), PauseMode::Ram);
    let why = paused.time.pause.unwrap().why.unwrap();
    assert!(why.contains("no engine"), "{why}");
    closed.await;
    assert!(stopped(pid));
    assert_eq!(keeper.access_token(id), None);
    let refused = keeper.connect(id).await.err().unwrap();
    assert_eq!(refused.code, Code::Conflict);
    assert!(refused.hint.unwrap().contains("resume"));
    let again = keeper.pause(id, PauseWish::Memory).await.unwrap_err();
    assert_eq!(again.code, Code::Conflict);

    let awake = keeper.resume(id, None, true).await.unwrap();
    assert_eq!(awake.state, State::Running);
    assert_eq!(awake.time.pause, None);
    assert_eq!(awake.access_token, made.access_token);
    assert_eq!(world.ward.pid(id), pid, "the same processes");
    well(&keeper, id).await;
    let running = keeper.resume(id, None, true).await.unwrap_err();
    assert_eq!(running.code, Code::Conflict);
    assert_eq!(
        story(&keeper, id).await,
        [
            "creating", "running", "pausing", "paused", "paused", "resuming", "running"
        ]
    );
    keeper.kill(id, GoneReason::Killed).await.unwrap();
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_goes_to_the_disk_and_comes_back() {
    let world = World::new().await;
    world.ward.has_engine.store(true, Ordering::SeqCst);
    let keeper = world.keeper().await;
    let made = keeper.create(request()).await.unwrap();
    let id = &made.id;
    note(&world, id, "kept").await;
    let pid = world.ward.pid(id);
    let paused = keeper.pause(id, PauseWish::Memory).await.unwrap();
    assert_eq!(mode(&paused), PauseMode::Disk);
    assert!(!runs(pid), "nothing of it is left in memory");
    let points = world.vault.points().await.unwrap();
    assert_eq!(points.len(), 1);
    assert!(keeper.points(Some(id)).await.unwrap().is_empty());
    let needed = keeper.delete_point(&points[0]).await.unwrap_err();
    assert_eq!(needed.code, Code::Conflict);

    // A wake-up that fails leaves the box at rest, and the next one works.
    world.ward.faults.restore.store(1, Ordering::SeqCst);
    keeper.resume(id, None, true).await.unwrap_err();
    assert_eq!(keeper.get(id).await.unwrap().state, State::Paused);
    note(&world, id, "half a wake-up wrote this").await;
    keeper.resume(id, None, true).await.unwrap();
    assert_eq!(world.ward.restores.load(Ordering::SeqCst), 1);
    assert_eq!(noted(&world, id).await, "kept", "memory and disk fit");
    well(&keeper, id).await;
    until("the pause is gone", async || {
        world.vault.points().await.unwrap().is_empty().then_some(())
    })
    .await;

    // Killed while it rests: nothing stays.
    keeper.pause(id, PauseWish::Memory).await.unwrap();
    keeper.kill(id, GoneReason::Killed).await.unwrap();
    assert_eq!(world.vault.points().await.unwrap(), []);
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files_alone_and_a_cold_start() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let made = keeper.create(request()).await.unwrap();
    let id = &made.id;
    note(&world, id, "kept").await;
    let pid = world.ward.pid(id);
    let paused = keeper.pause(id, PauseWish::Files).await.unwrap();
    assert_eq!(mode(&paused), PauseMode::Filesystem);
    assert!(!runs(pid));
    assert!(paused.end_at.is_some(), "when it was paused");
    let expiry = Expiry::After(Duration::from_secs(1000));
    let awake = keeper.resume(id, Some(expiry), true).await.unwrap();
    assert!(awake.end_at.unwrap().remaining() > Duration::from_secs(900));
    assert_eq!(noted(&world, id).await, "kept");
    assert_eq!(envs(&keeper, id).await["COLOUR"], "blue");
    keeper.kill(id, GoneReason::Killed).await.unwrap();
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_that_fails_leaves_the_box_running() {
    let world = World::new().await;
    world.ward.has_engine.store(true, Ordering::SeqCst);
    let keeper = world.keeper().await;
    let made = keeper.create(request()).await.unwrap();
    world.ward.faults.freeze.store(1, Ordering::SeqCst);
    keeper.pause(&made.id, PauseWish::Memory).await.unwrap_err();
    assert_eq!(keeper.get(&made.id).await.unwrap().state, State::Running);
    well(&keeper, &made.id).await;
    // The engine refuses this very box: it is frozen and says so.
    world.ward.faults.save.store(1, Ordering::SeqCst);
    let paused = keeper.pause(&made.id, PauseWish::Memory).await.unwrap();
    assert_eq!(mode(&paused), PauseMode::Ram);
    assert_eq!(world.vault.points().await.unwrap(), []);
    keeper.resume(&made.id, None, true).await.unwrap();
    well(&keeper, &made.id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollback_keeps_who_the_box_is() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let made = keeper.create(request()).await.unwrap();
    let id = &made.id;
    note(&world, id, "then").await;
    let wish = PointWish {
        name: Some("good".to_owned()),
        ..PointWish::default()
    };
    let point = keeper.snapshot(id, wish).await.unwrap();
    assert!(!point.has_memory());
    assert_eq!(keeper.get(id).await.unwrap().state, State::Running);
    for name in ["note", "etc/passwd"] {
        fs::remove_file(disk(&world, id).await.join(name)).unwrap();
    }
    let back = keeper.rollback(id, &point.id).await.unwrap();
    assert_eq!((&back.id, &back.access_token), (id, &made.access_token));
    assert_eq!(back.state, State::Running);
    assert_eq!(back.time.head.as_ref(), Some(&point.id));
    assert_eq!(back.end_at, made.end_at);
    assert_eq!(noted(&world, id).await, "then");
    well(&keeper, id).await;
    let called = keeper
        .named_point("good", None, PointUse::Read)
        .await
        .unwrap();
    assert_eq!(called.id, point.id, "the point stays");

    // From a pause, too; and children know their parents.
    let next = keeper.snapshot(id, PointWish::default()).await.unwrap();
    assert_eq!(next.parent.as_ref(), Some(&point.id));
    keeper.pause(id, PauseWish::Memory).await.unwrap();
    note(&world, id, "later").await;
    let back = keeper.rollback(id, &next.id).await.unwrap();
    assert_eq!(back.state, State::Running);
    assert_eq!(noted(&world, id).await, "then");
    well(&keeper, id).await;
    keeper.delete_point(&point.id).await.unwrap();
    assert_eq!(keeper.points(Some(id)).await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_of_a_foreign_engine_is_refused_and_the_box_is_not_touched() {
    let world = World::new().await;
    world.ward.has_engine.store(true, Ordering::SeqCst);
    let keeper = world.keeper().await;
    let made = keeper.create(request()).await.unwrap();
    let point = keeper
        .snapshot(&made.id, PointWish::default())
        .await
        .unwrap();
    assert!(point.has_memory());
    well(&keeper, &made.id).await;
    let pid = world.ward.pid(&made.id);
    world.ward.engine_build.store(2, Ordering::SeqCst);
    let refused = keeper.rollback(&made.id, &point.id).await.unwrap_err();
    assert_eq!(refused.code, Code::NotEnforceable);
    assert!(refused.message.contains("bare 1"), "{refused}");
    assert_eq!(world.ward.pid(&made.id), pid);
    well(&keeper, &made.id).await;
    world.ward.engine_build.store(1, Ordering::SeqCst);
    keeper.rollback(&made.id, &point.id).await.unwrap();
    assert_eq!(world.ward.restores.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn forks_are_apart_from_each_other_and_from_their_source() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let made = keeper.create(request()).await.unwrap();
    note(&world, &made.id, "shared").await;
    let forks: Vec<_> = keeper
        .fork(&made.id, fork(3))
        .await
        .unwrap()
        .made
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert_eq!(forks.len(), 3);
    let mut tokens: Vec<_> = forks.iter().map(|f| f.access_token.expose()).collect();
    tokens.push(made.access_token.expose());
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), 4);
    for one in &forks {
        assert_eq!(noted(&world, &one.id).await, "shared");
        let env = envs(&keeper, &one.id).await;
        assert_eq!(env["E2B_SANDBOX_ID"], one.id.as_str());
        assert_eq!(env["COLOUR"], "blue");
        note(&world, &one.id, one.id.as_str()).await;
    }
    assert_eq!(noted(&world, &made.id).await, "shared");
    assert_eq!(world.vault.points().await.unwrap(), []);
    for bad in [0, 21] {
        let refused = keeper.fork(&made.id, fork(bad)).await.unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("count"));
    }
    for id in forks.iter().map(|fork| &fork.id).chain([&made.id]) {
        keeper.kill(id, GoneReason::Killed).await.unwrap();
    }
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_point_outlives_its_box_and_what_is_made_from_it_outlives_the_point() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let made = keeper.create(request()).await.unwrap();
    note(&world, &made.id, "old").await;
    let point = keeper
        .snapshot(&made.id, PointWish::default())
        .await
        .unwrap();
    keeper.kill(&made.id, GoneReason::Killed).await.unwrap();
    let wish = || CreateSandbox {
        time: TimeWish {
            from_point: Some(point.id.clone()),
            ..TimeWish::default()
        },
        ..request()
    };
    let child = keeper.create(wish()).await.unwrap();
    assert_eq!(child.time.head.as_ref(), Some(&point.id));
    keeper.delete_point(&point.id).await.unwrap();
    let gone = keeper.delete_point(&point.id).await.unwrap_err();
    assert_eq!(gone.code, Code::NotFound);
    assert_eq!(noted(&world, &child.id).await, "old");
    well(&keeper, &child.id).await;
    let refused = keeper.create(wish()).await.unwrap_err();
    assert_eq!(refused.code, Code::NotFound);
}

fn wakes_by_itself() -> CreateSandbox {
    CreateSandbox {
        time: TimeWish {
            auto_resume: true,
            ..TimeWish::default()
        },
        ..request()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_who_want_a_sleeping_box_wake_it_once() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let made = keeper.create(wakes_by_itself()).await.unwrap();
    keeper.pause(&made.id, PauseWish::Files).await.unwrap();
    let token = keeper.access_token(&made.id).unwrap();
    assert_eq!(token, made.access_token, "who may wake it can be checked");
    let starts = world.ward.starts.load(Ordering::SeqCst);
    let visits: Vec<_> = (0..20)
        .map(|_| {
            let (keeper, id) = (keeper.clone(), made.id.clone());
            tokio::spawn(async move { well(&keeper, &id).await })
        })
        .collect();
    for visit in visits {
        visit.await.unwrap();
    }
    assert_eq!(world.ward.starts.load(Ordering::SeqCst), starts + 1);
    let told = story(&keeper, &made.id).await;
    assert_eq!(told.iter().filter(|word| *word == "resuming").count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wake_up_that_failed_was_tried_again_for_everybody_who_waited() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let made = keeper.create(wakes_by_itself()).await.unwrap();
    keeper.pause(&made.id, PauseWish::Files).await.unwrap();
    let starts = world.ward.starts.load(Ordering::SeqCst);
    world.ward.gate.forget_permits(usize::MAX >> 4);
    world.ward.faults.start.store(20, Ordering::SeqCst);
    let visits: Vec<_> = (0..20)
        .map(|nth| {
            let (keeper, id) = (keeper.clone(), made.id.clone());
            tokio::spawn(async move {
                match nth % 2 {
                    0 => keeper.awake(&id).await.unwrap_err(),
                    _ => keeper.resume(&id, None, true).await.unwrap_err(),
                }
            })
        })
        .collect();
    while world.ward.starts.load(Ordering::SeqCst) == starts {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // All of them are there by now; the one who tries is held up.
    tokio::time::sleep(Duration::from_millis(500)).await;
    world.ward.gate.add_permits(100);
    for visit in visits {
        let error = visit.await.unwrap();
        assert!(error.message.contains("told to fail"), "{error}");
    }
    assert_eq!(world.ward.starts.load(Ordering::SeqCst), starts + 1);
    assert_eq!(keeper.get(&made.id).await.unwrap().state, State::Paused);

    // Whoever comes later is not answered with what was.
    world.ward.faults.start.store(0, Ordering::SeqCst);
    keeper.awake(&made.id).await.unwrap();
    well(&keeper, &made.id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_box_may_pause_at_its_timeout() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let mut events = keeper.subscribe();
    let wish = CreateSandbox {
        expiry: Expiry::After(Duration::from_secs(1)),
        on_timeout: OnTimeout::Pause,
        ..wakes_by_itself()
    };
    let made = keeper.create(wish).await.unwrap();
    reaches(&mut events, &made.id, State::Paused).await;
    well(&keeper, &made.id).await;
    // And again when the time it was made with is over once more.
    reaches(&mut events, &made.id, State::Running).await;
    reaches(&mut events, &made.id, State::Paused).await;
    keeper.kill(&made.id, GoneReason::Killed).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_box_nobody_wants_is_put_to_rest() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let mut events = keeper.subscribe();
    let wish = CreateSandbox {
        time: TimeWish {
            idle_seconds: Some(1),
            auto_resume: true,
            ..TimeWish::default()
        },
        ..request()
    };
    let made = keeper.create(wish).await.unwrap();
    reaches(&mut events, &made.id, State::Paused).await;
    well(&keeper, &made.id).await;
    reaches(&mut events, &made.id, State::Running).await;
}
