//! The launcher may die at any time; boxes and the server go on.

mod common;

use sandkeep_ward::conformance::{Bench as _, Stage, run};
use std::{fs, time::Duration};

/// The launcher of this very test program.
fn launcher() -> Option<i32> {
    let own = std::process::id().to_string();
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let exe = fs::read_link(entry.path().join("exe")).ok()?;
        let status = fs::read_to_string(entry.path().join("status")).ok()?;
        let parent = status
            .lines()
            .find_map(|line| line.strip_prefix("PPid:\t"))?;
        (exe.ends_with("sandkeep-ward-launcher") && parent == own).then_some(pid)
    })
}

fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it is killed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launcher_that_dies_is_replaced_and_boxes_stay() {
    let Some(bench) = common::bench() else {
        return;
    };
    let stage = Stage::new(&bench).await;
    for _ in 0..3 {
        kill(launcher().expect("a launcher runs"));
        assert!(stage.run("true").await.success(), "the box stays");
        let other = stage
            .ward
            .start(common::spec(&bench))
            .await
            .expect("another box starts");
        assert!(run(stage.ward.as_ref(), &other.id, "true").await.success());
        stage
            .ward
            .destroy(&other.id)
            .await
            .expect("the other box is destroyed");
        assert_eq!(bench.traces(&other), Vec::<String>::new());
    }
    stage.end().await;
}

/// A caller that goes away must not leave half a box behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_nobody_waits_for_leaves_nothing() {
    let Some(bench) = common::bench() else {
        return;
    };
    let ward = bench.ward();
    for micros in [0, 500, 2000, 5000, 8000] {
        let spec = common::spec(&bench);
        let directory = bench.state_dir().join(spec.id.as_str());
        let started = tokio::time::timeout(Duration::from_micros(micros), ward.start(spec)).await;
        if let Ok(Ok(live)) = started {
            ward.destroy(&live.id).await.expect("it is destroyed");
        }
        let gone = async {
            // It may not even have begun; it has ended when it can not be found twice.
            for _ in 0..2 {
                tokio::time::sleep(Duration::from_millis(100)).await;
                while directory.exists() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(60), gone)
            .await
            .expect("nothing is left");
    }
}

/// Paths, names and ids of a server that ran before are found by the next one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_of_boxes_that_still_run_are_not_given_out_again() {
    let Some(bench) = common::bench() else {
        return;
    };
    let Stage { ward, live } = Stage::new(&bench).await;
    drop(ward);
    let ward = bench.ward();
    // Not adopted yet, but its note is there.
    let other = ward.start(common::spec(&bench)).await.expect("it starts");
    assert_ne!(live.record["slot"], other.record["slot"]);
    ward.destroy(&other.id).await.expect("it is destroyed");
    // Ending it needs no adoption either.
    ward.destroy(&live.id).await.expect("it is destroyed");
    assert_eq!(bench.traces(&live), Vec::<String>::new());
}
