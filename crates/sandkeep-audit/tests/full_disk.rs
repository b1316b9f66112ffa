//! A disk that is full: a small file system of its own, in a mount namespace only this test sees.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::{fs, path::Path, time::Duration};

use common::denied;
use rustix::{
    mount::{MountFlags, MountPropagationFlags, mount, mount_change},
    thread::UnshareFlags,
};
use sandkeep_audit::{Action, Audit, AuditConfig, Filter};
use sandkeep_model::{Code, SandboxId};

fn with_small_disk(test: impl FnOnce(&Path) + Send) {
    let room = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: only this thread and those it starts are in the new namespace.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
            mount_change(
                "/",
                MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
            )
            .unwrap();
            mount(
                "none",
                room.path(),
                "tmpfs",
                MountFlags::empty(),
                Some(c"size=256k"),
            )
            .unwrap();
            test(room.path());
        });
    });
}

#[test]
fn a_full_disk_is_told_and_survived() {
    with_small_disk(|disk| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let dir = disk.join("audit");
            let config = AuditConfig {
                segment_bytes: 40_000,
                // A short line might still fit where a long one did not: not during this test.
                retry_every: Duration::from_secs(3600),
                ..AuditConfig::default()
            };
            let audit = Audit::open_with(&dir, config).unwrap();
            let id = SandboxId::random();
            let ballast = disk.join("ballast");
            fs::write(&ballast, vec![1; 100_000]).unwrap();
            let mut written = 0;
            let error = loop {
                match audit.append(denied(&id, "evil.test")).await {
                    Ok(seq) => written = seq,
                    Err(error) => break error,
                }
            };
            assert_eq!(error.code, Code::DiskFull, "{error}");
            assert!(!audit.healthy());
            // It goes on failing, and what was acknowledged stays sound.
            assert!(audit.append(denied(&id, "evil.test")).await.is_err());
            let verdict = audit.verify().unwrap();
            assert!(verdict.is_sound(), "{verdict:?}");
            assert_eq!(verdict.entries, written);

            fs::remove_file(&ballast).unwrap();
            audit.append(denied(&id, "evil.test")).await.unwrap();
            assert!(audit.healthy());
            let verdict = audit.verify().unwrap();
            assert!(verdict.is_sound(), "{verdict:?}");
            let told: u64 = audit
                .read(Filter::default())
                .unwrap()
                .map(|record| match record.unwrap().action {
                    Action::EntriesLost { count } => count,
                    _ => 0,
                })
                .sum();
            assert_eq!(told, 2);
        });
    });
}
