//! The server goes away and comes back.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::{sync::atomic::Ordering, time::Duration};

use sandkeep_keeper::EgressWish;
use sandkeep_moat::{Moat, MoatConfig, policy::Policy};
use sandkeep_model::{Expiry, GoneReason, Sandbox, SandboxId, State};
use sandkeep_ward::Ward;
use support::{NETWORK_PERMITS, World, agent, request, story, until};

/// Runs `work` in a server that is then ended the hard way: nothing is awaited.
fn in_a_server_that_dies<T: Send + 'static>(
    world: &World,
    work: impl AsyncFnOnce(&World) -> T,
) -> T {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let done = runtime.block_on(work(world));
    runtime.shutdown_background();
    done
}

/// A server with a moat, which works on the runtime of the server.
fn server_with_moat(world: &mut World) -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _here = runtime.enter();
    world.config.network.moat = Some(Moat::new(MoatConfig::default()));
    runtime
}

fn on_a_new_server<T>(world: &mut World, work: impl AsyncFnOnce(&World) -> T) -> T {
    world.forget_ward();
    tokio::runtime::Runtime::new()
        .unwrap()
        .block_on(work(world))
}

fn new_world() -> World {
    tokio::runtime::Runtime::new()
        .unwrap()
        .block_on(World::new())
}

async fn create(world: &World, expiry: Expiry) -> Sandbox {
    let keeper = world.keeper().await;
    let mut wish = request();
    wish.expiry = expiry;
    keeper.create(wish).await.unwrap()
}

#[test]
fn boxes_go_on_and_are_found_again() {
    let mut world = new_world();
    let made = in_a_server_that_dies(&world, async |world| create(world, Expiry::Never).await);
    on_a_new_server(&mut world, async |world| {
        assert_eq!(world.ward.alive(), std::slice::from_ref(&made.id));
        let keeper = world.keeper().await;
        assert_eq!(keeper.get(&made.id).await.unwrap(), made);
        assert_eq!(keeper.access_token(&made.id).unwrap(), made.access_token);
        agent(&keeper, &made.id).await.health().await.unwrap();
        assert_eq!(
            story(&keeper, &made.id).await,
            ["creating", "running", "adopted"]
        );
        keeper.kill(&made.id, GoneReason::Killed).await.unwrap();
        world.assert_empty().await;
    });
}

#[test]
fn what_died_meanwhile_is_told() {
    let mut world = new_world();
    let made = in_a_server_that_dies(&world, async |world| {
        let made = create(world, Expiry::Never).await;
        world.ward.destroy(&made.id).await.unwrap();
        made
    });
    on_a_new_server(&mut world, async |world| {
        let keeper = world.keeper().await;
        let gone = keeper.get_any(&made.id).await.unwrap();
        assert_eq!(gone.gone, Some(GoneReason::LostWhileServerWasDown));
        assert!(gone.gone_at.is_some());
        world.assert_empty().await;
    });
}

#[test]
fn time_that_ran_out_meanwhile_has_run_out() {
    let mut world = new_world();
    let second = Expiry::After(Duration::from_secs(1));
    let made = in_a_server_that_dies(&world, async |world| create(world, second).await);
    std::thread::sleep(made.end_at.unwrap().remaining());
    on_a_new_server(&mut world, async |world| {
        let keeper = world.keeper().await;
        until("it is gone", async || {
            let found = keeper.get_any(&made.id).await.unwrap();
            (found.gone == Some(GoneReason::Expired) && found.gone_at.is_some()).then_some(())
        })
        .await;
        world.assert_empty().await;
    });
}

#[test]
fn half_made_boxes_are_swept() {
    let mut world = new_world();
    in_a_server_that_dies(&world, async |world| {
        let keeper = world.keeper().await;
        world.ward.gate.forget_permits(usize::MAX >> 4);
        tokio::spawn(async move { keeper.create(request()).await });
        until("the ward is asked", async || {
            let asked = world.ward.starts.load(Ordering::SeqCst) > 0;
            (asked && !world.vault.disks().await.unwrap().is_empty()).then_some(())
        })
        .await;
    });
    on_a_new_server(&mut world, async |world| {
        let id: SandboxId = world.vault.disks().await.unwrap()[0].clone();
        let keeper = world.keeper().await;
        let gone = keeper.get_any(&id).await.unwrap();
        assert_eq!(gone.gone, Some(GoneReason::CreateInterrupted));
        assert_eq!(
            story(&keeper, &id).await,
            [
                "creating",
                "gone: the server stopped while it was being created"
            ]
        );
        world.assert_empty().await;
        assert_eq!(keeper.report().await.boxes, 0);
    });
}

#[test]
fn an_end_that_was_begun_is_finished() {
    let mut world = new_world();
    let made = in_a_server_that_dies(&world, async |world| {
        let made = create(world, Expiry::Never).await;
        let store = sandkeep_store::Store::open(world.ledger()).await.unwrap();
        store
            .begin_stop(&made.id, State::Running, &GoneReason::Expired, None)
            .await
            .unwrap()
            .unwrap();
        made
    });
    on_a_new_server(&mut world, async |world| {
        let keeper = world.keeper().await;
        let gone = keeper.get_any(&made.id).await.unwrap();
        assert_eq!(gone.state, State::Gone);
        assert_eq!(gone.gone, Some(GoneReason::Expired));
        world.assert_empty().await;
    });
}

#[test]
fn what_nobody_knows_is_removed() {
    let mut world = new_world();
    on_a_new_server(&mut world, async |world| {
        let nobody = SandboxId::random();
        let base = "base".parse().unwrap();
        let disk = world
            .vault
            .create_disk(&nobody, &base, 1 << 20)
            .await
            .unwrap();
        world
            .ward
            .start(sandkeep_ward::BoxSpec {
                id: nobody.clone(),
                root: disk.path,
                limits: sandkeep_model::Limits::default(),
                hostname: "nobody".into(),
                introduction: None,
            })
            .await
            .unwrap();
        let _keeper = world.keeper().await;
        assert_eq!(world.ward.alive(), []);
        until("its disk is removed", async || {
            world.vault.disks().await.unwrap().is_empty().then_some(())
        })
        .await;
    });
}

#[test]
fn a_ledger_with_boxes_of_a_level_that_is_missing_is_refused() {
    let mut world = new_world();
    let made = in_a_server_that_dies(&world, async |world| create(world, Expiry::Never).await);
    on_a_new_server(&mut world, async |world| {
        let store = sandkeep_store::Store::open(world.ledger()).await.unwrap();
        let error = sandkeep_keeper::Keeper::open(
            world.config.clone(),
            store,
            world.vault.clone(),
            Vec::new(),
        )
        .await
        .unwrap_err();
        assert!(error.message.contains("process"), "{error}");
        assert_eq!(world.ward.alive(), std::slice::from_ref(&made.id));
        let keeper = world.keeper().await;
        keeper.kill(&made.id, GoneReason::Killed).await.unwrap();
        world.assert_empty().await;
    });
}

#[test]
fn many_boxes_are_found_again() {
    let mut world = new_world();
    let made = in_a_server_that_dies(&world, async |world| {
        let keeper = world.keeper().await;
        let creates: Vec<_> = (0..40)
            .map(|_| {
                let keeper = keeper.clone();
                tokio::spawn(async move { keeper.create(request()).await.unwrap().id })
            })
            .collect();
        let mut made = Vec::new();
        for create in creates {
            made.push(create.await.unwrap());
        }
        made
    });
    on_a_new_server(&mut world, async |world| {
        let keeper = world.keeper().await;
        assert_eq!(keeper.report().await.boxes, 40);
        for id in &made {
            assert_eq!(keeper.get(id).await.unwrap().state, State::Running);
            keeper.kill(id, GoneReason::Killed).await.unwrap();
        }
        world.assert_empty().await;
    });
}

/// Whether a connection from the network of this box is taken up by anybody: one to the metadata
/// service, which every policy lets through.
async fn is_heard(world: &World, id: &SandboxId) -> bool {
    let network = world.ward.network(id);
    let dialled = tokio::task::spawn_blocking(move || {
        let thread = std::thread::spawn(move || {
            rustix::thread::move_into_link_name_space(
                std::os::fd::AsFd::as_fd(&*network),
                Some(rustix::thread::LinkNameSpaceType::Network),
            )
            .unwrap();
            std::net::TcpStream::connect("169.254.169.254:80").is_ok()
        });
        thread.join().unwrap()
    });
    dialled.await.unwrap()
}

#[test]
fn the_server_is_there_before_the_networks_of_its_boxes() {
    let mut world = new_world();
    let first = server_with_moat(&mut world);
    let boxes = first.block_on(async {
        let world = &world;
        let keeper = world.keeper().await;
        let mut boxes = Vec::new();
        for _ in 0..4 {
            boxes.push(keeper.create(request()).await.unwrap().id);
        }
        assert!(is_heard(world, &boxes[0]).await);
        boxes
    });
    first.shutdown_background();
    let [plain, changed, killed, unlucky] = boxes.try_into().unwrap();
    let second = server_with_moat(&mut world);
    world.forget_ward();
    second.block_on(async {
        let world = &world;
        let shut = world.ward.network_gate.acquire_many(NETWORK_PERMITS);
        let shut = shut.await.unwrap();
        // It opens although nobody got a network yet.
        let keeper = world.keeper().await;
        assert!(keeper.get(&plain).await.is_ok());
        for id in [&plain, &changed, &killed, &unlucky] {
            assert!(!is_heard(world, id).await);
        }
        // What is asked meanwhile waits for its turn, and comes out right.
        let wish = EgressWish {
            policy: Some(Policy::open()),
            ..EgressWish::default()
        };
        let change = keeper.set_network(&changed, wish, None);
        let kill = keeper.kill(&killed, GoneReason::Killed);
        let open = async {
            tokio::task::yield_now().await;
            // One of them fails at first.
            world.ward.faults.netns.store(1, Ordering::SeqCst);
            drop(shut);
        };
        let (change, kill, ()) = tokio::join!(change, kill, open);
        kill.unwrap();
        // The failure may have met the change of policy, which then says so.
        if change.is_err() {
            let wish = EgressWish {
                policy: Some(Policy::open()),
                ..EgressWish::default()
            };
            keeper.set_network(&changed, wish, None).await.unwrap();
        }
        for id in [&plain, &changed, &unlucky] {
            until("it has its network again", async || {
                is_heard(world, id).await.then_some(())
            })
            .await;
        }
        assert!(!is_heard(world, &killed).await);
        let network = keeper.network(&changed).await.unwrap();
        assert_eq!(network.policy, Policy::open());
        for id in [&plain, &changed, &unlucky] {
            keeper.kill(id, GoneReason::Killed).await.unwrap();
        }
        world.assert_empty().await;
    });
}
