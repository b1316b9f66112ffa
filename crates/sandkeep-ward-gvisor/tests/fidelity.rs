//! What the newest `runsc` can do and the oldest cannot, and what both must never do wrong.

mod common;

use common::GvisorBench;
use sandkeep_model::{Code, Limits, SandboxId};
use sandkeep_ward::{
    BoxSpec, LiveBox, Ward,
    conformance::{Bench as _, MemoryBench as _, run, run_as},
};
use std::{path::PathBuf, sync::Arc};

struct Started {
    bench: GvisorBench,
    ward: Arc<dyn Ward>,
    live: LiveBox,
    root: PathBuf,
}

fn spec(root: PathBuf) -> BoxSpec {
    let id = SandboxId::random();
    BoxSpec {
        hostname: id.to_string(),
        introduction: None,
        id,
        root,
        limits: Limits {
            memory_mib: 384,
            ..Limits::default()
        },
    }
}

impl Started {
    async fn on(bench: GvisorBench) -> Self {
        let (ward, root) = (bench.ward(), bench.root());
        let live = ward.start(spec(root.clone())).await.expect("it starts");
        Self {
            bench,
            ward,
            live,
            root,
        }
    }

    async fn sh(&self, command: &str) -> String {
        let output = run(self.ward.as_ref(), &self.live.id, command).await;
        assert!(output.success(), "{output:?}");
        output.stdout
    }

    /// By its `doctor`: no warning means that nothing is odd.
    async fn is_current(&self) -> bool {
        let checks = self.ward.check().await;
        let runsc = checks.iter().find(|check| check.name == "runsc");
        runsc.expect("it is looked at").fix.is_none()
    }
}

/// `sudo` and a clean listing are there exactly where `doctor` names no fault.
async fn sudo_and_links_are_as_doctor_tells(bench: GvisorBench) {
    let started = Started::on(bench).await;
    started
        .sh(
            "useradd --create-home tester; echo 'tester ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/t; \
             ln -s nowhere /home/tester/link",
        )
        .await;
    let ward = started.ward.as_ref();
    let became = run_as(ward, &started.live.id, "tester", "sudo -n id -u").await;
    let listed = run_as(ward, &started.live.id, "tester", "ls -la /home/tester").await;
    if started.is_current().await {
        assert_eq!(became.stdout, "0\n", "{became:?}");
        assert_eq!(listed.stderr, "", "{listed:?}");
    } else {
        assert!(!became.success(), "then doctor need not warn: {became:?}");
    }
    ward.destroy(&started.live.id).await.expect("it ends");
}

/// A file on the disk that is deleted while it is open comes back with the memory, or the save is
/// refused and names it; it is never lost in silence.
async fn a_deleted_open_file_comes_back_or_is_named(bench: GvisorBench) {
    const ASK: &str = "touch /run/ask; until [ -e /run/told ]; do sleep 0.1; done; cat /run/told";
    let mut started = Started::on(bench).await;
    started
        .sh(
            "nohup sh -c 'echo kept > /root/gone; exec 3< /root/gone; rm /root/gone; \
             echo yes > /run/held; until [ -e /run/ask ]; do sleep 0.1; done; \
             cat <&3 > /run/new; mv /run/new /run/told' >/dev/null 2>&1 & \
             until [ -s /run/held ]; do sleep 0.1; done",
        )
        .await;
    let ward = Arc::clone(&started.ward);
    ward.freeze(&started.live.id).await.expect("it is frozen");
    let image = started.bench.directory();
    match ward.save(&started.live.id, &image).await {
        Ok(()) => {
            ward.destroy(&started.live.id).await.expect("it ends");
            let restored = ward.restore(spec(started.root.clone()), &image).await;
            started.live = restored.expect("it comes back");
        }
        Err(refused) => {
            assert!(
                !started.is_current().await,
                "the newest writes it: {refused:?}"
            );
            assert_eq!(refused.code, Code::NotEnforceable, "{refused:?}");
            assert!(refused.message.contains("/root/gone"), "{refused:?}");
            ward.thaw(&started.live.id).await.expect("it continues");
        }
    }
    assert_eq!(started.sh(ASK).await, "kept\n");
    ward.destroy(&started.live.id).await.expect("it ends");
}

/// Freezes that follow each other, with nothing between them that the kernel of the box would
/// notice, as an adoption or a save makes them: newer releases lost the box at the next new process.
async fn a_box_frozen_again_and_again_lives(bench: GvisorBench) {
    let mut started = Started::on(bench).await;
    for round in 0..4 {
        started
            .ward
            .freeze(&started.live.id)
            .await
            .expect("it is frozen");
        for _ in 0..2 {
            started.ward = started.bench.ward();
            started
                .ward
                .adopt(&started.live)
                .await
                .expect("it is found");
        }
        started
            .ward
            .thaw(&started.live.id)
            .await
            .expect("it continues");
        let told = started.sh("echo $(echo well)").await;
        assert_eq!(told, "well\n", "round {round}");
    }
    let ward = &started.ward;
    ward.destroy(&started.live.id).await.expect("it ends");
}

/// A sandbox that was started before `runsc` was replaced lives, and is not written by the wrong one.
#[tokio::test(flavor = "multi_thread")]
async fn runsc_is_replaced_below_a_running_sandbox() {
    let (Some(old), Some(new)) = (common::oldest(), common::bench()) else {
        return;
    };
    if old.engine().await == new.engine().await {
        return;
    }
    let Started {
        mut bench, live, ..
    } = Started::on(old).await;
    bench.use_runsc_of(&new);
    let ward = bench.ward();
    ward.adopt(&live).await.expect("it is found");
    ward.freeze(&live.id).await.expect("it is frozen");
    let refused = ward.save(&live.id, &bench.directory()).await;
    let refused = refused.expect_err("it is another release");
    assert_eq!(refused.code, Code::NotEnforceable, "{refused:?}");
    assert!(refused.message.contains("it runs on runsc"), "{refused:?}");
    ward.thaw(&live.id).await.expect("it continues");
    let output = run(ward.as_ref(), &live.id, "echo $(echo well)").await;
    assert_eq!(output.stdout, "well\n", "{output:?}");
    ward.destroy(&live.id).await.expect("it ends");
}

macro_rules! with_both {
    ($($name:ident)*) => {
        $(
            mod $name {
                #[tokio::test(flavor = "multi_thread")]
                async fn newest() {
                    if let Some(bench) = super::common::bench() {
                        super::$name(bench).await;
                    }
                }

                #[tokio::test(flavor = "multi_thread")]
                async fn oldest() {
                    if let Some(bench) = super::common::oldest() {
                        super::$name(bench).await;
                    }
                }
            }
        )*
    };
}

with_both! {
    sudo_and_links_are_as_doctor_tells
    a_deleted_open_file_comes_back_or_is_named
    a_box_frozen_again_and_again_lives
}
