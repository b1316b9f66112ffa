//! Boxes come and go, and the host is as before.

mod common;

use sandkeep_ward::{
    Ward,
    conformance::{Bench as _, run},
};
use std::{collections::BTreeSet, fs, process::Command};

/// More with SANDKEEP_MICROVM_CYCLES.
const CYCLES: usize = 6;

#[derive(Debug, PartialEq, Eq)]
struct Left {
    qemus: usize,
    descriptors: usize,
    namespaces: BTreeSet<String>,
    devices: String,
    boxes: usize,
    cgroups: usize,
    mounts: usize,
}

fn count(dir: &str) -> usize {
    fs::read_dir(dir).map_or(0, |entries| entries.flatten().count())
}

fn look(bench: &common::MicrovmBench) -> Left {
    let own = std::process::id().to_string();
    let processes: Vec<_> = fs::read_dir("/proc")
        .expect("processes")
        .flatten()
        .filter(|entry| {
            let path = entry.path();
            let line = fs::read(path.join("cmdline")).unwrap_or_default();
            // Ours alone: its sockets are named after our state directory.
            String::from_utf8_lossy(&line).contains("sandkeep")
                && String::from_utf8_lossy(&line).contains("qemu-system")
                && entry.file_name().to_string_lossy() != own
                && fs::read_to_string(path.join("cgroup"))
                    .is_ok_and(|text| text.contains(&tree(bench)))
        })
        .collect();
    let devices = Command::new("ip").args(["-o", "link"]).output();
    let devices = devices.expect("ip runs").stdout;
    let cgroups = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let cgroups = cgroups
        .lines()
        .filter(|line| line.contains(" - cgroup"))
        .filter_map(|line| line.split(' ').nth(4))
        .map(|mount| {
            fs::read_dir(format!("{mount}/{}", tree(bench))).map_or(0, |entries| {
                entries.flatten().filter(|e| e.path().is_dir()).count()
            })
        })
        .sum();
    Left {
        qemus: processes.len(),
        descriptors: count("/proc/self/fd"),
        namespaces: fs::read_dir("/proc/self/fd")
            .expect("descriptors")
            .flatten()
            .filter_map(|entry| fs::read_link(entry.path()).ok())
            .map(|path| path.display().to_string())
            .filter(|path| path.starts_with("net:"))
            .collect(),
        devices: String::from_utf8_lossy(&devices)
            .lines()
            .count()
            .to_string(),
        boxes: sandkeep_host::files::box_dirs(&bench.state_dir()).len(),
        cgroups,
        mounts: fs::read_to_string("/proc/self/mounts").map_or(0, |text| text.lines().count()),
    }
}

fn tree(bench: &common::MicrovmBench) -> String {
    let state = bench.state_dir().canonicalize().expect("a state directory");
    sandkeep_host::cgroup::tree_name(&state)
}

fn memory_kib() -> u64 {
    let text = fs::read_to_string("/proc/self/smaps_rollup").expect("our memory");
    text.lines()
        .find_map(|line| {
            line.strip_prefix("Pss:")?
                .split_ascii_whitespace()
                .next()?
                .parse()
                .ok()
        })
        .expect("a number")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cycles_leave_nothing_behind() {
    let Some(bench) = common::bench() else {
        return;
    };
    let cycles = std::env::var("SANDKEEP_MICROVM_CYCLES")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(CYCLES);
    let ward = bench.ward();
    // The first one boots the machine and fills caches.
    cycle(&bench, ward.as_ref()).await;
    let (before, memory) = (look(&bench), memory_kib());
    for _ in 0..cycles {
        cycle(&bench, ward.as_ref()).await;
    }
    assert_eq!(look(&bench), before);
    let grown = memory_kib().saturating_sub(memory);
    assert!(grown < 32 << 10, "{grown} KiB more after {cycles} cycles");
}

/// Create, run, write to disk, fork, run, end.
async fn cycle(bench: &common::MicrovmBench, ward: &dyn Ward) {
    let spec = common::spec(bench.root());
    let root = spec.root.clone();
    let live = ward.start(spec).await.expect("the box starts");
    let output = run(ward, &live.id, "echo here > /run/note; cat /run/note").await;
    assert_eq!(output.stdout, "here\n", "{output:?}");
    let (image, [copy]) = bench.written(ward, &live.id, &root).await;
    let fork = ward.restore(common::spec(copy), &image).await;
    let fork = fork.expect("the copy starts");
    let output = run(ward, &fork.id, "cat /run/note").await;
    assert_eq!(output.stdout, "here\n", "{output:?}");
    for live in [&live, &fork] {
        ward.destroy(&live.id).await.expect("it is destroyed");
        assert_eq!(bench.traces(live), Vec::<String>::new());
    }
    fs::remove_dir_all(&image).expect("the image goes");
    bench.lab.drop_roots();
}
