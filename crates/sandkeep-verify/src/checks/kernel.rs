//! The kernel as a sandbox sees it.

use serde_json::json;

use super::{by_what_worked, escape::simple};
use crate::{
    bench::Bench,
    check::{CONTAINER, Check, Class, Level, Verdict},
    fault::Result,
    weakness::Weakness,
};

const NOT_MICROVM: &[Level] = &[Level::Container, Level::Gvisor];
const SURFACE: &str = "Parts of the host's kernel are in reach that sandboxes do not need, and in \
                       which holes were found often.";
const ADVICE: &str = "Keep the host's kernel current, run untrusted code at the microvm or gvisor \
                    level, and report it.";

pub const CHECKS: &[Check] = &[
    Check {
        id: "kernel-confined",
        class: Class::Kernel,
        attack: "run with more rights than a sandbox has",
        source: "docs/threats.md: kernel surface",
        levels: CONTAINER,
        means: "The filter, the capabilities or the ids that keep programs in are missing.",
        todo: ADVICE,
        weakened_by: &[Weakness::SeccompOff],
        run: |bench, level| simple(bench, level, include_str!("../probes/confined.py")),
    },
    Check {
        id: "kernel-calls",
        class: Class::Kernel,
        attack: "io_uring, keyrings and other calls",
        source: "docs/threats.md: io_uring, keyrings, other calls",
        levels: CONTAINER,
        means: SURFACE,
        todo: ADVICE,
        weakened_by: &[Weakness::SeccompOff],
        run: |bench, level| simple(bench, level, include_str!("../probes/io_uring.py")),
    },
    Check {
        id: "kernel-namespaces",
        class: Class::Kernel,
        attack: "make or enter namespaces",
        source: "docs/threats.md: user namespaces",
        levels: CONTAINER,
        means: SURFACE,
        todo: ADVICE,
        weakened_by: &[Weakness::SeccompOff, Weakness::AllCapabilities],
        run: |bench, level| simple(bench, level, include_str!("../probes/namespaces.py")),
    },
    Check {
        id: "kernel-other-doors",
        class: Class::Kernel,
        attack: "calls by the 32-bit and x32 doors",
        source: "docs/threats.md: the 32-bit and x32 doors",
        levels: CONTAINER,
        means: "Every call is possible that the filter forbids.",
        todo: ADVICE,
        weakened_by: &[Weakness::SeccompOff],
        run: |bench, level| simple(bench, level, include_str!("../probes/other_doors.py")),
    },
    Check {
        id: "kernel-proc",
        class: Class::Kernel,
        attack: "read the kernel's memory and logs",
        source: "docs/threats.md: /proc, /sys",
        levels: CONTAINER,
        means: "The sandbox reads what the host's kernel tells only its root.",
        todo: ADVICE,
        weakened_by: &[Weakness::HostRoot],
        run: |bench, level| simple(bench, level, include_str!("../probes/masked.py")),
    },
    Check {
        id: "kernel-agent",
        class: Class::Kernel,
        attack: "trace the first process as a user",
        source: "SandboxEscapeBench 4",
        levels: NOT_MICROVM,
        means: "A user of the sandbox becomes its root.",
        todo: ADVICE,
        weakened_by: &[Weakness::SameSandbox],
        run: agent,
    },
    Check {
        id: "kernel-terminal",
        class: Class::Kernel,
        attack: "push keys into a terminal",
        source: "docs/threats.md: TIOCSTI",
        levels: CONTAINER,
        means: "A program types into the terminal of the operator who watches it.",
        todo: ADVICE,
        // Newer kernels have a second wall, which falls only for root of the host.
        weakened_by: &[Weakness::HostRoot],
        run: |bench, level| simple(bench, level, include_str!("../probes/tiocsti.py")),
    },
];

fn agent(bench: &Bench, level: Level) -> Result<Verdict> {
    let sandbox = bench.shared(level)?;
    let script = include_str!("../probes/agent_trace.py");
    let report = bench.probe(
        &sandbox,
        script,
        &json!({"own_kernel": level.own_kernel(), "own": bench.weak(Weakness::SameSandbox)}),
        "user",
    )?;
    Ok(by_what_worked(&report))
}
