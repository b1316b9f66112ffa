//! The real base, built by mmdebstrap from this host's sources (or taken from the
//! directory in SANDKEEP_BASE_CACHE), and a build that is given up half-way.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::{MIB, State, id};
use sandkeep_vault::Stage;
use std::{
    fs,
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::Path,
    process::Command,
    sync::{Arc, Mutex},
    time::Duration,
};

/// As a sandbox has it: the pool is mounted `nosuid`, a sandbox's own view of it is not.
fn in_root(root: &Path, script: &str) -> String {
    let enter = "mount --bind \"$0\" \"$0\" && mount -o remount,bind,suid \"$0\" && \
                 exec chroot \"$0\" /bin/su user -c \"$1\"";
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", enter])
        .arg(root)
        .arg(script)
        .output()
        .unwrap();
    assert!(output.status.success(), "{script}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[tokio::test]
async fn the_base_is_what_an_agent_expects() {
    let state = State::sized(3 << 30);
    let vault = state.open().await;
    let seen: Arc<Mutex<Vec<(Stage, f32)>>> = Arc::default();
    let tell = Arc::clone(&seen);
    let base = vault
        .build_base(move |step| tell.lock().unwrap().push((step.stage, step.fraction)))
        .await
        .unwrap();
    assert_eq!(base.name.as_str(), "base");
    assert!(base.size_bytes < 1024 * MIB, "{} bytes", base.size_bytes);
    let steps = seen.lock().unwrap().clone();
    assert_eq!(steps.last(), Some(&(Stage::Done, 1.0)));
    assert!(
        steps.windows(2).all(|pair| pair[0].1 <= pair[1].1),
        "{steps:?}"
    );
    assert_eq!(state.staging(), 0);

    let read = |path: &str| fs::read_to_string(base.path.join(path)).unwrap();
    assert_eq!(read("etc/resolv.conf"), "nameserver 10.0.0.1\n");
    assert!(
        read("etc/shadow")
            .lines()
            .any(|line| line.starts_with("root:*:"))
    );
    assert_eq!(read("etc/machine-id"), "");
    assert_eq!(fs::read_dir(base.path.join("dev")).unwrap().count(), 0);
    assert!(!base.path.join("etc/apt/apt.conf.d/99mmdebstrap").exists());
    let sudo = fs::metadata(base.path.join("usr/bin/sudo")).unwrap();
    assert_eq!(sudo.permissions().mode() & 0o7777, 0o4755);

    let disk = vault
        .create_disk(&id(), &base.name, 256 * MIB)
        .await
        .unwrap();
    let root = &disk.path;
    assert_eq!(in_root(root, "id -u; echo $HOME"), "1000\n/home/user");
    assert_eq!(in_root(root, "sudo -n id -u"), "0");
    assert_eq!(
        in_root(root, "python -c 'import venv, pip; print(6*7)'"),
        "42"
    );
    assert_eq!(in_root(root, "node -p 6*7"), "42");
    assert_eq!(in_root(root, "echo '{\"a\":[1,42]}' | jq .a[1]"), "42");
    let source = "int main(){return 42;}";
    let compiled = format!("cd && echo '{source}' >a.c && gcc a.c && ./a.out; echo $?");
    assert_eq!(in_root(root, &compiled), "42");
    for tool in [
        "git", "curl", "rg", "tmux", "ssh", "ip", "ps", "less", "unzip", "xz", "zstd", "make",
        "g++", "nano", "vi",
    ] {
        in_root(root, &format!("command -v {tool}"));
    }
    assert_no_devices(&base.path.join("etc"));
}

fn assert_no_devices(dir: &Path) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        assert!(
            !kind.is_block_device() && !kind.is_char_device(),
            "{entry:?}"
        );
    }
}

#[tokio::test]
async fn a_build_given_up_leaves_nothing() {
    let state = State::sized(3 << 30);
    let vault = state.open().await;
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let building = vault.clone();
    let build = tokio::spawn(async move {
        building
            .build_base(move |step| tell.send(step.stage).unwrap_or_default())
            .await
    });
    // Far enough that something is there to be taken away.
    while told.recv().await.unwrap() < Stage::EssentialPackages {}
    build.abort();
    assert!(build.await.unwrap_err().is_cancelled());
    // The callback goes when the build's thread has cleaned up and ended.
    while told.recv().await.is_some() {}
    for _ in 0..600 {
        if state.staging() == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(state.staging(), 0);
    assert!(vault.templates().await.unwrap().is_empty());
    vault.close().await.unwrap();
}
