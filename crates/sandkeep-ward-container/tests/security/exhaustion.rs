//! Using up memory, processes and files costs only the box that does it.

use crate::attack;
use sandkeep_ward::{WardEvent, conformance};
use std::time::Duration;
use tokio::time::timeout;

// Many small processes: none is larger than the agent by much, and yet it must not die.
attack!(many_small_hogs_cost_children_not_the_agent, target, {
    let mut events = target.stage.ward.events().unwrap();
    target
        .works(
            "for n in $(seq 16); do \
               python3 -c 'x = bytearray(12 << 20); import time; time.sleep(60)' \
               >/dev/null 2>&1 & \
             done",
        )
        .await;
    let event = timeout(Duration::from_secs(60), events.recv())
        .await
        .expect("somebody is killed")
        .expect("the stream goes on");
    assert!(matches!(event, WardEvent::OutOfMemory { .. }), "{event:?}");
    target.works("pkill python3; echo alive").await;
});

// Files in memory are freed by no kill: they are bounded below the limit.
attack!(memory_files_stop_before_the_limit, target, {
    for place in ["/dev/shm", "/run"] {
        let output = target
            .run(&format!("head -c 200M /dev/zero > {place}/filler"))
            .await;
        assert!(!output.success(), "{output:?}");
        assert!(output.stderr.contains("No space left"), "{output:?}");
    }
    target.works("echo alive").await;
    target.fails("head -c 1M /dev/zero > /dev/filler").await;
    let usage = target
        .stage
        .ward
        .usage(&target.stage.live.id)
        .await
        .unwrap();
    assert_eq!(usage.oom_kills, 0, "{usage:?}");
});

// Memory file systems follow the limit of a box that is reused with another one.
attack!(memory_files_follow_the_limit, target, {
    let size = "stat -f -c '%b %S' /dev/shm | (read b s; echo $((b * s >> 20)))";
    assert_eq!(target.works(size).await, "64\n");
    let limits = sandkeep_model::Limits {
        memory_mib: 256,
        ..sandkeep_model::Limits::default()
    };
    let id = &target.stage.live.id;
    target.stage.ward.set_limits(id, &limits).await.unwrap();
    assert_eq!(target.works(size).await, "128\n");
});

attack!(open_files_are_bounded, target, {
    let opened = target
        .python(
            "
held = []
try:
    while True: held.append(os.open('/dev/null', 0))
except OSError as error: print(errno.errorcode[error.errno], len(held) < 1024)",
        )
        .await;
    assert_eq!(opened, "EMFILE True\n");
    target.fails("ulimit -n 4096").await;
});

// A fork bomb in one box: the neighbour still answers, and the bomb can be ended.
attack!(a_fork_bomb_does_not_reach_the_neighbour, target, {
    let neighbour = conformance::Stage::new(&target.bench).await;
    target
        .run(
            "perl -e 'while (defined($child = fork)) { \
                 if (!$child) { close STDOUT; close STDERR; fork while 1 } }'",
        )
        .await;
    assert!(neighbour.run("true").await.success());
    let usage = target
        .stage
        .ward
        .usage(&target.stage.live.id)
        .await
        .unwrap();
    assert!(usage.pids <= 64, "{usage:?}");
    neighbour.end().await;
});

// A score of the killer can be raised by anybody but not lowered below the agent's.
attack!(nobody_hides_from_the_killer, target, {
    assert_eq!(target.works("cat /proc/1/oom_score_adj").await, "0\n");
    let own: i32 = target
        // In a box that was on disk the agent gives it a moment after the start.
        .works(
            "for n in $(seq 500); do [ $(cat /proc/self/oom_score_adj) = 0 ] || break; \
             sleep 0.01; done; cat /proc/self/oom_score_adj",
        )
        .await
        .trim()
        .parse()
        .unwrap();
    assert!(own > 0, "children go first");
    target.fails("echo -500 > /proc/self/oom_score_adj").await;
    target
        .fails("echo 1000 > /proc/1/oom_score_adj && [ $(cat /proc/1/oom_score_adj) = 0 ]")
        .await;
});
