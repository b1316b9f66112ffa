//! QEMUs that are started ahead become boxes like others, and leave nothing behind.

mod common;

use sandkeep_ward::{
    LiveBox, Ward as _,
    conformance::{Bench as _, run},
};
use sandkeep_ward_microvm::MicrovmWard;
use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt as _,
    time::{Duration, Instant},
};

async fn until_some_wait(ward: &MicrovmWard, count: usize) {
    let end = Instant::now() + Duration::from_secs(60);
    while ward.waiting() < count {
        assert!(Instant::now() < end, "no QEMU waits");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Processes in cgroups of QEMUs that wait, and everything else that has their name.
fn traces(bench: &common::MicrovmBench) -> (BTreeSet<i32>, Vec<String>) {
    let state = bench.state_dir();
    let tree = sandkeep_host::cgroup::tree_name(&state.canonicalize().expect("a directory"));
    let names = |dir: &str| -> Vec<String> {
        fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path().display().to_string())
            .filter(|path| path.contains("/waiting."))
            .collect()
    };
    let mut found = names(&state.display().to_string());
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    for line in mounts.lines().filter(|line| line.contains(" - cgroup")) {
        if let Some(mount) = line.split(' ').nth(4) {
            found.extend(names(&format!("{mount}/{tree}")));
        }
    }
    let pids = found
        .iter()
        .filter_map(|dir| fs::read_to_string(format!("{dir}/cgroup.procs")).ok())
        .flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
        .filter_map(|line| line.parse().ok())
        .collect();
    (pids, found)
}

fn user(live: &LiveBox) -> u32 {
    fs::metadata(format!("/proc/{}", common::pid(live)))
        .expect("a process")
        .uid()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_waits_becomes_a_box_with_its_own_disk_limits_and_memory() {
    let Some(bench) = common::bench() else {
        return;
    };
    let ward = bench.microvm_with(1, false);
    let first = ward.start(common::spec(bench.root())).await.expect("a box");
    until_some_wait(&ward, 1).await;
    let (waiting, _) = traces(&bench);
    assert_eq!(waiting.len(), 1, "one process waits: {waiting:?}");

    let spec = common::spec(bench.root());
    let (id, limits, root) = (spec.id.clone(), spec.limits, spec.root.clone());
    let second = ward.start(spec).await.expect("a box");
    assert!(
        waiting.contains(&common::pid(&second)),
        "it was started ahead"
    );
    let held = bench.host_limits(&second);
    assert_eq!(held.memory_bytes, limits.memory_bytes());
    assert_eq!(held.pids, limits.pids);
    assert_ne!(user(&first), user(&second));
    let look = "hostname; cat /sys/fs/cgroup/box/pids.max; echo note > /run/note; echo disk > /root/own; sync";
    let output = run(ward.as_ref(), &id, look).await;
    assert_eq!(
        output.stdout,
        format!("{id}\n{}\n", limits.pids),
        "{output:?}"
    );

    // A copy of it that goes on in another one that waited, and one after that in a new one.
    until_some_wait(&ward, 1).await;
    let (waiting, _) = traces(&bench);
    let (image, copies) = bench.written::<2>(ward.as_ref(), &id, &root).await;
    let mut forks = Vec::new();
    for copy in copies {
        let fork = ward.restore(common::spec(copy), &image).await;
        let fork = fork.expect("a copy starts");
        let output = run(ward.as_ref(), &fork.id, "cat /run/note /root/own").await;
        assert_eq!(output.stdout, "note\ndisk\n", "{output:?}");
        forks.push(fork);
    }
    assert!(waiting.contains(&common::pid(&forks[0])));
    assert!(!waiting.contains(&common::pid(&forks[1])));

    // They are nobody's box: what sweeps away unknown boxes leaves them alone.
    until_some_wait(&ward, 1).await;
    let boxes = [&first, &second, &forks[0], &forks[1]];
    let known = boxes.iter().map(|live| live.id.clone()).collect();
    let swept = ward.sweep(&known).await.expect("it sweeps");
    assert_eq!(swept, sandkeep_ward::Swept::default());
    assert_eq!(traces(&bench).0.len(), 1);
    for live in boxes {
        ward.destroy(&live.id).await.expect("it is destroyed");
        assert_eq!(bench.traces(live), Vec::<String>::new());
    }
    // They end with the server.
    ward.close().await;
    assert_eq!(traces(&bench), (BTreeSet::new(), Vec::new()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_of_a_server_that_died_are_swept_away_and_missed_by_nobody() {
    let Some(bench) = common::bench() else {
        return;
    };
    let old = bench.microvm_with(1, false);
    let live = old.start(common::spec(bench.root())).await.expect("a box");
    until_some_wait(&old, 1).await;
    let (waiting, _) = traces(&bench);
    // The next one begins while nobody has seen to the end of those that wait.
    let new = bench.microvm_with(0, false);
    assert_eq!(traces(&bench), (BTreeSet::new(), Vec::new()));
    for pid in waiting {
        assert!(!fs::exists(format!("/proc/{pid}/exe")).unwrap_or(false));
    }
    // Boxes are not touched; and one that died while it waited is not given to anybody.
    assert!(
        run(new_adopts(&new, &live).await, &live.id, "true")
            .await
            .success()
    );
    let next = old.start(common::spec(bench.root())).await.expect("a box");
    assert!(run(old.as_ref(), &next.id, "true").await.success());
    old.close().await;
    for live in [&live, &next] {
        old.destroy(&live.id).await.expect("it is destroyed");
    }
}

async fn new_adopts<'a>(ward: &'a MicrovmWard, live: &LiveBox) -> &'a MicrovmWard {
    let adopted = ward.adopt(live).await.expect("it is looked for");
    assert_eq!(adopted, sandkeep_ward::Adoption::Alive);
    ward
}
