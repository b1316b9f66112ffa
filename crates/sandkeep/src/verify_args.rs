//! The words of `verify`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use sandkeep_verify::{Level, Options, run};

use crate::{args::Global, cli::output::Output, config::DEFAULT_STATE};

pub const VERIFY_EXAMPLES: &str = "\
Examples:
  sudo sandkeep verify                       every attack, at every level this host has
  sudo sandkeep verify --level container     one level; may be given more than once
  sudo sandkeep verify --only 'egress-*'     some attacks; `--list` shows their names
  sudo sandkeep verify --json --junit v.xml  for programs
  sudo sandkeep verify --self-test           weakens sandboxes, and shows that it is noticed

It starts a private server in a network of its own, with a directory of its own beside --state,
and removes everything when it ends, also after Ctrl-C. Sandboxes of the operator are not touched,
and no packet leaves this machine.

Exit code: 0 everything held, 1 something is broken (with --self-test: a weakening was not
noticed), 2 it could not run, 130 it was stopped.";

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum LevelArg {
    Container,
    Gvisor,
    Microvm,
}

impl From<LevelArg> for Level {
    fn from(level: LevelArg) -> Self {
        match level {
            LevelArg::Container => Self::Container,
            LevelArg::Gvisor => Self::Gvisor,
            LevelArg::Microvm => Self::Microvm,
        }
    }
}

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Only this isolation level [default: all this host has]
    #[arg(long, value_name = "LEVEL", value_enum)]
    pub level: Vec<LevelArg>,
    /// Only attacks whose name has this in it, or fits a pattern with *
    #[arg(long, value_name = "PATTERN")]
    pub only: Vec<String>,
    /// Show the attacks and run none
    #[arg(long)]
    pub list: bool,
    /// Write a JUnit report, too
    #[arg(long, value_name = "FILE", conflicts_with = "self_test")]
    pub junit: Option<PathBuf>,
    /// Weaken throw-away sandboxes on purpose, and show that the attacks notice each weakening
    #[arg(long, conflicts_with = "list")]
    pub self_test: bool,
    /// State directory of the server; its base template is used, and the private server's
    /// directory is made beside it
    #[arg(long, env = "SANDKEEP_STATE", value_name = "DIR", default_value = DEFAULT_STATE)]
    pub state: PathBuf,
    /// Directory with the kernel of machines, for the isolation level microvm
    #[arg(long, env = "SANDKEEP_MICROVM_KERNEL", value_name = "DIR")]
    pub microvm_kernel: Option<PathBuf>,
    /// The runsc for the isolation level gvisor
    #[arg(long, env = "SANDKEEP_RUNSC", value_name = "FILE")]
    pub runsc: Option<PathBuf>,
}

impl VerifyArgs {
    pub fn run(&self, global: &Global) -> u8 {
        run(&Options {
            state: absolute(&self.state),
            levels: self.level.iter().map(|level| (*level).into()).collect(),
            only: self.only.clone(),
            list: self.list,
            json: global.json,
            junit: self.junit.clone(),
            self_test: self.self_test,
            colour: Output::new(global).colour(),
            microvm_kernel: self.microvm_kernel.as_deref().map(absolute),
            runsc: self.runsc.as_deref().map(absolute),
            version: env!("CARGO_PKG_VERSION"),
        })
    }
}

fn absolute(path: &std::path::Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
