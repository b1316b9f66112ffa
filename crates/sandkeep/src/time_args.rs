//! The command line about time.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::{
    auto_rule::{AUTO_POINTS_HELP, AutoRule},
    quantity::Span,
};

const RACE_EXAMPLES: &str = "\
Examples:
  sandkeep race i4f9 -n 3 -- ./try.sh      three copies run it; the first to succeed stays
  sandkeep race --keep i4f9 -n 5 -- make   all copies stay, to be looked at

The first copy whose command ends with 0 wins: the box becomes what that copy is, with its
processes where the level can. Each copy has its number, from 1, in SANDKEEP_WAY. The exit
code is 0 when there was a winner.";

const EXPORT_EXAMPLES: &str = "\
Examples:
  sandkeep points export before before.point.tar.zst
  sandkeep points export before | ssh other sandkeep points import -
  sandkeep create --from-point before      on the other machine";

const KEY_EXAMPLES: &str = "\
At the isolation level container the memory of a point is only taken from servers that are trusted.
On the server that is to take it:
  sandkeep serve --trusted-servers \"$(ssh other sandkeep points key)\"
or `trusted_servers` in its sandkeep.toml. Who runs the other server can then become root on this one.";

#[derive(Debug, Subcommand)]
pub enum TimeCommand {
    /// Put a box to rest, with its processes where this level can
    Pause {
        /// Id of the box, or the beginning of it
        #[arg(value_name = "BOX")]
        sandbox: String,
        /// Keep the files only; processes end
        #[arg(long)]
        files_only: bool,
    },
    /// Wake a paused box
    Resume {
        /// Id of the box, or the beginning of it
        #[arg(value_name = "BOX")]
        sandbox: String,
        /// When it ends by itself [default: the time it was given last]
        #[arg(long, value_name = "SPAN")]
        timeout: Option<Span>,
        /// Start cold from its files
        #[arg(long)]
        cold: bool,
    },
    /// Keep what a box is now; prints the id of the point
    Snapshot {
        /// Id of the box, or the beginning of it
        #[arg(value_name = "BOX")]
        sandbox: String,
        /// A name for it
        #[arg(long)]
        name: Option<String>,
        /// A tag; may be repeated
        #[arg(long)]
        tag: Vec<String>,
        /// Files only, even where memory could be kept
        #[arg(long)]
        files_only: bool,
        /// Refuse when memory can not be kept, in place of a warning
        #[arg(long, conflicts_with = "files_only")]
        memory: bool,
    },
    /// Make copies of a box; prints their ids
    Fork {
        /// Id of the box, or the beginning of it
        #[arg(value_name = "BOX")]
        sandbox: String,
        /// How many
        #[arg(short = 'n', long, default_value_t = 1)]
        count: u32,
        /// As it was at this snapshot: its id, its name, or SANDBOX:NAME
        #[arg(long, value_name = "SNAPSHOT")]
        at: Option<String>,
        /// Refuse when they can not go on with memory, in place of a warning
        #[arg(long)]
        memory: bool,
    },
    /// Make a box what it was at a point; what it is now is given up
    Rollback {
        /// Id of the box, or the beginning of it
        #[arg(value_name = "BOX")]
        sandbox: String,
        /// The snapshot: its id, its name, or SANDBOX:NAME
        #[arg(value_name = "SNAPSHOT")]
        to: String,
        /// Take a snapshot of another sandbox, too: this one then becomes what that one was
        #[arg(long)]
        foreign: bool,
    },
    /// Draw the points of a box as a tree
    Timeline {
        /// Id of the box, or the beginning of it
        #[arg(value_name = "BOX")]
        sandbox: String,
    },
    /// Show or change when points are made of a box by themselves
    #[command(after_help = AUTO_POINTS_HELP)]
    AutoPoints {
        /// Id of the box, or the beginning of it
        #[arg(value_name = "BOX")]
        sandbox: String,
        /// The new rule as a whole, for example before=risky,every=10m,keep=50
        #[arg(value_name = "RULE")]
        rules: Vec<AutoRule>,
    },
    /// Points: list, name, tag, export, import and delete; the key of this server
    #[command(subcommand)]
    Points(PointsCommand),
    /// Files that changed from one point to another
    Diff {
        /// The snapshot before: its id, SANDBOX:NAME, or a name that only one sandbox has
        before: String,
        /// The snapshot after; a name is first looked up in the sandbox of the one before
        after: String,
        /// Show what changed in text files
        #[arg(long)]
        text: bool,
    },
    /// Try a command in copies of a box, and keep the one that wins
    #[command(after_help = RACE_EXAMPLES)]
    Race(RaceArgs),
}

#[derive(Debug, Subcommand)]
pub enum PointsCommand {
    /// List all points
    Ls,
    /// Write a point into one file, to be imported on another machine
    #[command(after_help = EXPORT_EXAMPLES)]
    Export {
        /// The snapshot: its id, SANDBOX:NAME, or a name that only one sandbox has
        point: String,
        /// Where to; standard output when left out or -
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Make a point from an exported file
    Import {
        /// The file; - for standard input
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Leave out its memory, e.g. where another engine runs
        #[arg(long)]
        files_only: bool,
    },
    /// Print the public key by which other servers know the points exported by this one
    #[command(after_help = KEY_EXAMPLES)]
    Key,
    /// Give a point a name; one with a name is never removed by a rule
    Name {
        /// The snapshot: its id, or a name or SANDBOX:NAME that no other has
        point: String,
        /// The name; none takes it away
        name: Option<String>,
    },
    /// Give a point tags, in place of those it has; `keep` keeps it
    Tag {
        /// The snapshot: its id, or a name or SANDBOX:NAME that no other has
        point: String,
        /// The tags; none takes them away
        tags: Vec<String>,
    },
    /// Delete points; what was made from them stays
    Rm {
        /// The snapshots: their ids, or names or SANDBOX:NAME that no other has
        #[arg(value_name = "POINT", required = true)]
        points: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub struct RaceArgs {
    /// Id of the box, or the beginning of it
    #[arg(value_name = "BOX")]
    pub sandbox: String,
    /// How many copies
    #[arg(short = 'n', long, default_value_t = 3)]
    pub count: u32,
    /// Keep all copies and leave the box as it is
    #[arg(long)]
    pub keep: bool,
    /// The program and its arguments, after --
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}
