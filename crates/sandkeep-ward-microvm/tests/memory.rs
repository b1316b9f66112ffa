//! Machines written to disk with their memory come back as they were, more than once, and no
//! two copies are the same where they must not be.

mod common;

use sandkeep_model::{Code, Limits};
use sandkeep_ward::{
    Adoption, BoxSpec, LiveBox, Ward,
    conformance::{Bench as _, run},
};
use std::collections::HashSet;

/// Counts when asked, holds a deleted file open, and draws a random number when asked.
const PROGRAM: &str = r#"
import os
kept = open("/root/kept", "w+"); kept.write("still open"); kept.flush(); os.unlink("/root/kept")
ballast = bytes(range(256)) * 8192
os.mkfifo("/run/commands"); os.mkfifo("/run/answers")
asked = 0
while True:
    open("/run/commands").read()
    asked += 1
    kept.seek(0)
    same = ballast == bytes(range(256)) * 8192
    with open("/run/answers", "w") as answer:
        answer.write(f"{asked} {kept.read()} {same} {os.urandom(16).hex()}")
"#;
const ASK: &str = "echo > /run/commands; cat /run/answers";

async fn begin(ward: &dyn Ward, live: &LiveBox) {
    let start = format!(
        "cat > /root/program.py <<'END'\n{PROGRAM}\nEND\n\
         setsid python3 /root/program.py > /run/log 2>&1 < /dev/null &\n\
         until [ -p /run/answers ]; do sleep 0.1; done"
    );
    let output = run(ward, &live.id, &start).await;
    assert!(output.success(), "{output:?}");
}

/// The answer without its random end, and that end.
async fn ask(ward: &dyn Ward, live: &LiveBox) -> (String, String) {
    let output = run(ward, &live.id, ASK).await;
    assert!(output.success(), "{output:?}");
    let (told, random) = output.stdout.rsplit_once(' ').expect("an answer");
    (told.to_owned(), random.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_of_a_busy_machine_go_on_and_so_does_it() {
    let Some(bench) = common::bench() else {
        return;
    };
    let ward = bench.ward();
    let spec = common::spec(bench.root());
    let root = spec.root.clone();
    let live = ward.start(spec).await.expect("the box starts");
    begin(ward.as_ref(), &live).await;
    assert_eq!(ask(ward.as_ref(), &live).await.0, "1 still open True");

    let (image, copies) = bench.written::<3>(ward.as_ref(), &live.id, &root).await;
    let (told, random) = ask(ward.as_ref(), &live).await;
    assert_eq!(told, "2 still open True");

    // The first copy gets the changed pages for itself, the others share them.
    let mut seen = HashSet::from([random]);
    let mut restored = Vec::new();
    for copy in copies {
        let spec = common::spec(copy);
        let copy = ward.restore(spec, &image).await.expect("a copy starts");
        let (told, random) = ask(ward.as_ref(), &copy).await;
        assert_eq!(told, "2 still open True");
        assert!(seen.insert(random), "every copy draws its own numbers");
        restored.push(copy);
    }
    // Disks are apart: what one writes no other sees. Each has its own name and the right time.
    for copy in &restored {
        let look = "ls /root; echo x > /root/own; sync; hostname; date +%s";
        let output = run(ward.as_ref(), &copy.id, look).await;
        let lines: Vec<_> = output.stdout.lines().collect();
        assert_eq!(lines[..2], ["program.py", copy.id.as_str()], "{output:?}");
        let inside: i64 = lines[2].parse().expect("a time");
        let outside = sandkeep_model::Timestamp::now().millis() / 1000;
        assert!((outside - inside).abs() < 60, "{inside} is not {outside}");
    }
    // Copies can be written again: one that runs on shared pages and, after a restart of the
    // server, one of which nothing is known but that it runs.
    let last = restored.last().expect("a copy");
    let again = |root| BoxSpec {
        ..common::spec(root)
    };
    for name in ["again", "after-a-restart"] {
        let ward = if name == "again" {
            std::sync::Arc::clone(&ward)
        } else {
            let ward = bench.ward();
            let adopted = ward.adopt(last).await.expect("it is looked for");
            assert_eq!(adopted, Adoption::Alive);
            ward
        };
        let (image, [copy]) = bench
            .written(ward.as_ref(), &last.id, &bench.lab.last_root())
            .await;
        let back = ward.restore(again(copy), &image).await;
        let back = back.expect("it comes back");
        assert_eq!(ask(ward.as_ref(), &back).await.0, "3 still open True");
        ward.destroy(&back.id).await.expect("it is destroyed");
    }
    for live in restored.iter().chain([&live]) {
        ward.destroy(&live.id).await.expect("it is destroyed");
        assert_eq!(bench.traces(live), Vec::<String>::new());
    }
}

/// The disk is as large as its limit says, and the machine as large as it was made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_has_the_size_it_was_asked_for_and_does_not_outgrow_it() {
    let Some(bench) = common::bench() else {
        return;
    };
    let ward = bench.ward();
    let spec = common::spec(bench.root());
    let limits = spec.limits;
    let live = ward.start(spec).await.expect("the box starts");
    let output = run(
        ward.as_ref(),
        &live.id,
        "df -m --output=avail / | tail -1; nproc",
    )
    .await;
    let mut numbers = output.stdout.lines().map(|line| line.trim().parse::<u64>());
    let free = numbers.next().expect("a line").expect("a number");
    assert!(
        (limits.disk_mib..limits.disk_mib + 512).contains(&free),
        "{free} MiB are free: {output:?}"
    );
    assert_eq!(numbers.next(), Some(Ok(1)));
    // Root may do what it likes, the disk is full when it is full, and the box goes on.
    let fill = "dd if=/dev/zero of=/root/full bs=1M 2>/dev/null; rm /root/full; \
                mount -t tmpfs none /mnt && touch /mnt/x && umount /mnt && echo mounted";
    let output = run(ward.as_ref(), &live.id, fill).await;
    assert_eq!(output.stdout, "mounted\n", "{output:?}");
    let refused = ward
        .set_limits(
            &live.id,
            &Limits {
                memory_mib: 4096,
                ..limits
            },
        )
        .await
        .expect_err("a machine does not grow");
    assert_eq!(refused.code, Code::NotEnforceable);
    assert_eq!(refused.field.as_deref(), Some("limits.memory_mib"));
    ward.destroy(&live.id).await.expect("it is destroyed");
    assert_eq!(bench.traces(&live), Vec::<String>::new());
}
