//! Boxes written to disk with their memory come back as they were, more than once.

use super::{
    bench::{Bench, HostLimits, SMALL},
    freeze::assert_still,
    run,
};
use crate::{Adoption, BoxSpec, LiveBox, Ward};
use sandkeep_model::{Code, Limits, SandboxId};
use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
};
use tokio::task::JoinSet;

/// A bench of a level that writes memory to disk.
pub trait MemoryBench: Bench {
    /// Another writable root with the files of this one. The bench removes it at its end.
    fn copy_of(&self, root: &Path) -> PathBuf;

    /// A fresh empty directory, for an image. The bench removes it at its end.
    fn directory(&self) -> PathBuf;

    /// Something in a box that keeps this level's engine from writing it, if there is such
    /// a thing.
    fn obstacle(&self) -> Option<Obstacle>;
}

/// What an engine refuses.
#[derive(Debug, Clone, Copy)]
pub struct Obstacle {
    /// Makes it, as a shell command.
    pub make: &'static str,
    /// Takes it away.
    pub undo: &'static str,
    /// What the refusal must name.
    pub named: &'static str,
}

/// Holds 40 MB, a listener, a connection to itself, a pipe to a child, a shell on a terminal
/// and a deleted file; tells on request.
const PROGRAM: &str = r#"
import os, pty, random, socket, subprocess, sys
ballast = random.Random(7).randbytes(1 << 20) * 40
listener = socket.create_server(("127.0.0.1", 8099))
near = socket.create_connection(("127.0.0.1", 8099))
far, _ = listener.accept()
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
master, slave = pty.openpty()
shell = subprocess.Popen(["sh"], stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
def say(line):
    os.write(master, line.encode() + b"\n")
def hear(end):
    heard = b""
    while not heard.endswith(end):
        heard += os.read(master, 100)
say("PS1=; stty -echo; kept=variable; echo re''ady"); hear(b"ready\r\n")
kept = open("/tmp/kept", "w+"); kept.write("still open"); kept.flush(); os.unlink("/tmp/kept")
commands, answers = "/run/commands", "/run/answers"
os.mkfifo(commands); os.mkfifo(answers)
print("ready", flush=True)
sys.stdout = open("/dev/null", "w")
asked = 0
while True:
    open(commands).read()
    asked += 1
    near.sendall(b"over"); over = far.recv(4).decode()
    child.stdin.write(b"down\n"); child.stdin.flush(); down = child.stdout.readline().decode().strip()
    say("echo $kept"); hear(b"variable\r\n")
    kept.seek(0)
    same = ballast == random.Random(7).randbytes(1 << 20) * 40
    with open(answers, "w") as answer:
        answer.write(f"{asked} {over} {down} {kept.read()} {same} {os.urandom(8).hex()}")
"#;
const ASK: &str = "echo > /run/commands; cat /run/answers";

/// Room for the program.
const ROOMY: Limits = Limits {
    memory_mib: 384,
    pids: 100,
    ..SMALL
};

fn spec_on(root: PathBuf, limits: Limits) -> BoxSpec {
    let id = SandboxId::random();
    BoxSpec {
        hostname: id.to_string(),
        introduction: None,
        id,
        root,
        limits,
    }
}

/// A box with the program in it.
struct Busy {
    ward: Arc<dyn Ward>,
    live: LiveBox,
    root: PathBuf,
}

impl Busy {
    async fn start(bench: &dyn MemoryBench) -> Self {
        let ward = bench.ward();
        let root = bench.root();
        let live = ward
            .start(spec_on(root.clone(), ROOMY))
            .await
            .expect("the box starts");
        let start = format!(
            "cat > /root/program.py <<'END'\n{PROGRAM}\nEND\n\
             nohup python3 /root/program.py > /run/log 2>&1 &\n\
             until grep -q ready /run/log; do sleep 0.1; done"
        );
        let output = run(ward.as_ref(), &live.id, &start).await;
        assert!(output.success(), "{output:?}");
        Self { ward, live, root }
    }

    async fn save(&self, bench: &dyn MemoryBench) -> PathBuf {
        save(&self.ward, &self.live.id, bench).await
    }
}

/// Freezes a box and writes it; it stays frozen.
async fn save(ward: &Arc<dyn Ward>, id: &SandboxId, bench: &dyn MemoryBench) -> PathBuf {
    ward.freeze(id).await.expect("it is frozen");
    let image = bench.directory();
    ward.save(id, &image).await.expect("it is written");
    image
}

/// The answer without its random end, and that end.
async fn ask(ward: &dyn Ward, id: &SandboxId) -> (String, String) {
    let output = run(ward, id, ASK).await;
    assert!(output.success(), "{output:?}");
    let (told, random) = output.stdout.rsplit_once(' ').expect("an answer");
    (told.to_owned(), random.to_owned())
}

/// Asks for the `count`th time.
async fn assert_answers(ward: &dyn Ward, id: &SandboxId, count: u32) -> String {
    let (told, random) = ask(ward, id).await;
    assert_eq!(told, format!("{count} over down still open True"));
    random
}

async fn end(ward: &Arc<dyn Ward>, bench: &dyn MemoryBench, live: &LiveBox) {
    ward.destroy(&live.id).await.expect("it is destroyed");
    assert_eq!(bench.traces(live), Vec::<String>::new());
}

/// Written, ended, and back under its own id on its own disk; and that several times.
pub async fn a_box_comes_back_from_the_disk_as_it_was(bench: &dyn MemoryBench) {
    let Busy { ward, live, root } = Busy::start(bench).await;
    assert_answers(ward.as_ref(), &live.id, 1).await;
    let mut live = live;
    for count in 2..5 {
        let image = save(&ward, &live.id, bench).await;
        end(&ward, bench, &live).await;
        let spec = BoxSpec {
            id: live.id.clone(),
            ..spec_on(root.clone(), ROOMY)
        };
        live = ward.restore(spec, &image).await.expect("it comes back");
        assert_answers(ward.as_ref(), &live.id, count).await;
        let output = run(ward.as_ref(), &live.id, "hostname").await;
        assert!(output.success(), "{output:?}");
    }
    end(&ward, bench, &live).await;
}

/// Copies of one image, all started in the same moment, while the box itself goes on.
pub async fn copies_made_at_once_are_right_and_apart(bench: &dyn MemoryBench) {
    const COPIES: usize = 4;
    let busy = Busy::start(bench).await;
    assert_answers(busy.ward.as_ref(), &busy.live.id, 1).await;
    let image = busy.save(bench).await;
    let roots: Vec<_> = (0..COPIES).map(|_| bench.copy_of(&busy.root)).collect();
    let Busy { ward, live, .. } = busy;
    ward.thaw(&live.id).await.expect("it goes on");
    let mut seen = HashSet::from([assert_answers(ward.as_ref(), &live.id, 2).await]);

    let mut restoring = JoinSet::new();
    for root in roots {
        let (ward, image) = (Arc::clone(&ward), image.clone());
        restoring.spawn(async move { ward.restore(spec_on(root, ROOMY), &image).await });
    }
    let copies: Vec<LiveBox> = restoring
        .join_all()
        .await
        .into_iter()
        .map(|made| made.expect("a copy starts"))
        .collect();
    for copy in &copies {
        let random = assert_answers(ward.as_ref(), &copy.id, 2).await;
        assert!(seen.insert(random), "every copy draws its own numbers");
        // Disks are apart: what one writes no other sees.
        let output = run(ward.as_ref(), &copy.id, "ls /root; echo x > /root/own").await;
        assert_eq!(output.stdout, "program.py\n", "{output:?}");
    }
    for live in copies.iter().chain([&live]) {
        end(&ward, bench, live).await;
    }
}

pub async fn a_box_that_is_written_stays_frozen_and_goes_on(bench: &dyn MemoryBench) {
    let busy = Busy::start(bench).await;
    busy.save(bench).await;
    assert_still(&busy.ward, &busy.live.id).await;
    // As often as somebody wants.
    busy.save(bench).await;
    assert_still(&busy.ward, &busy.live.id).await;
    let Busy { ward, live, .. } = busy;
    ward.thaw(&live.id).await.expect("it goes on");
    assert_answers(ward.as_ref(), &live.id, 1).await;
    let image = bench.directory();
    let refused = ward.save(&live.id, &image).await;
    let refused = refused.expect_err("a box that runs is not written");
    assert_eq!(refused.code, Code::Conflict, "{refused:?}");
    end(&ward, bench, &live).await;
}

pub async fn what_can_not_be_written_is_named_and_the_box_goes_on(bench: &dyn MemoryBench) {
    let Some(obstacle) = bench.obstacle() else {
        return;
    };
    let Busy { ward, live, .. } = Busy::start(bench).await;
    let output = run(ward.as_ref(), &live.id, obstacle.make).await;
    assert!(output.success(), "{output:?}");
    ward.freeze(&live.id).await.expect("it is frozen");
    let image = bench.directory();
    let refused = ward.save(&live.id, &image).await;
    let refused = refused.expect_err("there is something that can not be written");
    assert_eq!(refused.code, Code::NotEnforceable, "{refused:?}");
    assert!(refused.message.contains(obstacle.named), "{refused:?}");
    assert_still(&ward, &live.id).await;
    ward.thaw(&live.id).await.expect("it goes on");
    assert_answers(ward.as_ref(), &live.id, 1).await;
    // Without the obstacle it can be written.
    let output = run(ward.as_ref(), &live.id, obstacle.undo).await;
    assert!(output.success(), "{output:?}");
    save(&ward, &live.id, bench).await;
    end(&ward, bench, &live).await;
}

pub async fn an_image_that_is_none_leaves_nothing(bench: &dyn MemoryBench) {
    let ward = bench.ward();
    let spec = spec_on(bench.root(), ROOMY);
    let id = spec.id.clone();
    ward.restore(spec, &bench.directory())
        .await
        .expect_err("there is nothing in it");
    let error = ward.connect(&id).await.err().expect("there is no box");
    assert_eq!(error.code, Code::NotFound);
    let swept = ward.sweep(&HashSet::new()).await.expect("it is swept");
    assert_eq!((swept.processes, swept.files), (0, 0), "{swept:?}");
}

pub async fn a_restored_box_is_adopted_after_a_restart(bench: &dyn MemoryBench) {
    let busy = Busy::start(bench).await;
    let image = busy.save(bench).await;
    let Busy { ward, live, root } = busy;
    end(&ward, bench, &live).await;
    let live = ward.restore(spec_on(root, ROOMY), &image).await;
    let live = live.expect("it comes back");
    drop(ward);

    let ward = bench.ward();
    let found = ward.adopt(&live).await.expect("it is looked for");
    assert_eq!(found, Adoption::Alive);
    ward.sweep(&HashSet::from([live.id.clone()]))
        .await
        .expect("it is swept");
    assert_answers(ward.as_ref(), &live.id, 1).await;
    // It is like any other box: it can be frozen and written again.
    save(&ward, &live.id, bench).await;
    end(&ward, bench, &live).await;
}

/// The limits of a copy are its own, not those of the box it was.
pub async fn limits_hold_after_a_restore(bench: &dyn MemoryBench) {
    let busy = Busy::start(bench).await;
    let image = busy.save(bench).await;
    let Busy { ward, live, root } = busy;
    end(&ward, bench, &live).await;
    let limits = Limits {
        cpu_millis: 700,
        memory_mib: 320,
        pids: 80,
        open_files: 512,
        ..ROOMY
    };
    let live = ward.restore(spec_on(root, limits), &image).await;
    let live = live.expect("it comes back");
    assert_eq!(bench.host_limits(&live), HostLimits::from(limits));
    let output = run(ward.as_ref(), &live.id, "ulimit -n").await;
    assert_eq!(output.stdout, "512\n");
    let fork_bomb = "perl -e 'while ($n < 500 && defined($child = fork)) { \
         if (!$child) { close STDOUT; close STDERR; sleep 1000; exit } $n++ } print $n'";
    let output = run(ward.as_ref(), &live.id, fork_bomb).await;
    let forks: u32 = output.stdout.parse().expect("a count of forks");
    let most = limits.pids + bench.more_forks();
    assert!(forks > 0 && forks < most, "{output:?}");
    end(&ward, bench, &live).await;
}
