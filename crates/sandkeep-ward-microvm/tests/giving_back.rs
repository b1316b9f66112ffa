//! A machine gives memory back that it has freed: its own pages and nothing else, and what it
//! still uses stays what it was.

mod common;

use rustix::fs::{SealFlags, fcntl_get_seals};
use sandkeep_ward::{
    LiveBox, Ward,
    conformance::{Bench as _, run},
};
use std::{
    fs::{self, File},
    io::Seek as _,
    process::Command,
    time::{Duration, Instant},
};

const TAKEN_MIB: u64 = 200;
/// A file and a process, see [`SUMS`].
const KEPT_MIB: u64 = 16 + 24;
/// What may stay of it: programs, tables, scraps of memory that are too small to be reported, of
/// which there are now more and now less.
const REST_MIB: u64 = TAKEN_MIB / 4;
/// The kernel of a machine reports every two seconds, emulated on a busy host rather less often.
const PATIENCE: Duration = Duration::from_secs(90);

fn spec(root: std::path::PathBuf) -> sandkeep_ward::BoxSpec {
    let mut spec = common::spec(root);
    spec.limits.memory_mib = 400;
    spec.limits.disk_mib = 600;
    spec
}

async fn told(ward: &dyn Ward, live: &LiveBox, command: &str) -> String {
    let output = run(ward, &live.id, command).await;
    assert!(output.success(), "{command}: {output:?}");
    output.stdout
}

/// Waits until the box has no more than this of its own.
async fn gives_back(live: &LiveBox, most: u64) {
    let end = Instant::now() + PATIENCE;
    loop {
        let own = common::own_mib(live);
        if own <= most {
            return;
        }
        assert!(
            Instant::now() < end,
            "{own} MiB are its own, not {most} or less"
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// The memory that a box shares with others, as its QEMU has it open.
fn shared(live: &LiveBox) -> File {
    let dir = format!("/proc/{}/fd", common::pid(live));
    let mut open = fs::read_dir(dir).expect("QEMU runs").flatten();
    let is_ram = |path: &std::path::Path| {
        let link = fs::read_link(path).unwrap_or_default();
        link.to_string_lossy().contains("sandkeep-ram")
    };
    let found = open.find(|entry| is_ram(&entry.path()));
    File::open(found.expect("its memory").path()).expect("it opens")
}

fn hash(mut file: &File) -> String {
    file.rewind().expect("its beginning");
    let input = file.try_clone().expect("a descriptor");
    let output = Command::new("sha256sum").stdin(input).output();
    String::from_utf8(output.expect("a hash").stdout).expect("text")
}

/// Of a file in memory and of what a process has in its own.
const SUMS: &str = "sha256sum < /dev/shm/kept; kill -USR1 $(cat /run/keeper); \
                    until [ -s /run/said ]; do sleep 0.1; done; cat /run/said; rm /run/said";
const KEEPER: &str = r#"
import hashlib, os, random, signal
data = random.Random(7).randbytes(24 << 20)
def say(*_):
    with open("/run/saying", "w") as f:
        f.write(hashlib.sha256(data).hexdigest() + "\n")
    os.rename("/run/saying", "/run/said")
signal.signal(signal.SIGUSR1, say)
with open("/run/keeper.new", "w") as f:
    f.write(str(os.getpid()))
os.rename("/run/keeper.new", "/run/keeper")
while True:
    signal.pause()
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn freed_memory_goes_back_and_used_memory_stays() {
    let Some(bench) = common::bench() else {
        return;
    };
    let ward = bench.ward();
    let neighbour = ward.start(spec(bench.root())).await.expect("a box");
    let live_spec = spec(bench.root());
    let root = live_spec.root.clone();
    let live = ward.start(live_spec).await.expect("a box");
    let ward = ward.as_ref();
    let keep = format!(
        "head -c 16M /dev/urandom > /dev/shm/kept; cat > /run/keeper.py <<'END'\n{KEEPER}\nEND\n\
         setsid python3 /run/keeper.py > /run/log 2>&1 < /dev/null & \
         until [ -s /run/keeper ]; do sleep 0.1; done"
    );
    for each in [&neighbour, &live] {
        told(ward, each, &keep).await;
    }
    let sums = told(ward, &live, SUMS).await;
    let theirs = told(ward, &neighbour, SUMS).await;
    let common_memory = shared(&live);
    let content = hash(&common_memory);
    let before = common::own_mib(&live);
    let theirs_before = common::own_mib(&neighbour);

    // Twice: what was given back is taken again.
    for _ in 0..2 {
        let take = format!("head -c {TAKEN_MIB}M /dev/urandom > /dev/shm/taken");
        told(ward, &live, &take).await;
        let full = common::own_mib(&live);
        assert!(full >= TAKEN_MIB + KEPT_MIB, "{before}, then {full}");
        told(ward, &live, "rm /dev/shm/taken").await;
        gives_back(&live, before + REST_MIB).await;
        assert_eq!(told(ward, &live, SUMS).await, sums);
    }
    assert_eq!(told(ward, &neighbour, SUMS).await, theirs);
    let theirs_after = common::own_mib(&neighbour);
    assert!(
        theirs_after < theirs_before + REST_MIB,
        "{theirs_before}, then {theirs_after}"
    );
    assert_eq!(
        hash(&common_memory),
        content,
        "what boxes share is as it was"
    );
    let seals = fcntl_get_seals(&common_memory).expect("seals");
    assert!(seals.contains(SealFlags::WRITE | SealFlags::SEAL));

    // Written down, copied twice (the second shares what the first got for itself), stopped and
    // going on: everything in use is there.
    let (image, copies) = bench.written::<2>(ward, &live.id, &root).await;
    assert_eq!(told(ward, &live, SUMS).await, sums);
    let mut all = vec![neighbour, live];
    for copy in copies {
        let copy = ward.restore(spec(copy), &image).await.expect("a copy");
        assert_eq!(told(ward, &copy, SUMS).await, sums);
        let take = format!("head -c {TAKEN_MIB}M /dev/urandom > /dev/shm/taken");
        told(ward, &copy, &take).await;
        let full = common::own_mib(&copy);
        told(ward, &copy, "rm /dev/shm/taken").await;
        gives_back(&copy, full - TAKEN_MIB + REST_MIB).await;
        assert_eq!(told(ward, &copy, SUMS).await, sums);
        all.push(copy);
    }
    for live in all {
        ward.destroy(&live.id).await.expect("it is destroyed");
        assert_eq!(bench.traces(&live), Vec::<String>::new());
    }
}

/// What it has read and written of files goes as well, when it has nothing to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_at_rest_lets_go_of_files_it_has_read() {
    let Some(bench) = common::bench() else {
        return;
    };
    let ward = bench.ward();
    let live = ward.start(spec(bench.root())).await.expect("a box");
    let ward = ward.as_ref();
    told(ward, &live, "head -c 16M /dev/urandom > /dev/shm/kept").await;
    let before = common::own_mib(&live);
    let fill = format!(
        "head -c {TAKEN_MIB}M /dev/urandom > /root/file; sync; sha256sum /root/file /dev/shm/kept"
    );
    let sums = told(ward, &live, &fill).await;
    let full = common::own_mib(&live);
    assert!(full >= before + TAKEN_MIB * 9 / 10, "{before}, then {full}");
    gives_back(&live, full - TAKEN_MIB + REST_MIB).await;
    let again = told(ward, &live, "sha256sum /root/file /dev/shm/kept").await;
    assert_eq!(again, sums);
    ward.destroy(&live.id).await.expect("it is destroyed");
    assert_eq!(bench.traces(&live), Vec::<String>::new());
}

/// Zeroes and discards blocks of a file on the disk itself, beneath the file system: what comes
/// back are zeroes, and the blocks beside them as they were.
const BENEATH: &str = r#"
import fcntl, os, struct
FIBMAP, BLKDISCARD, BLKZEROOUT, BLOCK, COUNT = 1, 0x1277, 0x127F, 4096, 1024
data = os.urandom(BLOCK * COUNT)
with open("/root/blocks", "wb") as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
disk = os.open("/dev/vda", os.O_RDWR)
expected = b""
with open("/root/blocks", "rb") as file:
    for n in range(COUNT):
        place, = struct.unpack("i", fcntl.ioctl(file, FIBMAP, struct.pack("i", n)))
        assert place > 0
        call = (BLKDISCARD, BLKZEROOUT, None)[n % 3]
        if call:
            fcntl.ioctl(disk, call, struct.pack("QQ", place * BLOCK, BLOCK))
        expected += data[n * BLOCK:(n + 1) * BLOCK] if call is None else bytes(BLOCK)
os.sync()
open("/proc/sys/vm/drop_caches", "w").write("3")
with open("/root/blocks", "rb") as file:
    print("right" if file.read() == expected else "wrong")
"#;

/// Disks are trimmed by the call that is answered for memory: there it must be carried out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_box_zeroes_or_trims_on_its_disk_is_gone() {
    let Some(bench) = common::bench() else {
        return;
    };
    let ward = bench.ward();
    let spec = spec(bench.root());
    let disk = spec.root.join(sandkeep_ward_microvm::DISK_FILE);
    let live = ward.start(spec).await.expect("a box");
    let ward = ward.as_ref();
    let blocks = || {
        use std::os::unix::fs::MetadataExt as _;
        File::open(&disk)
            .expect("the disk")
            .sync_all()
            .expect("it is written");
        fs::metadata(&disk).expect("the disk").blocks() >> 11
    };
    // Memory is dropped meanwhile, by the same call.
    let busy = "(for i in 1 2 3 4 5 6; do head -c 40M /dev/zero > /dev/shm/x; rm /dev/shm/x; sleep 2; done) \
                > /dev/null 2>&1 &";
    told(ward, &live, busy).await;
    let test = r#"
        set -e
        cd /root
        fresh() { sync; echo 3 > /proc/sys/vm/drop_caches; }
        head -c 64M /dev/urandom > whole; fresh; sum=$(sha256sum < whole)
        cp whole some; fresh
        fallocate --zero-range --offset 8M --length 16M some; fresh
        fallocate --punch-hole --offset 40M --length 8M some; fresh
        zeroes() { test "$(dd if=some bs=1M skip=$1 count=$2 2>/dev/null | tr -d '\0' | wc -c)" = 0; }
        zeroes 8 16; zeroes 40 8
        for part in "0 8" "24 16" "48 16"; do
            set -- $part
            a=$(dd if=some bs=1M skip=$1 count=$2 2>/dev/null | sha256sum)
            b=$(dd if=whole bs=1M skip=$1 count=$2 2>/dev/null | sha256sum)
            test "$a" = "$b"
        done
        test "$(sha256sum < whole)" = "$sum"
        echo right
    "#;
    assert_eq!(told(ward, &live, test).await, "right\n");
    let beneath =
        format!("cat > /root/beneath.py <<'END'\n{BENEATH}\nEND\npython3 /root/beneath.py");
    assert_eq!(told(ward, &live, &beneath).await, "right\n");
    let full = blocks();
    let trim = "rm /root/some; sync; fstrim / && sync; echo 3 > /proc/sys/vm/drop_caches; \
                wc -c < /root/whole";
    assert_eq!(told(ward, &live, trim).await.trim(), "67108864");
    let trimmed = blocks();
    assert!(
        trimmed + 30 < full,
        "the host has the blocks back: {full} MiB, then {trimmed}"
    );
    ward.destroy(&live.id).await.expect("it is destroyed");
}
