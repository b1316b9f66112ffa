//! Machines that were warmed up on the disk of a template: their boxes are like others.

mod common;

use sandkeep_model::Limits;
use sandkeep_ward::{
    BoxSpec, LiveBox, Ward as _,
    conformance::{Bench as _, run},
};
use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

const DISK_MIB: u64 = 523;

fn spec(root: PathBuf) -> BoxSpec {
    let spec = common::spec(root);
    BoxSpec {
        limits: Limits {
            disk_mib: DISK_MIB,
            ..spec.limits
        },
        ..spec
    }
}

/// What the memory of a box is based on.
fn base(live: &LiveBox) -> String {
    live.record["base"].as_str().expect("a base").to_owned()
}

/// Machines that were warmed up, by this or an earlier run.
fn warmed(machines: &Path) -> Vec<PathBuf> {
    let dirs = |dir: &Path| {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let mut all: Vec<_> = dirs(machines).iter().flat_map(|path| dirs(path)).collect();
    all.retain(|dir| {
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("warm-")
    });
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn boxes_of_a_machine_that_was_warmed_up_are_new_and_apart() {
    let Some(bench) = common::bench() else {
        return;
    };
    let ward = bench.microvm_with(1, true);
    for old in warmed(&bench.machines_dir()) {
        fs::remove_dir_all(old).expect("an old machine goes");
    }
    let first = ward.start(spec(bench.root())).await.expect("a box");
    // What the first one does is not in what the next ones begin with.
    let output = run(ward.as_ref(), &first.id, "echo first > /root/mine; sync").await;
    assert!(output.success(), "{output:?}");
    let end = Instant::now() + Duration::from_secs(120);
    while warmed(&bench.machines_dir()).is_empty() {
        assert!(Instant::now() < end, "no machine was warmed up");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let mut seen = HashSet::new();
    let mut boxes = Vec::new();
    for _ in 0..2 {
        let spec = spec(bench.root());
        let (root, limits) = (spec.root.clone(), spec.limits);
        let live = ward.start(spec).await.expect("a box");
        assert_ne!(base(&live), base(&first), "it begins warm");
        let look = "ls /root; cat /sys/fs/cgroup/box/pids.max; hostname; date +%s; \
                    df -m --output=avail / | tail -1; head -c 16 /dev/urandom | base64; \
                    echo own > /root/own; sync";
        let output = run(ward.as_ref(), &live.id, look).await;
        let lines: Vec<_> = output.stdout.lines().map(str::trim).collect();
        let [pids, name, time, free, random] = lines[..] else {
            panic!("{output:?}");
        };
        assert_eq!(pids, limits.pids.to_string());
        assert_eq!(name, live.id.as_str());
        let inside: i64 = time.parse().expect("a time");
        let outside = sandkeep_model::Timestamp::now().millis() / 1000;
        assert!((outside - inside).abs() < 60, "{inside} is not {outside}");
        let free: u64 = free.parse().expect("a number");
        assert!(
            (DISK_MIB - 20..DISK_MIB + 512).contains(&free),
            "{output:?}"
        );
        assert!(seen.insert(random.to_owned()), "it draws its own numbers");
        boxes.push((live, root));
    }
    // A copy with memory of one of them.
    let (second, root) = &boxes[1];
    let output = run(ward.as_ref(), &second.id, "echo note > /run/note").await;
    assert!(output.success(), "{output:?}");
    let (image, [copy]) = bench.written(ward.as_ref(), &second.id, root).await;
    let fork = ward.restore(spec(copy), &image).await.expect("a copy");
    let output = run(ward.as_ref(), &fork.id, "cat /run/note /root/own").await;
    assert_eq!(output.stdout, "note\nown\n", "{output:?}");

    // One that is started anew on the disk it had is not given a fresh one.
    let (used, root) = &boxes[0];
    ward.destroy(&used.id).await.expect("it is destroyed");
    let again = ward.start(spec(root.clone())).await.expect("it starts");
    let output = run(ward.as_ref(), &again.id, "cat /root/own; ls /run/note").await;
    assert_eq!(output.stdout, "own\n", "{output:?}");
    for live in [&first, second, &fork, &again] {
        ward.destroy(&live.id).await.expect("it is destroyed");
        assert_eq!(bench.traces(live), Vec::<String>::new());
    }
    ward.close().await;
}
