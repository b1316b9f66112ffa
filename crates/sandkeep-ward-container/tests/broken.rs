//! CRIU that does not do what it should: killed, or led astray. Boxes stay what they were,
//! and one that is not confined never runs.

mod common;

use common::ContainerBench;
use sandkeep_ward::{
    BoxSpec, LiveBox, Ward,
    conformance::{Bench as _, MemoryBench as _, run},
};
use std::{
    collections::HashSet,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::time::timeout;

/// The one that `script/test` builds.
const REAL: &str = "/usr/local/lib/sandkeep/criu";

/// A program in front of CRIU. Asked for its version it is CRIU.
fn in_front(bench: &ContainerBench, name: &str, script: &str) -> PathBuf {
    let path = bench.directory().join(name);
    let text = format!(
        "#!/bin/sh\ncase $1 in --version) exec {REAL} --version ;; esac\nreal={REAL}\n{script}\n"
    );
    fs::write(&path, text).expect("a script");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
    path
}

/// CRIU that is killed after so many hundredths of a second, and takes its caller along.
fn killed_after(bench: &ContainerBench, hundredths: u32) -> PathBuf {
    let script =
        format!("\"$real\" \"$@\" & child=$!; sleep 0.{hundredths:02}; kill -9 $child; kill -9 $$");
    in_front(bench, "criu", &script)
}

/// A connection to itself and a count, asked for by a pipe.
const PROGRAM: &str = r#"
import os, socket
listener = socket.create_server(("127.0.0.1", 8098))
near = socket.create_connection(("127.0.0.1", 8098))
far, _ = listener.accept()
ballast = os.urandom(64 << 20)
os.mkfifo("/run/commands"); os.mkfifo("/run/answers")
open("/run/ready", "w").write("yes")
count = 0
while True:
    open("/run/commands").read()
    count += 1
    near.sendall(b"over")
    open("/run/answers", "w").write(f"{count} {far.recv(4).decode()}")
"#;

async fn begin(ward: &dyn Ward, spec: BoxSpec) -> LiveBox {
    let live = ward.start(spec).await.expect("the box starts");
    let start = format!(
        "cat > /root/program.py <<'END'\n{PROGRAM}\nEND\n\
         nohup python3 /root/program.py > /dev/null 2>&1 &\n\
         until [ -s /run/ready ]; do sleep 0.1; done"
    );
    let output = run(ward, &live.id, &start).await;
    assert!(output.success(), "{output:?}");
    live
}

async fn ask(ward: &dyn Ward, live: &LiveBox) -> String {
    let output = run(ward, &live.id, "echo > /run/commands; cat /run/answers").await;
    assert!(output.success(), "{output:?}");
    output.stdout
}

async fn end(bench: &ContainerBench, ward: &dyn Ward, live: &LiveBox) {
    ward.destroy(&live.id).await.expect("it is destroyed");
    assert_eq!(bench.traces(live), Vec::<String>::new());
}

/// An image of a box with the program in it, and the root that belongs to it.
async fn image(bench: &ContainerBench) -> (PathBuf, PathBuf) {
    let ward = bench.ward();
    let spec = common::spec(bench);
    let root = spec.root.clone();
    let live = begin(ward.as_ref(), spec).await;
    ward.freeze(&live.id).await.expect("it is frozen");
    let image = bench.directory();
    ward.save(&live.id, &image).await.expect("it is written");
    end(bench, ward.as_ref(), &live).await;
    (image, root)
}

/// Nothing came of it and nothing is left of it.
async fn assert_no_box(
    bench: &ContainerBench,
    ward: Arc<dyn Ward>,
    root: &Path,
    image: &Path,
) -> String {
    let spec = common::spec_on(root.to_owned());
    let id = spec.id.clone();
    let error = ward
        .restore(spec, image)
        .await
        .expect_err("there is no box");
    assert!(!bench.state_dir().join(id.as_str()).exists(), "{error:?}");
    let swept = ward.sweep(&HashSet::new()).await.expect("it is swept");
    assert_eq!(swept.processes, 0, "{swept:?} after {error:?}");
    error.message
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn criu_killed_while_it_writes_leaves_the_box_as_it_was() {
    let Some(bench) = common::bench() else {
        return;
    };
    let live = begin(bench.ward().as_ref(), common::spec(&bench)).await;
    for (count, hundredths) in [1, 4, 7, 10, 15].into_iter().enumerate() {
        let ward = bench.ward_with(Some(killed_after(&bench, hundredths)));
        ward.adopt(&live).await.expect("it is found");
        ward.freeze(&live.id).await.expect("it is frozen");
        let written = ward.save(&live.id, &bench.directory()).await;
        written.expect_err("its CRIU was killed");
        ward.thaw(&live.id).await.expect("it goes on");
        assert_eq!(
            ask(ward.as_ref(), &live).await,
            format!("{} over", count + 1)
        );
    }
    // And it can be written.
    let ward = bench.ward();
    ward.adopt(&live).await.expect("it is found");
    ward.freeze(&live.id).await.expect("it is frozen");
    let image = bench.directory();
    ward.save(&live.id, &image).await.expect("it is written");
    end(&bench, ward.as_ref(), &live).await;
    let spec = common::spec_on(bench.last_root());
    let live = ward.restore(spec, &image).await.expect("it comes back");
    assert_eq!(ask(ward.as_ref(), &live).await, "6 over");
    end(&bench, ward.as_ref(), &live).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn criu_killed_while_it_restores_leaves_nothing() {
    let Some(bench) = common::bench() else {
        return;
    };
    let (image, root) = image(&bench).await;
    for hundredths in [1, 4, 7, 10, 15] {
        let ward = bench.ward_with(Some(killed_after(&bench, hundredths)));
        assert_no_box(&bench, ward, &root, &image).await;
    }
    // The image is as good as before.
    let ward = bench.ward();
    let spec = common::spec_on(root);
    let live = ward.restore(spec, &image).await.expect("it comes back");
    assert_eq!(ask(ward.as_ref(), &live).await, "1 over");
    end(&bench, ward.as_ref(), &live).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_box_could_not_be_woken_again_while_a_restore_hung() {
    let Some(bench) = common::bench() else {
        return;
    };
    let (image, root) = image(&bench).await;
    let hanging = bench.ward_with(Some(in_front(&bench, "criu", "exec sleep 1000")));
    let spec = common::spec_on(root.clone());
    let id = spec.id.clone();
    // Whoever wanted it gives up.
    let waiting = timeout(Duration::from_secs(1), hanging.restore(spec, &image));
    assert!(waiting.await.is_err(), "it hangs");
    let ended = timeout(Duration::from_secs(30), hanging.destroy(&id)).await;
    ended.expect("in time").expect("it is ended");
    let spec = BoxSpec {
        id,
        ..common::spec_on(root)
    };
    let ward = bench.ward();
    let live = ward.restore(spec, &image).await.expect("it comes back");
    assert_eq!(ask(ward.as_ref(), &live).await, "1 over");
    end(&bench, ward.as_ref(), &live).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_box_outside_of_its_cgroups_never_runs() {
    let Some(bench) = common::bench() else {
        return;
    };
    let (image, root) = image(&bench).await;
    // The cgroups of the host are not in the root of CRIU; the worker that started it sees them.
    let script = "cd /proc/$PPID/root/sys/fs/cgroup; \
                  for procs in memory/cgroup.procs cgroup.procs; do \
                  [ ! -w $procs ] || echo $$ > $procs; done; cd /; exec \"$real\" \"$@\"";
    let ward = bench.ward_with(Some(in_front(&bench, "criu", script)));
    let why = assert_no_box(&bench, ward, &root, &image).await;
    assert!(
        why.contains("not confined") && why.contains("is not in"),
        "{why}"
    );
}

/// The field of a thread's seccomp mode in CRIU's images: number 11, a varint.
const SECCOMP_MODE: u8 = 11 << 3;
const FILTERS: u8 = 2;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tampered_image_without_seccomp_never_runs() {
    let Some(bench) = common::bench() else {
        return;
    };
    let (image, root) = image(&bench).await;
    let mut changed = 0;
    for entry in fs::read_dir(&image).expect("an image").flatten() {
        if !entry.file_name().to_string_lossy().starts_with("core-") {
            continue;
        }
        let mut bytes = fs::read(entry.path()).expect("a file");
        // Field 12, the filter, follows at once.
        for at in 0..bytes.len().saturating_sub(2) {
            if bytes[at..].starts_with(&[SECCOMP_MODE, FILTERS, 12 << 3]) {
                bytes[at + 1] = 0;
                changed += 1;
            }
        }
        fs::write(entry.path(), bytes).expect("a changed file");
    }
    assert!(changed > 0, "no thread had a filter in the image");
    let why = assert_no_box(&bench, bench.ward(), &root, &image).await;
    assert!(
        why.contains("not confined") && why.contains("seccomp"),
        "{why}"
    );
}

/// `ret SECCOMP_RET_ALLOW`
const ALLOW: [u8; 8] = [0x06, 0, 0, 0, 0, 0, 0xff, 0x7f];
/// Where the first message of an image begins.
const HEAD: usize = 12;

/// The values of the fields of a protobuf message that have a length, with their numbers.
fn fields(message: &[u8]) -> Vec<(u64, std::ops::Range<usize>)> {
    let mut at = 0;
    let number = |at: &mut usize| {
        let (mut value, mut shift) = (0_u64, 0);
        loop {
            let byte = message[*at];
            *at += 1;
            value |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                return value;
            }
        }
    };
    let mut found = Vec::new();
    while at < message.len() {
        let tag = number(&mut at);
        if tag & 7 == 2 {
            let length = usize::try_from(number(&mut at)).expect("it fits");
            found.push((tag >> 3, at..at + length));
            at += length;
        } else {
            number(&mut at);
        }
    }
    found
}

/// As many programs in the same order, each as long as it was; none of them refuses anything.
fn allow_everything(programs: &Path) {
    let mut bytes = fs::read(programs).expect("a file");
    let mut changed = 0;
    for (_, entry) in fields(&bytes[HEAD..]) {
        let entry = HEAD + entry.start..HEAD + entry.end;
        for (number, filter) in fields(&bytes[entry.clone()]) {
            if number == 1 {
                let filter = &mut bytes[entry.start + filter.start..entry.start + filter.end];
                for instruction in filter.chunks_exact_mut(ALLOW.len()) {
                    instruction.copy_from_slice(&ALLOW);
                }
                changed += 1;
            }
        }
    }
    assert!(changed >= 5, "the programs of the box are in the image");
    fs::write(programs, bytes).expect("it is tampered with");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_with_other_seccomp_programs_was_restored() {
    let Some(bench) = common::bench() else {
        return;
    };
    let (image, root) = image(&bench).await;
    let programs = image.join("seccomp.img");
    let whole = fs::read(&programs).expect("a file");
    allow_everything(&programs);
    let why = assert_no_box(&bench, bench.ward(), &root, &image).await;
    assert!(why.contains("does not confine"), "{why}");
    // With the programs it had it comes back.
    fs::write(&programs, whole).expect("it is set right");
    let ward = bench.ward();
    let spec = common::spec_on(root);
    let live = ward.restore(spec, &image).await.expect("it comes back");
    assert_eq!(ask(ward.as_ref(), &live).await, "1 over");
    end(&bench, ward.as_ref(), &live).await;
}
