//! A QEMU that was taken over reaches nothing, and boxes share nothing they could change.

mod common;

use sandkeep_host::cgroup::{Cgroups, layout::Layout};
use sandkeep_ward::conformance::{Bench as _, MemoryBench as _, run};
use sandkeep_ward_microvm::{Bounds, Jail, prepare_host};
use std::{
    collections::HashSet,
    fs::{self, File},
    io::Read as _,
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

/// What somebody would try who runs as QEMU. Prints what worked.
const STAND_IN: &str = r#"
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
worked = []
def attempt(name, what):
    try:
        if what() not in (-1, None, False):
            worked.append(name)
    except Exception:
        pass
for path in ("/etc/passwd", "/root", "/home", "/var", "/tmp", "/sys/class", "/run", "/boot",
             "/proc/1/root/etc/passwd", "/proc/sys/kernel/core_pattern", "/proc/kcore", "/dev/kmsg", "/dev/mem",
             "/dev/net/tun", "/dev/kvm", SECRET):
    attempt("sees " + path, lambda: os.stat(path))
for path in ("/x", "/usr/x", "/dev/x", "/proc/x"):
    attempt("writes " + path, lambda: open(path, "w"))
for address in (("127.0.0.1", PORT), ("10.0.0.1", 22), ("192.0.2.1", 80)):
    def dial():
        s = socket.socket(); s.settimeout(1); s.connect(address); return True
    attempt(f"dials {address}", dial)
attempt("raw socket", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt("becomes root", lambda: os.setuid(0) or True)
attempt("joins groups", lambda: os.setgroups([0]) or True)
attempt("chroots", lambda: os.chroot("/usr") or True)
attempt("mounts", lambda: libc.mount(b"none", b"/proc", b"tmpfs", 0, None) == 0)
attempt("traces", lambda: libc.ptrace(16, VICTIM, 0, 0) == 0)
attempt("reads memory", lambda: open(f"/proc/{VICTIM}/mem", "rb"))
attempt("signals", lambda: os.kill(VICTIM, 0) or True)
attempt("sees others", lambda: len([p for p in os.listdir("/proc") if p.isdigit()]) > 1)
attempt("loads a module", lambda: libc.syscall(175, 0, 0, 0) == 0)
attempt("finds a KVM that is not its own", lambda: os.stat("/dev/kvm").st_uid != os.getuid() or os.stat("/dev/kvm").st_mode & 0o77)
attempt("changes who has KVM", lambda: os.chmod("/dev/kvm", 0o666) or True)
attempt("has rights", lambda: any(l.startswith("CapEff") and int(l.split()[1], 16) for l in open("/proc/self/status")))
attempt("may gain rights", lambda: any(l.startswith("NoNewPrivs") and "0" in l for l in open("/proc/self/status")))
sys.stdout.write("tried; worked: " + ", ".join(worked))
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_in_the_jail_reaches_nothing() {
    tried_in_the_jail(false, "").await;
}

/// With KVM it has a node of its own: that of the host is for others, and changes with them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_in_the_jail_with_kvm_reaches_nothing_else() {
    tried_in_the_jail(true, "sees /dev/kvm").await;
}

async fn tried_in_the_jail(with_kvm: bool, worked: &str) {
    let Some(bench) = common::bench() else {
        return;
    };
    prepare_host().expect("the place of jails");
    let secret = bench.directory();
    fs::write(secret.join("file"), "x").expect("a file of the host");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener of the host");
    let port = listener.local_addr().expect("an address").port();
    let script = STAND_IN
        .replace("SECRET", &format!("{:?}", secret.join("file")))
        .replace("PORT", &port.to_string())
        .replace("VICTIM", &std::process::id().to_string());
    let task = script.replace("sys.stdout", "sys.stderr");
    let layout = Layout::of_this_host().expect("cgroups");
    let name = sandkeep_host::cgroup::tree_name(&bench.directory());
    let tree = Cgroups::make_tree(&layout, &name).expect("a tree");
    let cgroups = tree.child("stand-in");
    cgroups.create().expect("a cgroup");
    // The real one has the network of its box; that it leads nowhere is the moat's to show.
    let (netns, ()) = sandkeep_host::netns::make(|| Ok(()))
        .await
        .expect("a network");
    let (mut said, says) = std::io::pipe().expect("a pipe");
    let mut command = Command::new("/usr/bin/python3");
    command
        .args(["-I", "-S", "-c", &script])
        .env_clear()
        .stdin(Stdio::null())
        .stdout(says)
        .stderr(Stdio::null());
    let open: OwnedFd = File::open("/dev/null").expect("a file").into();
    let mut jail = Jail::new(&cgroups, netns, 1_900_000_000).expect("a jail");
    if with_kvm {
        jail = jail.with_kvm();
    }
    jail.keep(open.as_raw_fd());
    let output = tokio::task::spawn_blocking(move || {
        jail.start(command).expect("it starts");
        let mut text = String::new();
        said.read_to_string(&mut text).expect("it says something");
        text
    })
    .await
    .expect("it ends");
    assert_eq!(output, format!("tried; worked: {worked}"));
    // So does a program of the host that works on the disk of a box.
    let bounds = Bounds {
        memory: 1 << 30,
        file: 0,
        cpu_seconds: 60,
        wait: Duration::from_secs(60),
    };
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-I", "-S", "-c", &task]).env_clear();
    let jail = Jail::for_one_task(1_900_000_000, bounds);
    let ended = tokio::task::spawn_blocking(move || jail.run(command))
        .await
        .expect("it ends")
        .expect("it starts");
    assert!(ended.status.success() && !ended.late, "{ended:?}");
    assert_eq!(ended.said, "tried; worked:");
    tree.child("stand-in")
        .remove(Duration::from_secs(10))
        .expect("nothing is left in it");
    tree.remove(Duration::from_secs(1)).expect("the tree goes");
}

/// One that does not end is ended; nothing of it is left, and its files are closed.
#[test]
fn a_task_in_the_jail_has_its_time() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    prepare_host().expect("the place of jails");
    let bounds = |cpu_seconds, wait| Bounds {
        memory: 1 << 30,
        file: 0,
        cpu_seconds,
        wait: Duration::from_millis(wait),
    };
    let run = |script: &str, bounds| {
        let (mut open, kept) = std::io::pipe().expect("a pipe");
        let mut jail = Jail::for_one_task(1_900_000_002, bounds);
        jail.keep(kept.as_raw_fd());
        let mut command = Command::new("/usr/bin/sh");
        command.args(["-c", script]).env_clear();
        let ended = jail.run(command).expect("it starts");
        drop(kept);
        // Ends when nobody holds the other end.
        open.read_to_end(&mut Vec::new()).expect("it is closed");
        ended
    };
    assert!(run("exec 2>&-; sleep 1000", bounds(60, 300)).late);
    let ended = run("while :; do :; done", bounds(1, 30_000));
    assert!(!ended.late && !ended.status.success(), "{ended:?}");
    let ended = run("echo why >&2; exit 3", bounds(60, 30_000));
    assert_eq!((ended.status.code(), ended.said.as_str()), (Some(3), "why"));
}

fn hashes(dir: &Path) -> Vec<(String, String)> {
    let mut all: Vec<_> = walk(dir)
        .into_iter()
        .map(|path| {
            let output = Command::new("sha256sum")
                .arg(&path)
                .output()
                .expect("a hash");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            (path.display().to_string(), text)
        })
        .collect();
    all.sort();
    all
}

fn walk(dir: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(dir).expect("a directory").flatten();
    let paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths
        .into_iter()
        .flat_map(|path| {
            if path.is_dir() {
                walk(&path)
            } else {
                vec![path]
            }
        })
        .collect()
}

/// Many boxes of one machine and one template: what they share is never written, what must
/// differ does, and the QEMU of each is locked in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn boxes_of_one_machine_share_nothing_they_can_change() {
    let Some(bench) = common::bench() else {
        return;
    };
    let ward = bench.ward();
    let first = ward
        .start(common::spec(bench.root()))
        .await
        .expect("the box starts");
    let template = bench.template();
    let shared = || [hashes(&template), hashes(&bench.machines_dir())];
    let before = shared();
    let mut lives = vec![first];
    for _ in 0..3 {
        let live = ward.start(common::spec(bench.root())).await;
        lives.push(live.expect("the box starts"));
    }
    let mut drawn = HashSet::new();
    let mut ids = HashSet::new();
    let mut tokens = HashSet::new();
    for live in &lives {
        // A box that writes all over its disk and memory.
        let write = "head -c 16 /dev/urandom | od -An -tx1; dd if=/dev/urandom of=/root/noise bs=1M count=8 \
                     2>/dev/null; dd if=/dev/urandom of=/dev/shm/noise bs=1M count=8 2>/dev/null; sync; \
                     cat /proc/sys/kernel/random/uuid";
        let output = run(ward.as_ref(), &live.id, write).await;
        assert!(output.success(), "{output:?}");
        assert!(
            drawn.insert(output.stdout),
            "two boxes drew the same numbers"
        );
        let status =
            fs::read_to_string(format!("/proc/{}/status", common::pid(live))).expect("QEMU runs");
        let line = |name: &str| {
            let found = status.lines().find(|line| line.starts_with(name));
            found
                .and_then(|line| line.split('\t').nth(1))
                .unwrap_or("?")
        };
        assert!(ids.insert(line("Uid:").to_owned()), "ids are not shared");
        assert_ne!(line("Uid:"), "0");
        assert_eq!(line("CapEff:"), "0000000000000000");
        assert_eq!(line("CapBnd:"), "0000000000000000");
        assert_eq!((line("NoNewPrivs:"), line("Seccomp:")), ("1", "2"));
        let token = fs::read(bench.state_dir().join(live.id.as_str()).join("token"));
        assert!(
            tokens.insert(token.expect("a token")),
            "tokens are not shared"
        );
    }
    assert_eq!(shared(), before, "what boxes share is as it was");
    for live in &lives {
        ward.destroy(&live.id).await.expect("it is destroyed");
    }
}
