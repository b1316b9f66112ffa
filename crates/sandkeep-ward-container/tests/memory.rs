//! The container ward writes boxes to disk by CRIU and brings them back.

mod common;

use sandkeep_ward::{
    Ward as _,
    conformance::{MemoryBench as _, lab::carried, run},
};
use std::{fs, path::Path};

sandkeep_ward::memory_tests! {
    match common::bench() {
        Some(bench) => bench,
        None => return,
    }
}

/// Paused to disk, its processes went on for a moment before they were killed, and its disk was
/// ahead of its memory.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_frozen_ends_where_it_stands() {
    const WRITERS: usize = 8;
    let Some(bench) = common::bench() else { return };
    let ward = bench.container_ward();
    let written = |root: &Path| -> u64 {
        let size = |n| fs::metadata(root.join(format!("var/tmp/{n}"))).map_or(0, |file| file.len());
        (0..WRITERS).map(size).sum()
    };
    for held in [true, false, true, false] {
        let spec = common::spec(&bench);
        let root = spec.root.clone();
        let live = ward.start(spec).await.expect("a box");
        for n in 0..WRITERS {
            let writer =
                format!("nohup sh -c 'while :; do echo x >> /var/tmp/{n}; done' >/dev/null 2>&1 &");
            assert!(run(ward.as_ref(), &live.id, &writer).await.success());
        }
        ward.freeze(&live.id).await.expect("it is frozen");
        let before = written(&root);
        assert!(before > 0, "they write");
        // By the server that has it, or by one that only finds it.
        let ender = if held {
            ward.clone()
        } else {
            bench.container_ward()
        };
        ender.destroy(&live.id).await.expect("it is ended");
        assert_eq!(written(&root), before, "held: {held}");
    }
}

/// It has another state directory and gives its boxes other ids.
#[tokio::test(flavor = "multi_thread")]
async fn an_image_comes_back_on_another_server() {
    const COUNTER: &str = "mkfifo /run/ask /run/answer; echo kept > /dev/shm/kept; \
        chown 1000 /dev/shm/kept; \
        nohup sh -c 'n=0; while read _ < /run/ask; do n=$((n+1)); echo $n > /run/answer; done' \
        > /dev/null 2>&1 &";
    const ASK: &str = "echo > /run/ask; cat /run/answer /dev/shm/kept; stat -c %u /dev/shm/kept";
    let Some(bench) = common::bench() else { return };
    let here = bench.container_ward();
    let spec = common::spec(&bench);
    let root = spec.root.clone();
    let live = here.start(spec).await.expect("a box");
    assert!(run(here.as_ref(), &live.id, COUNTER).await.success());
    let told = run(here.as_ref(), &live.id, ASK).await;
    assert_eq!(told.stdout, "1\nkept\n1000\n");
    here.freeze(&live.id).await.expect("it is frozen");
    let image = bench.directory();
    here.save(&live.id, &image).await.expect("it is written");

    let there = bench.ward_elsewhere();
    assert_eq!(
        there.engine().await.expect("CRIU"),
        here.engine().await.expect("CRIU")
    );
    let image = carried(&image, bench.directory());
    there.take_in(&image).await.expect("it is an image");
    for count in [2, 2] {
        let spec = common::spec_on(bench.copy_of(&root));
        let copy = there.restore(spec, &image).await.expect("it comes back");
        let told = run(there.as_ref(), &copy.id, ASK).await;
        assert_eq!(told.stdout, format!("{count}\nkept\n1000\n"));
        there.destroy(&copy.id).await.expect("it is ended");
    }
    here.destroy(&live.id).await.expect("it is ended");
}
