//! Attacks from inside a box, each as a plain program would try it, as root of the box
//! unless said otherwise.

#[path = "../common/mod.rs"]
mod common;

mod exhaustion;
mod files;
mod kernel;
mod network;
mod processes;

use sandkeep_ward::conformance::{Bench as _, Output, Stage};

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

/// Makes a test with a box in it; the box must end without a trace.
macro_rules! attack {
    ($name:ident, $target:ident, $body:block) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            let Some($target) = crate::Target::new().await else {
                return;
            };
            $body
            $target.end().await;
        }
    };
}
use attack;
