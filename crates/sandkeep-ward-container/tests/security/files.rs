//! Files, devices, mounts and ids.

use crate::attack;
use sandkeep_ward::{BoxSpec, LiveBox, conformance};
use std::{fs, os::unix::fs::MetadataExt as _, path::PathBuf};

attack!(the_mounts_are_those_we_made, target, {
    let expected = [
        "/",
        "/dev",
        "/dev/full",
        "/dev/mqueue",
        "/dev/null",
        "/dev/pts",
        "/dev/random",
        "/dev/shm",
        "/dev/tty",
        "/dev/urandom",
        "/dev/zero",
        "/proc",
        "/run",
        "/run/sandkeep-agent",
        "/sys",
    ];
    let mounts = target.works("cut -d' ' -f2 /proc/mounts | sort").await;
    for line in mounts.lines().filter(|line| !line.starts_with("/proc/")) {
        assert!(expected.contains(&line), "{line} is mounted");
    }
    for mount in expected {
        assert!(
            mounts.lines().any(|line| line == mount),
            "{mount} is missing"
        );
    }
    // The same list, seen by the host: nothing of the box has come out.
    let host = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!host.contains("sandkeep-agent") && !host.contains("wardtest-"));
});

attack!(devices_are_harmless_and_no_more_can_be_made, target, {
    // Not `find -type`: it asks the directory, which knows only what is below the mounts.
    let found = target
        .works(
            "cd /dev; for f in * pts/* shm/*; do if [ ! -L $f ] && { [ -c $f ] || [ -b $f ]; }; then echo $f; fi; done | xargs",
        )
        .await;
    assert_eq!(found, "full null random tty urandom zero pts/ptmx\n");
    for node in ["b 8 0", "c 1 1", "c 10 232", "c 1 3"] {
        target.fails(&format!("mknod /tmp/node {node}")).await;
        target.fails(&format!("mknod /dev/node {node}")).await;
        target.fails(&format!("mknod /dev/shm/node {node}")).await;
    }
    target
        .works("head -c 8 /dev/urandom | wc -c; echo x > /dev/null; head -c 1 /dev/zero")
        .await;
});

attack!(the_way_to_the_host_is_closed, target, {
    for path in ["/proc/1/root", "/proc/1/cwd", "/proc/1/exe"] {
        target.fails(&format!("readlink {path}")).await;
        target.fails(&format!("ls {path}/")).await;
    }
    target.fails("cat /proc/1/environ").await;
    target.fails("cat /proc/1/maps").await;
    // A chroot of one's own opened from outside is the way out of a chroot, not of a box.
    let escaped = target
        .python(
            "os.mkdir('/tmp/jail')
out = os.open('/', os.O_RDONLY)
os.chroot('/tmp/jail')
os.fchdir(out)
for _ in range(64): os.chdir('..')
os.chroot('.')
print(os.path.exists('/etc/passwd'), os.path.exists('/work'), sorted(os.listdir('/'))[:3])",
        )
        .await;
    let inside = target
        .works("ls -A / | LC_ALL=C sort | head -3 | xargs")
        .await;
    for name in inside.split_ascii_whitespace() {
        assert!(
            escaped.contains(name),
            "{escaped} is not the root of the box: {inside}"
        );
    }
    assert!(escaped.starts_with("True False"), "{escaped}");
});

// "Leaky Vessels", CVE-2024-21626.
attack!(no_descriptor_of_the_host_leaks_in, target, {
    let pid = target.host_pid();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let link = fs::read_link(entry.unwrap().path()).unwrap();
        let text = link.display().to_string();
        let harmless = ["socket:", "pipe:", "anon_inode:", "/dev/null", "/proc"]
            .iter()
            .any(|start| text.starts_with(start));
        assert!(harmless, "the agent holds {text}");
    }
    assert_eq!(
        fs::read_link(format!("/proc/{pid}/cwd")).unwrap(),
        PathBuf::from("/")
    );
    let own = target
        .works("for fd in /proc/self/fd/*; do readlink $fd; done; true")
        .await;
    for line in own.lines() {
        let harmless = ["pipe:", "/dev/null", "socket:", "/proc/"]
            .iter()
            .any(|start| line.starts_with(start));
        assert!(harmless, "a command holds {line}");
    }
    let entered = target
        .works("for fd in $(seq 0 63); do cd /proc/1/fd/$fd 2>/dev/null && echo $fd; done; true")
        .await;
    assert_eq!(entered, "");
});

// CVE-2019-5736: the program that enters a box is overwritten from inside.
attack!(the_agent_can_not_be_changed, target, {
    let agent = target.bench.state_dir().join("agent");
    let before = fs::read(&agent).unwrap();
    for command in [
        "echo evil > /run/sandkeep-agent",
        "chmod 777 /run/sandkeep-agent",
        "chown user /run/sandkeep-agent",
        "rm -f /run/sandkeep-agent",
        "mv /run/sandkeep-agent /run/other",
        "mv /tmp/evil /run/sandkeep-agent",
        "umount -l /run/sandkeep-agent",
        "echo evil > /proc/1/exe",
        "exec 9<>/run/sandkeep-agent",
        "truncate -s 0 /run/sandkeep-agent",
        "ln -f /run/sandkeep-agent /run/linked",
    ] {
        target.works("touch /tmp/evil").await;
        target.fails(command).await;
    }
    assert!(
        before == fs::read(&agent).unwrap(),
        "the agent's file has changed"
    );
    assert_eq!(fs::metadata(&agent).unwrap().mode() & 0o777, 0o111);
});

// Ids in the box are other ids on the host, and plain ids on the disk.
attack!(ids_are_mapped, target, {
    target
        .works("touch /root/mine && install -o user -g user /dev/null /tmp/theirs")
        .await;
    let pid = target.host_pid();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let uid: u32 = status
        .lines()
        .find_map(|line| {
            line.strip_prefix("Uid:\t")?
                .split('\t')
                .next()?
                .parse()
                .ok()
        })
        .unwrap();
    assert!(
        uid >= sandkeep_ward_container::DEFAULT_ID_BASE,
        "PID 1 is {uid} on the host"
    );
    let root = target.bench.last_root();
    let owner = |path: &str| fs::symlink_metadata(root.join(path)).unwrap().uid();
    assert_eq!((owner("root/mine"), owner("tmp/theirs")), (0, 1000));
    assert_eq!(
        target
            .works("stat -c %u /root/mine /tmp/theirs | xargs")
            .await,
        "0 1000\n"
    );
});

attack!(two_boxes_share_no_id, target, {
    let other = start_another(&target, |_| {}).await;
    let first = |live: &LiveBox| live.record["slot"].as_u64().unwrap();
    assert_ne!(first(&target.stage.live), first(&other));
    target.stage.ward.destroy(&other.id).await.unwrap();
});

// A template is made by others: its nodes and links must not reach the host.
attack!(a_hostile_template_reaches_nothing, target, {
    let other = start_another(&target, |root| {
        use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
        let node = root.join("null-from-disk");
        mknodat(
            CWD,
            &node,
            FileType::CharacterDevice,
            Mode::from_raw_mode(0o666),
            makedev(1, 3),
        )
        .unwrap();
    })
    .await;
    let output = conformance::run(
        target.stage.ward.as_ref(),
        &other.id,
        "ls -l /null-from-disk >&2; echo x > /null-from-disk",
    )
    .await;
    assert!(!output.success(), "{output:?}");
    target.stage.ward.destroy(&other.id).await.unwrap();

    // A link in the place of a mount point would have /proc mounted on the host's tree.
    for name in ["proc", "dev", "sys", "run"] {
        let spec = another_spec(&target, |root| {
            fs::rename(root.join(name), root.join("moved")).unwrap();
            std::os::unix::fs::symlink("/tmp", root.join(name)).unwrap();
        });
        let error = target
            .stage
            .ward
            .start(spec)
            .await
            .expect_err("a link is refused");
        assert!(error.message.contains(name), "{error}");
    }
});

fn another_spec(target: &crate::Target, prepare: impl FnOnce(&PathBuf)) -> BoxSpec {
    let spec = crate::common::spec(&target.bench);
    prepare(&spec.root);
    spec
}

async fn start_another(target: &crate::Target, prepare: impl FnOnce(&PathBuf)) -> LiveBox {
    let spec = another_spec(target, prepare);
    target
        .stage
        .ward
        .start(spec)
        .await
        .expect("another box starts")
}

// Subvolumes and snapshots of one's own are outside of the disk limit.
attack!(btrfs_tricks_are_refused_and_reflinks_work, target, {
    let answers = target
        .python(
            "fd = os.open('/tmp', os.O_RDONLY)
args = ctypes.create_string_buffer(4096)
args[8:11] = b'sub'
for request in (0x5000940e, 0x50009418, 0x50009401, 0x50009417, 0xc0109428, 0x8020942a, 0x5000940f):
    print(call(16, fd, request, args))",
        )
        .await;
    assert_eq!(answers, "EPERM\n".repeat(7));
    target
        .works("echo data > /tmp/a && cp --reflink=always /tmp/a /tmp/b && cmp /tmp/a /tmp/b")
        .await;
});

attack!(setuid_programs_work, target, {
    target
        .works("cp /usr/bin/id /tmp/setuid-id && chmod 4755 /tmp/setuid-id")
        .await;
    let output = target
        .stage
        .run_as("user", "/tmp/setuid-id -u; id -u")
        .await;
    assert_eq!(output.stdout, "0\n1000\n", "{output:?}");
    // On file systems of ours they do not.
    target
        .works("cp -p /tmp/setuid-id /run/setuid-id; chmod 4755 /run/setuid-id")
        .await;
    let output = target.stage.run_as("user", "/run/setuid-id -u").await;
    assert_eq!(output.stdout, "1000\n", "{output:?}");
});
