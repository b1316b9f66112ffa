//! Images are tried before anybody relies on them, and nothing of a trial ever runs.

mod common;

use common::ContainerBench;
use sandkeep_model::Code;
use sandkeep_ward::{
    Ward as _,
    conformance::{MemoryBench as _, run},
};
use sandkeep_ward_container::ContainerWard;
use std::{
    collections::HashSet,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::time::timeout;

const WRITERS: usize = 8;

/// How much the writers have written.
fn written(root: &Path) -> u64 {
    let size = |n| fs::metadata(root.join(format!("var/tmp/{n}"))).map_or(0, |file| file.len());
    (0..WRITERS).map(size).sum()
}

/// An image of a box whose processes write all the time, with its disk as it was then.
async fn image(bench: &ContainerBench, ward: &ContainerWard) -> (PathBuf, PathBuf) {
    let spec = common::spec(bench);
    let root = spec.root.clone();
    let live = ward.start(spec).await.expect("a box");
    for n in 0..WRITERS {
        let writer =
            format!("nohup sh -c 'while :; do echo x >> /var/tmp/{n}; done' >/dev/null 2>&1 &");
        assert!(run(ward, &live.id, &writer).await.success());
    }
    ward.freeze(&live.id).await.expect("it is frozen");
    let image = bench.directory();
    ward.save(&live.id, &image).await.expect("it is written");
    ward.destroy(&live.id).await.expect("it is ended");
    (image, root)
}

async fn nothing_is_left(bench: &ContainerBench, ward: &ContainerWard) {
    let left: Vec<_> = fs::read_dir(bench.state_dir())
        .expect("its state")
        .flatten()
        .filter(|entry| entry.path().is_dir())
        .collect();
    assert!(left.is_empty(), "{left:?}");
    let swept = ward.sweep(&HashSet::new()).await.expect("it is swept");
    assert_eq!(swept.processes, 0, "{swept:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_tried_never_runs() {
    let Some(bench) = common::bench() else { return };
    let ward = bench.container_ward();
    let (image, root) = image(&bench, &ward).await;
    let before = written(&root);
    assert!(before > 0, "they write");
    for _ in 0..3 {
        let spec = common::spec_on(root.clone());
        let tried = ward.try_image(spec, &image).await;
        tried.expect("it comes back");
        assert_eq!(written(&root), before, "it ran");
        nothing_is_left(&bench, &ward).await;
    }
    // And it does come back.
    let spec = common::spec_on(root.clone());
    let live = ward.restore(spec, &image).await.expect("it comes back");
    assert!(run(ward.as_ref(), &live.id, "sleep 0.2").await.success());
    assert!(written(&root) > before, "it runs");
    ward.destroy(&live.id).await.expect("it is ended");
}

/// CRIU with a few words before its restore.
fn in_front(bench: &ContainerBench, script: &str) -> PathBuf {
    const REAL: &str = "/usr/local/lib/sandkeep/criu";
    let path = bench.directory().join("criu");
    let text = format!("#!/bin/sh\n[ $1 != restore ] || {{ {script}; }}\nexec {REAL} \"$@\"\n");
    fs::write(&path, text).expect("a script");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
    path
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_come_back_is_refused_and_leaves_nothing() {
    let Some(bench) = common::bench() else { return };
    let ward = bench.container_ward();
    let (image, root) = image(&bench, &ward).await;
    // Its spare workers would look left behind to another.
    drop(ward);
    let before = written(&root);
    let refusing = bench.ward_with(Some(in_front(&bench, "exit 7")));
    let refused = refusing.try_image(common::spec_on(root.clone()), &image);
    let error = refused.await.expect_err("CRIU ended");
    assert_eq!(error.code, Code::NotEnforceable, "{error:?}");
    assert!(error.message.contains("would not come back"), "{error:?}");
    nothing_is_left(&bench, &refusing).await;
    drop(refusing);
    // One that hangs, and nobody waits for it any more.
    let hanging = bench.ward_with(Some(in_front(&bench, "exec sleep 1000")));
    let spec = common::spec_on(root.clone());
    let id = spec.id.clone();
    let waiting = timeout(Duration::from_secs(1), hanging.try_image(spec, &image));
    assert!(waiting.await.is_err(), "it hangs");
    let ended = timeout(Duration::from_secs(30), hanging.destroy(&id)).await;
    ended.expect("in time").expect("it is ended");
    nothing_is_left(&bench, &hanging).await;
    assert_eq!(written(&root), before);
}
