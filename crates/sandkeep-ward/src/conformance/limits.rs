//! Limits bind, and what is used is counted.

use super::bench::{Bench, HostLimits, SMALL, Stage};
use crate::WardEvent;
use sandkeep_model::Limits;
use std::time::Duration;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(60);

pub async fn limits_reach_the_host(bench: &dyn Bench) {
    let stage = Stage::new(bench).await;
    assert_eq!(bench.host_limits(&stage.live), HostLimits::from(SMALL));
    let output = stage.run("ulimit -n; ulimit -Hn").await;
    assert_eq!(output.stdout, "1024\n1024\n");
    stage.end().await;
}

pub async fn limits_can_be_changed(bench: &dyn Bench) {
    let stage = Stage::new(bench).await;
    for limits in [
        Limits {
            cpu_millis: 500,
            memory_mib: 96,
            pids: 40,
            open_files: 512,
            ..SMALL
        },
        Limits {
            cpu_millis: 2000,
            memory_mib: 256,
            pids: 100,
            open_files: 512,
            ..SMALL
        },
    ] {
        stage
            .ward
            .set_limits(&stage.live.id, &limits)
            .await
            .expect("the limits are changed");
        assert_eq!(bench.host_limits(&stage.live), HostLimits::from(limits));
        let output = stage.run("ulimit -n").await;
        assert_eq!(output.stdout, "512\n");
    }
    stage.end().await;
}

pub async fn usage_counts(bench: &dyn Bench) {
    let stage = Stage::new(bench).await;
    let output = stage
        .run("for ((n = 0; n < 50000; n++)); do :; done; sleep 1000 & echo $!")
        .await;
    assert!(output.success(), "{output:?}");
    let usage = stage
        .ward
        .usage(&stage.live.id)
        .await
        .expect("usage is read");
    assert!(usage.cpu_usec > 0, "{usage:?}");
    assert!(usage.memory_bytes > 0, "{usage:?}");
    assert!(usage.cache_bytes <= usage.memory_bytes, "{usage:?}");
    assert!(usage.pids >= 2, "the agent and the sleeper: {usage:?}");
    assert_eq!((usage.oom_kills, usage.disk_bytes), (0, 0), "{usage:?}");
    stage.end().await;
}

/// Where the memory of a box is one process of the host, the box goes as a whole, and is told
/// from one that ended otherwise. A ward's neighbours never notice.
pub async fn memory_takes_the_box(bench: &dyn Bench) {
    let stage = Stage::new(bench).await;
    let mut events = stage.ward.events().expect("nobody has taken the events");
    let neighbour = stage
        .ward
        .start(super::bench::spec(bench, SMALL))
        .await
        .expect("another box starts");
    let hog = super::inside::begin(stage.ward.as_ref(), &stage.live.id, "tail /dev/zero").await;
    let event = timeout(SOON, events.recv())
        .await
        .expect("the end is reported")
        .expect("the stream goes on");
    drop(hog);
    assert_eq!(
        event,
        WardEvent::Exited {
            id: stage.live.id.clone(),
            out_of_memory: true
        }
    );
    let near = super::run(stage.ward.as_ref(), &neighbour.id, "true").await;
    assert!(near.success(), "{near:?}");
    let destroyed = stage.ward.destroy(&neighbour.id).await;
    destroyed.expect("the neighbour is destroyed");
    let live = stage.live.clone();
    stage.end().await;
    assert_eq!(bench.traces(&live), Vec::<String>::new());
}

/// The hog is killed, the agent and the box go on, and the ward tells.
pub async fn memory_runs_out_inside_only(bench: &dyn Bench) {
    if bench.memory_takes_the_box() {
        return memory_takes_the_box(bench).await;
    }
    let stage = Stage::new(bench).await;
    let mut events = stage.ward.events().expect("nobody has taken the events");
    // `tail` keeps the last line, and this one never ends.
    let output = stage.run("tail /dev/zero").await;
    assert!(!output.success(), "{output:?}");
    let event = timeout(SOON, events.recv())
        .await
        .expect("the kill is reported")
        .expect("the stream goes on");
    let WardEvent::OutOfMemory { id, kills } = event else {
        panic!("{event:?} is something else");
    };
    assert_eq!(id, stage.live.id);
    assert!(kills >= 1);
    assert!(stage.run("true").await.success(), "the box goes on");
    let usage = stage
        .ward
        .usage(&stage.live.id)
        .await
        .expect("usage is read");
    assert!(usage.oom_kills >= 1, "{usage:?}");
    stage.end().await;
}

pub async fn a_fork_bomb_stops_at_the_limit(bench: &dyn Bench) {
    // So much that memory is not what ends it.
    let limits = Limits {
        memory_mib: 512,
        ..SMALL
    };
    let stage = Stage::with_limits(bench, limits).await;
    let most = SMALL.pids + bench.more_forks();
    // Children let go of the pipes, or the command would not end before them.
    let output = stage
        .run(
            "perl -e 'while ($n < 500 && defined($child = fork)) { \
                 if (!$child) { close STDOUT; close STDERR; sleep 1000; exit } $n++ } \
             print $n'",
        )
        .await;
    let forks: u32 = output.stdout.parse().expect("a count of forks");
    assert!(forks > 0 && forks < most, "{output:?}");
    let usage = stage
        .ward
        .usage(&stage.live.id)
        .await
        .expect("usage is read");
    assert!(usage.pids <= u64::from(most), "{usage:?} {output:?}");
    // The host can always end it.
    let live = stage.live.clone();
    stage.end().await;
    assert_eq!(bench.traces(&live), Vec::<String>::new());
}
