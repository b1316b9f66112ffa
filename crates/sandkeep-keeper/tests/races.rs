//! Things that happen at the same time, and keys that make them one.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use sandkeep_model::{Code, Expiry, GoneReason, ListFilter, State};
use support::{World, keyed, reaches, request, story, until};

#[tokio::test(flavor = "multi_thread")]
async fn of_two_kills_one_wins() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let made = keeper.create(request()).await.unwrap();
    let kills: Vec<_> = (0..6)
        .map(|_| {
            let (keeper, id) = (keeper.clone(), made.id.clone());
            tokio::spawn(async move { keeper.kill(&id, GoneReason::Killed).await })
        })
        .collect();
    let mut won = 0;
    for kill in kills {
        match kill.await.unwrap() {
            Ok(()) => won += 1,
            Err(error) => assert_eq!(error.code, Code::NotFound),
        }
    }
    assert_eq!(won, 1);
    assert_eq!(
        story(&keeper, &made.id).await,
        ["creating", "running", "stopping", "gone: killed on request"]
    );
    world.assert_empty().await;
}

/// Closes the ward's gate, begins a creation, and waits until the box is being started.
async fn half_made(
    world: &World,
    keeper: &sandkeep_keeper::Keeper,
) -> (
    sandkeep_model::SandboxId,
    tokio::task::JoinHandle<sandkeep_model::Result<sandkeep_model::Sandbox>>,
) {
    world.ward.gate.forget_permits(usize::MAX >> 4);
    let creating = {
        let keeper = keeper.clone();
        tokio::spawn(async move { keeper.create(request()).await })
    };
    until("the ward is asked", async || {
        (world.ward.starts.load(std::sync::atomic::Ordering::SeqCst) > 0).then_some(())
    })
    .await;
    let page = keeper.list(&ListFilter::default()).await.unwrap();
    assert_eq!(page.items.len(), 1);
    assert_eq!(page.items[0].state, State::Creating);
    (page.items[0].id.clone(), creating)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_while_creating_waits_its_turn() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let (id, creating) = half_made(&world, &keeper).await;
    assert_eq!(
        keeper.connect(&id).await.err().unwrap().code,
        Code::Conflict
    );
    let kill = {
        let (keeper, id) = (keeper.clone(), id.clone());
        tokio::spawn(async move { keeper.kill(&id, GoneReason::Killed).await })
    };
    tokio::task::yield_now().await;
    world.ward.gate.add_permits(10);
    assert_eq!(creating.await.unwrap().unwrap().id, id);
    kill.await.unwrap().unwrap();
    assert_eq!(
        story(&keeper, &id).await,
        ["creating", "running", "stopping", "gone: killed on request"]
    );
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_vanishes_leaves_a_whole_box() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let mut events = keeper.subscribe();
    let (id, creating) = half_made(&world, &keeper).await;
    creating.abort();
    assert!(creating.await.unwrap_err().is_cancelled());
    world.ward.gate.add_permits(10);
    reaches(&mut events, &id, State::Running).await;
    keeper.kill(&id, GoneReason::Killed).await.unwrap();
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_finishes_what_is_under_way_and_boxes_go_on() {
    let mut world = World::new().await;
    let keeper = world.keeper().await;
    let (id, creating) = half_made(&world, &keeper).await;
    let closing = {
        let keeper = keeper.clone();
        tokio::spawn(async move { keeper.shutdown().await })
    };
    until("it refuses new work", async || {
        let nobody = sandkeep_model::SandboxId::random();
        let refused = keeper.extend(&nobody, Expiry::Never).await.err()?;
        (refused.code == Code::HostNotReady).then_some(())
    })
    .await;
    world.ward.gate.add_permits(10);
    assert_eq!(creating.await.unwrap().unwrap().id, id);
    closing.await.unwrap();
    assert_eq!(world.ward.alive(), std::slice::from_ref(&id));
    drop(keeper);
    world.forget_ward();
    let keeper = world.keeper().await;
    assert_eq!(keeper.get(&id).await.unwrap().state, State::Running);
    keeper.kill(&id, GoneReason::Killed).await.unwrap();
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_comes_and_goes_without_a_trace() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let crowd: Vec<_> = (0..24)
        .map(|_| {
            let keeper = keeper.clone();
            tokio::spawn(async move {
                let made = keeper.create(request()).await.unwrap();
                keeper.kill(&made.id, GoneReason::Killed).await.unwrap();
            })
        })
        .collect();
    for one in crowd {
        one.await.unwrap();
    }
    assert_eq!(keeper.report().await.boxes, 0);
    let events = keeper.events_after(0, None, 1000).await.unwrap();
    assert_eq!(events.len(), 24 * 4);
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_key_makes_one_box_however_often_it_is_sent() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let creates: Vec<_> = (0..8)
        .map(|_| {
            let keeper = keeper.clone();
            tokio::spawn(async move { keeper.create(keyed("one")).await.unwrap() })
        })
        .collect();
    let mut made = Vec::new();
    for create in creates {
        made.push(create.await.unwrap());
    }
    assert!(made.iter().all(|sandbox| *sandbox == made[0]));
    assert_eq!(keeper.report().await.boxes, 1);

    let mut other = keyed("one");
    other.metadata.insert("a".into(), "b".into());
    let error = keeper.create(other).await.unwrap_err();
    assert_eq!(error.code, Code::Conflict);
    assert!(error.message.contains("another request"), "{error}");

    // Also after a restart.
    keeper.shutdown().await;
    let mut world = world;
    world.forget_ward();
    let keeper = world.keeper().await;
    assert_eq!(keeper.create(keyed("one")).await.unwrap().id, made[0].id);

    keeper.kill(&made[0].id, GoneReason::Killed).await.unwrap();
    let error = keeper.create(keyed("one")).await.unwrap_err();
    assert_eq!(error.code, Code::Conflict);
    assert!(error.message.contains("is gone: killed"), "{error}");
    for bad in ["", &"k".repeat(256)] {
        let error = keeper.create(keyed(bad)).await.unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
    }
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_may_be_tried_again_when_its_box_never_was() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let failing = std::sync::atomic::Ordering::SeqCst;
    world.ward.faults.start.store(1, failing);
    let (first, second) = tokio::join!(keeper.create(keyed("k")), keeper.create(keyed("k")));
    // One of them met the fault, the other waited and then made the box.
    let (lost, won): (Vec<_>, Vec<_>) = [first, second].into_iter().partition(Result::is_err);
    assert_eq!((lost.len(), won.len()), (1, 1));
    let again = keeper.create(keyed("k")).await.unwrap();
    assert_eq!(&again, won[0].as_ref().unwrap());
    keeper.kill(&again.id, GoneReason::Killed).await.unwrap();
    world.assert_empty().await;
}
