//! The container ward writes boxes to disk by CRIU and brings them back.

mod common;

use sandkeep_ward::{Ward as _, conformance::run};
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
