//! The same machine on the processor itself. Runs wherever KVM works; elsewhere it says that it
//! did not run, and `script/test` says so, too.
#![allow(clippy::print_stderr)]

mod common;

use sandkeep_ward::{
    Ward as _,
    conformance::{Bench as _, run},
};
use sandkeep_ward_microvm::kvm_offered;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_box_runs_on_kvm_where_there_is_kvm() {
    let Some(bench) = common::bench() else {
        return;
    };
    let ward = bench.microvm();
    let checks = ward.check().await;
    let found = |name: &str| {
        let check = checks.iter().find(|check| check.name == name);
        check.map(|check| check.found.clone()).unwrap_or_default()
    };
    let engine = ward.engine().await.expect("an engine");
    if let Err(why) = kvm_offered() {
        eprintln!("NOT RUN: the KVM path of the microVM level: {why}");
        // That must be said to others, too, and nobody is given a slow machine unasked.
        assert!(found("acceleration").starts_with("emulated"), "{checks:?}");
        assert!(engine.build.contains(" tcg "), "{engine:?}");
        assert!(!ward.suits_everything());
        return;
    }
    assert!(found("acceleration").starts_with("kvm"), "{checks:?}");
    assert!(engine.build.contains(" kvm "), "{engine:?}");
    assert!(ward.suits_everything());
    let live = ward
        .start(common::spec(bench.root()))
        .await
        .expect("the box starts");
    let output = run(ward.as_ref(), &live.id, "cat /proc/cpuinfo").await;
    assert!(output.stdout.contains("hypervisor"), "{output:?}");
    let (image, [copy]) = bench
        .written(ward.as_ref(), &live.id, &bench.lab.last_root())
        .await;
    let copy = ward.restore(common::spec(copy), &image).await;
    let copy = copy.expect("a copy starts");
    assert!(run(ward.as_ref(), &copy.id, "true").await.success());
    for live in [live, copy] {
        ward.destroy(&live.id).await.expect("it is destroyed");
        assert_eq!(bench.traces(&live), Vec::<String>::new());
    }
}
