//! The command line of whoever runs the server.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::args::Place;

#[derive(Debug, Args)]
pub struct UninstallArgs {
    /// Do not ask
    #[arg(short, long)]
    pub yes: bool,
    /// Only list what would be ended and removed
    #[arg(long)]
    pub dry_run: bool,
    /// Leave what script/server built for the host in /usr/local/lib/sandkeep
    #[arg(long)]
    pub keep_programs: bool,
    #[command(flatten)]
    pub place: Place,
}

#[derive(Debug, Args)]
pub struct BackupArgs {
    /// Where to
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    #[command(flatten)]
    pub place: Place,
}

#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// A file that `sandkeep backup` wrote
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    #[command(flatten)]
    pub place: Place,
}

#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Make a new API key; the old one counts until the server is restarted
    Rotate {
        #[command(flatten)]
        place: Box<Place>,
    },
}
