//! Attacks from inside a box, each as a plain program would try it, as root of the box
//! unless said otherwise.

#[path = "../common/mod.rs"]
mod common;

mod exhaustion;
mod files;
mod kernel;
mod network;
mod processes;

use sandkeep_ward::conformance::{Bench as _, MemoryBench as _, Output, Stage};

/// A box to attack. The bench is behind the stage, so that the ward goes first.
struct Target {
    stage: Stage,
    bench: common::ContainerBench,
}

impl Target {
    /// `None` when these tests are left out.
    async fn new() -> Option<Self> {
        let bench = common::bench()?;
        Some(Self {
            stage: Stage::new(&bench).await,
            bench,
        })
    }

    /// A box that was written to disk and came back.
    async fn restored() -> Option<Self> {
        let Self { stage, bench } = Self::new().await?;
        let Stage { ward, live } = stage;
        ward.freeze(&live.id).await.expect("it is frozen");
        let image = bench.directory();
        ward.save(&live.id, &image).await.expect("it is written");
        ward.destroy(&live.id).await.expect("it is destroyed");
        let spec = common::spec_on(bench.last_root());
        let live = ward.restore(spec, &image).await.expect("it comes back");
        let stage = Stage { ward, live };
        Some(Self { stage, bench })
    }

    async fn run(&self, command: &str) -> Output {
        self.stage.run(command).await
    }

    /// Asserts that a command fails.
    async fn fails(&self, command: &str) {
        let output = self.run(command).await;
        assert!(!output.success(), "{command} worked: {output:?}");
    }

    /// Asserts that a command works, and gives what it wrote.
    async fn works(&self, command: &str) -> String {
        let output = self.run(command).await;
        assert!(output.success(), "{command} failed: {output:?}");
        output.stdout
    }

    /// Runs Python with `call(number, arguments...)`, which gives "ok" or the errno's name.
    async fn python(&self, code: &str) -> String {
        self.works(&format!("python3 - <<'PYTHON'\n{PRELUDE}\n{code}\nPYTHON"))
            .await
    }

    /// What system calls answer, in order.
    async fn calls(&self, calls: &[(&str, i64, &str)]) -> Vec<(String, String)> {
        let code: String = calls
            .iter()
            .map(|(_, number, arguments)| format!("print(call({number}, {arguments}))\n"))
            .collect();
        let names = calls.iter().map(|(name, _, _)| (*name).to_owned());
        let answers = self.python(&code).await;
        names.zip(answers.lines().map(str::to_owned)).collect()
    }

    /// Asserts that every one of them answers `answer`.
    async fn all_answer(&self, calls: &[(&str, i64, &str)], answer: &str) {
        let got = self.calls(calls).await;
        assert_eq!(got.len(), calls.len(), "{got:?}");
        for (name, got) in got {
            assert_eq!(got, answer, "{name}");
        }
    }

    /// PID 1 as the host numbers it.
    fn host_pid(&self) -> i64 {
        self.stage.live.record["pid"].as_i64().expect("a pid")
    }

    async fn end(self) {
        let traces = {
            let live = self.stage.live.clone();
            self.stage.end().await;
            self.bench.traces(&live)
        };
        assert_eq!(traces, Vec::<String>::new());
    }
}

const PRELUDE: &str = "
import ctypes, errno, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(4096)
def call(number, *arguments):
    ctypes.set_errno(0)
    plain = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if libc.syscall(ctypes.c_long(number), *plain) >= 0:
        return 'ok'
    return errno.errorcode[ctypes.get_errno()]
";

/// Makes two tests, one with a fresh box in it and one with a box that was on disk; the box
/// must end without a trace.
macro_rules! attack {
    ($name:ident, $target:ident, $body:block) => {
        mod $name {
            #[allow(unused_imports, reason = "not every attack needs what its file imports")]
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn in_a_fresh_box() {
                let Some($target) = crate::Target::new().await else {
                    return;
                };
                $body
                $target.end().await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn after_a_restore() {
                let Some($target) = crate::Target::restored().await else {
                    return;
                };
                $body
                $target.end().await;
            }
        }
    };
}
use attack;
