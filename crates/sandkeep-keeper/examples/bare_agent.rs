//! The agent as a program of its own, for the keeper's tests: they start it as a plain
//! process of the host.

use std::process::ExitCode;

fn main() -> ExitCode {
    sandkeep_agent::run(std::env::args_os().skip(1))
}
