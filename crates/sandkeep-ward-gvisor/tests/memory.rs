//! Boxes written to disk with their memory come back as they were, more than once.

mod common;

use sandkeep_model::Code;
use sandkeep_ward::{
    Ward,
    conformance::{Bench as _, run},
};
use std::collections::HashSet;

/// Holds 40 MB, a listener, a connection to itself, and a pipe to a child; tells on request.
const PROGRAM: &str = r#"
import os, random, socket, subprocess, sys
ballast = random.Random(7).randbytes(40 << 20)
listener = socket.create_server(("127.0.0.1", 8099))
near = socket.create_connection(("127.0.0.1", 8099))
far, _ = listener.accept()
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
kept = open("/tmp/kept", "w+"); kept.write("still open"); kept.flush(); os.unlink("/tmp/kept")
commands, answers = "/run/commands", "/run/answers"
os.mkfifo(commands); os.mkfifo(answers)
print("ready", flush=True)
sys.stdout = open("/dev/null", "w")
asked = 0
while True:
    open(commands).read()
    asked += 1
    near.sendall(b"over"); over = far.recv(4)
    child.stdin.write(b"down\n"); child.stdin.flush(); down = child.stdout.readline()
    kept.seek(0)
    same = ballast == random.Random(7).randbytes(40 << 20)
    with open(answers, "w") as answer:
        answer.write(f"{asked} {over.decode()} {down.decode().strip()} {kept.read()} {same} {os.urandom(8).hex()}")
"#;
const ASK: &str = "echo > /run/commands; cat /run/answers";

async fn begin(ward: &dyn Ward, id: &sandkeep_model::SandboxId) {
    let start = format!(
        "cat > /root/program.py <<'END'\n{PROGRAM}\nEND\n\
         nohup python3 /root/program.py > /run/log 2>&1 &\n\
         until grep -q ready /run/log; do sleep 0.1; done"
    );
    let output = run(ward, id, &start).await;
    assert!(output.success(), "{output:?}");
}

/// The answer without its random end, and that end.
async fn ask(ward: &dyn Ward, id: &sandkeep_model::SandboxId) -> (String, String) {
    let output = run(ward, id, ASK).await;
    assert!(output.success(), "{output:?}");
    let (told, random) = output.stdout.rsplit_once(' ').expect("an answer");
    (told.to_owned(), random.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_copies_of_a_busy_box_go_on_and_so_does_it() {
    let Some(bench) = common::bench() else {
        return;
    };
    let ward = bench.ward();
    let spec = common::spec(bench.root());
    let (id, root) = (spec.id.clone(), spec.root.clone());
    let live = ward.start(spec).await.expect("the box starts");
    begin(ward.as_ref(), &id).await;
    assert_eq!(
        ask(ward.as_ref(), &id).await.0,
        "1 over down still open True"
    );

    ward.freeze(&id).await.expect("it is frozen");
    let image = bench.directory("image");
    ward.save(&id, &image).await.expect("it is written");
    let copies: Vec<_> = (0..3).map(|_| bench.copy_of(&root)).collect();
    ward.thaw(&id).await.expect("it goes on");
    let (told, random) = ask(ward.as_ref(), &id).await;
    assert_eq!(told, "2 over down still open True");

    let mut seen = HashSet::from([random]);
    let mut restored = Vec::new();
    for root in copies {
        let spec = common::spec(root);
        let copy = ward.restore(spec, &image).await.expect("a copy starts");
        let (told, random) = ask(ward.as_ref(), &copy.id).await;
        assert_eq!(told, "2 over down still open True");
        assert!(seen.insert(random), "every copy draws its own numbers");
        restored.push(copy);
    }
    // Disks are apart: what one writes no other sees.
    for copy in &restored {
        let output = run(ward.as_ref(), &copy.id, "ls /root; echo x > /root/own").await;
        assert_eq!(output.stdout, "program.py\n", "{output:?}");
    }
    // A copy can be written again.
    let first = &restored[0];
    ward.freeze(&first.id).await.expect("it is frozen");
    let image = bench.directory("again");
    ward.save(&first.id, &image).await.expect("it is written");
    ward.destroy(&first.id).await.expect("it is destroyed");
    let again = sandkeep_ward::BoxSpec {
        id: first.id.clone(),
        ..common::spec(bench.copy_of(&bench.lab.last_root()))
    };
    // Its own disk is gone with nobody, so another copy of the first one serves.
    let back = ward.restore(again, &image).await.expect("it comes back");
    assert_eq!(
        ask(ward.as_ref(), &back.id).await.0,
        "3 over down still open True"
    );

    for live in restored.iter().chain([&live]) {
        ward.destroy(&live.id).await.expect("it is destroyed");
        assert_eq!(bench.traces(live), Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_can_not_be_written_is_named_and_the_box_goes_on() {
    let Some(bench) = common::bench() else {
        return;
    };
    let ward = bench.ward();
    let live = ward
        .start(common::spec(bench.root()))
        .await
        .expect("the box starts");
    let hold = "nohup sh -c 'exec 3> /root/deleted; rm /root/deleted; echo yes > /run/held; \
                exec sleep 1000' >/dev/null 2>&1 & until [ -s /run/held ]; do sleep 0.1; done";
    assert!(run(ward.as_ref(), &live.id, hold).await.success());
    ward.freeze(&live.id).await.expect("it is frozen");
    let image = bench.directory("image");
    let refused = ward
        .save(&live.id, &image)
        .await
        .expect_err("a deleted file is open");
    assert_eq!(refused.code, Code::NotEnforceable, "{refused:?}");
    assert!(refused.message.contains("/root/deleted"), "{refused:?}");
    ward.thaw(&live.id).await.expect("it goes on");
    assert!(run(ward.as_ref(), &live.id, "pkill sleep").await.success());
    // Without the obstacle it can be written.
    ward.freeze(&live.id).await.expect("it is frozen");
    let image = bench.directory("another");
    ward.save(&live.id, &image).await.expect("it is written");
    ward.destroy(&live.id).await.expect("it is destroyed");
    assert_eq!(bench.traces(&live), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_is_none_leaves_nothing() {
    let Some(bench) = common::bench() else {
        return;
    };
    let ward = bench.ward();
    let spec = common::spec(bench.root());
    let id = spec.id.clone();
    let image = bench.directory("empty");
    ward.restore(spec, &image)
        .await
        .expect_err("there is nothing in it");
    assert!(!bench.state_dir().join(id.as_str()).exists());
    let error = ward.connect(&id).await.err().expect("there is no box");
    assert_eq!(error.code, Code::NotFound);
}
