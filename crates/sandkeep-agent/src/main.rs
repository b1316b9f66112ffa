//! The agent in a box. See the library for everything.

use std::process::ExitCode;

fn main() -> ExitCode {
    sandkeep_agent::run(std::env::args_os().skip(1))
}
