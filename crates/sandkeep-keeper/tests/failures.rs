//! What goes wrong is told and leaves nothing.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::sync::atomic::Ordering;

use sandkeep_keeper::Keeper;
use sandkeep_model::{Code, Error, GoneReason, ListFilter, Sandbox, State};
use sandkeep_store::Store;
use support::{World, reaches, request, story, until};

async fn gone_boxes(keeper: &Keeper) -> Vec<Sandbox> {
    let filter = ListFilter {
        states: vec![State::Gone],
        ..ListFilter::default()
    };
    keeper.list(&filter).await.unwrap().items
}

/// One creation fails; all that is left is a row that says why.
async fn fails_cleanly(world: &World, keeper: &Keeper) -> Error {
    let error = keeper.create(request()).await.unwrap_err();
    let gone = gone_boxes(keeper).await;
    assert_eq!(gone.len(), 1);
    assert_eq!(
        gone[0].gone,
        Some(GoneReason::CreateFailed {
            message: error.message.clone()
        })
    );
    assert_eq!(story(keeper, &gone[0].id).await.len(), 2);
    assert_eq!(keeper.report().await.boxes, 0);
    world.assert_empty().await;
    error
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_fails() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    world.ward.faults.start.store(1, Ordering::SeqCst);
    let error = fails_cleanly(&world, &keeper).await;
    assert!(error.message.contains("starting the box"), "{error}");
    keeper.create(request()).await.unwrap();
    let page = keeper.list(&ListFilter::default()).await.unwrap();
    keeper
        .kill(&page.items[0].id, GoneReason::Killed)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_panics() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    world.ward.faults.panic.store(1, Ordering::SeqCst);
    let error = fails_cleanly(&world, &keeper).await;
    assert_eq!(error.code, Code::Internal);
    let made = keeper.create(request()).await.unwrap();
    keeper.kill(&made.id, GoneReason::Killed).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_does_not_answer() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    world.ward.faults.connect.store(1, Ordering::SeqCst);
    let error = fails_cleanly(&world, &keeper).await;
    assert_eq!(error.code, Code::BoxUnreachable);
    assert!(error.message.contains("greeting the agent"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_can_not_be_made() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    // Nearly all of the pool is taken; what is left is kept for those that run.
    let pool = world.vault.pool().await.unwrap();
    let filler = pool.path.join("filler");
    let file = std::fs::File::create(&filler).unwrap();
    // The server wrote something since it looked.
    let mut taken = pool.free_bytes - (16 << 20);
    while rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, taken).is_err() {
        taken -= 16 << 20;
    }
    until("the storage is low", async || {
        (!keeper.storage().reasons.is_empty()).then_some(())
    })
    .await;
    // Refused before anything is made of it.
    let error = keeper.create(request()).await.unwrap_err();
    world.assert_empty().await;
    assert_eq!(error.code, Code::DiskFull);
    assert!(error.message.contains("storage is nearly full"), "{error}");
    assert!(error.hint.is_some());
    std::fs::remove_file(&filler).unwrap();
}

/// A small tmpfs, gone with the value.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let done = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
            .arg(dir.path())
            .status()
            .unwrap();
        assert!(done.success(), "mounting a tmpfs needs root");
        Self(dir)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount")
            .arg("--lazy")
            .arg(self.0.path())
            .status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ledger_on_a_full_disk() {
    let world = World::new().await;
    let disk = SmallDisk::mount();
    let store = Store::open(disk.0.path().join("ledger.db")).await.unwrap();
    let keeper = world.keeper_with(store).await;
    let mut events = keeper.subscribe();
    let kept = keeper.create(request()).await.unwrap();
    let filler = disk.0.path().join("filler");
    let mut file = std::fs::File::create(&filler).unwrap();
    while std::io::Write::write_all(&mut file, &[0; 4096]).is_ok() {}
    drop(file);

    // Sooner or later a large request does not fit into what the log file has left.
    let mut large = request();
    large.metadata.insert("a".into(), "x".repeat(60_000));
    let mut fitted = vec![kept.id.clone()];
    let error = loop {
        match keeper.create(large.clone()).await {
            Ok(made) => fitted.push(made.id),
            Err(error) => break error,
        }
    };
    fitted.sort();
    assert_eq!(error.code, Code::DiskFull, "{error}");
    assert!(error.message.contains("the disk is full"), "{error}");
    let mut alive = world.ward.alive();
    alive.sort();
    assert_eq!(alive, fitted);
    assert_eq!(world.vault.disks().await.unwrap(), fitted);

    // Ending boxes works all the same, and the ledger hears of it once there is room.
    for id in &fitted {
        keeper.kill(id, GoneReason::Killed).await.unwrap();
    }
    world.assert_empty().await;
    std::fs::remove_file(&filler).unwrap();
    // Also of the one that was refused, if its beginning still fitted in.
    until("the ledger knows all ends", async || {
        (keeper.report().await.boxes == 0).then_some(())
    })
    .await;
    if keeper.get(&kept.id).await.is_ok() {
        reaches(&mut events, &kept.id, State::Gone).await;
    }
    assert_eq!(
        keeper.get_any(&kept.id).await.unwrap().gone,
        Some(GoneReason::Killed)
    );
    let made = keeper.create(large).await.unwrap();
    keeper.kill(&made.id, GoneReason::Killed).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_left_a_sandbox_pausing_for_good() {
    let world = World::new().await;
    let disk = SmallDisk::mount();
    let store = Store::open(disk.0.path().join("ledger.db")).await.unwrap();
    let keeper = world.keeper_with(store.clone()).await;
    let made = keeper.create(request()).await.unwrap();
    let listed = async || {
        let page = keeper.list(&ListFilter::default()).await;
        page.unwrap().items[0].state
    };
    let pause = async || {
        world.ward.faults.freeze.store(1, Ordering::SeqCst);
        let wish = sandkeep_keeper::PauseWish::Memory;
        keeper.pause(&made.id, wish).await.unwrap_err();
    };
    // Until the log has no room left that it had before it was folded into the file.
    for _ in 0..12 {
        pause().await;
    }
    let filler = disk.0.path().join("filler");
    *world.ward.full_when_frozen.lock().unwrap() = Some(filler.clone());
    pause().await;
    assert_eq!(keeper.get(&made.id).await.unwrap().state, State::Running);
    assert_eq!(
        listed().await,
        State::Pausing,
        "the ledger could not be told"
    );
    std::fs::remove_file(&filler).unwrap();
    until("the ledger knows that it runs", async || {
        (listed().await == State::Running).then_some(())
    })
    .await;
    keeper.kill(&made.id, GoneReason::Killed).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_box_that_can_not_be_ended_stays_in_sight_until_it_can() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let mut events = keeper.subscribe();
    let made = keeper.create(request()).await.unwrap();
    world.ward.faults.destroy.store(1, Ordering::SeqCst);
    let error = keeper.kill(&made.id, GoneReason::Killed).await.unwrap_err();
    assert!(error.retryable);
    assert!(error.hint.unwrap().contains("tried again"));
    assert_eq!(keeper.get(&made.id).await.unwrap().state, State::Stopping);
    assert_eq!(
        keeper.connect(&made.id).await.err().unwrap().code,
        Code::NotFound
    );
    let page = keeper.list(&ListFilter::default()).await.unwrap();
    assert_eq!(page.items[0].state, State::Stopping);
    reaches(&mut events, &made.id, State::Gone).await;
    assert_eq!(
        keeper.get_any(&made.id).await.unwrap().gone,
        Some(GoneReason::Killed)
    );
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_creation_that_fails_twice_over_is_cleared_in_the_end() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let mut events = keeper.subscribe();
    world.ward.faults.connect.store(1, Ordering::SeqCst);
    world.ward.faults.destroy.store(1, Ordering::SeqCst);
    keeper.create(request()).await.unwrap_err();
    let page = keeper.list(&ListFilter::default()).await.unwrap();
    assert_eq!(page.items[0].state, State::Stopping);
    let id = page.items[0].id.clone();
    reaches(&mut events, &id, State::Gone).await;
    let gone = keeper.get_any(&id).await.unwrap();
    assert!(matches!(gone.gone, Some(GoneReason::CreateFailed { .. })));
    world.assert_empty().await;
}
