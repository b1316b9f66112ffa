//! The command line, as a type.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use sandkeep_model::TemplateName;

pub use crate::operator_args::{BackupArgs, KeyCommand, RestoreArgs, UninstallArgs};
use crate::{
    auto_rule::AutoRule,
    cli::{
        audit::{AUDIT_EXAMPLES, AuditArgs},
        credential::credential,
        identity::IdentityCommand,
        secret::{SECRET_EXAMPLES, SecretCommand},
    },
    config::Settings,
    quantity::{Size, Span},
    template_args::TemplateCommand,
    time_args::TimeCommand,
    verify_args::{VERIFY_EXAMPLES, VerifyArgs},
};

/// Where a server is that was told nothing else.
pub const DEFAULT_URL: &str = "http://127.0.0.1:3000";

const EXAMPLES: &str = "\
Examples:
  sandkeep serve --listen 127.0.0.1:3000     start the server (as root)
  sandkeep run -- python3 -c 'print(6*7)'    one command in a fresh box
  sandkeep create --timeout 1h               a box to come back to; prints its id
  sandkeep shell i4f9                        a terminal in it (the start of an id is enough)
  sandkeep cp ./src i4f9:/home/user/src      files in, and the other way round
  sandkeep doctor                            what this host can do, and what to install

The server is found at SANDKEEP_URL with the key in SANDKEEP_API_KEY.";

#[derive(Debug, Parser)]
#[command(name = "sandkeep", version, about, after_help = EXAMPLES, disable_help_subcommand = true)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Everywhere")]
pub struct Global {
    /// Address of the server
    #[arg(
        long,
        global = true,
        env = "SANDKEEP_URL",
        default_value = DEFAULT_URL
    )]
    pub url: String,
    /// Print JSON for programs instead of text for people
    #[arg(long, global = true)]
    pub json: bool,
    /// When to use colour; `auto` means on terminals, and never when NO_COLOR is set
    #[arg(long, global = true, value_enum, default_value_t = Color::Auto, value_name = "WHEN")]
    pub color: Color,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Color {
    Auto,
    Always,
    Never,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start the server
    Serve(Box<ServeArgs>),
    /// Make the storage and the base template, if they are not there yet
    Init(Box<InitArgs>),
    /// Look at this host: what works, what is missing, what to install
    Doctor(Box<DoctorArgs>),
    /// Write everything a stopped server keeps into one file
    Backup(Box<BackupArgs>),
    /// Make a server again from such a file
    Restore(Box<RestoreArgs>),
    /// The API key of the server: make a new one
    #[command(subcommand)]
    Key(KeyCommand),
    /// End a server with its sandboxes and remove all it made on this host
    Uninstall(Box<UninstallArgs>),
    /// The storage of sandboxes, templates and points
    #[command(subcommand)]
    Storage(StorageCommand),
    /// Try to break out of throw-away sandboxes on this host, and tell what held
    #[command(after_help = VERIFY_EXAMPLES)]
    Verify(VerifyArgs),
    /// What boxes are made from: build, import, list, inspect and remove
    #[command(after_help = TEMPLATE_EXAMPLES)]
    #[command(subcommand)]
    Template(TemplateCommand),
    /// Create a box, run a command in it, and destroy the box
    #[command(after_help = RUN_EXAMPLES)]
    Run(RunArgs),
    /// Create a box and print its id
    Create(CreateArgs),
    /// List boxes
    #[command(visible_alias = "list")]
    Ls(LsArgs),
    /// Everything known about a box
    Inspect {
        /// Id of the box, or the beginning of it
        #[arg(value_name = "BOX")]
        sandbox: String,
    },
    /// Print the address of a port of a sandbox; of a private port with the token that opens it
    Url {
        /// ID of the sandbox, or the beginning of it
        #[arg(value_name = "SANDBOX")]
        sandbox: String,
        /// The port a program in the sandbox listens on
        #[arg(value_parser = clap::value_parser!(u16).range(1..))]
        port: u16,
    },
    /// Run a command in a box that runs
    #[command(after_help = EXEC_EXAMPLES)]
    Exec(ExecArgs),
    /// List the commands that run in a sandbox, to attach to them
    Ps {
        /// Id of the sandbox, or the beginning of it
        #[arg(value_name = "SANDBOX")]
        sandbox: String,
    },
    /// Open a terminal in a box
    Shell(ShellArgs),
    /// Copy files and directories into a box or out of it
    #[command(after_help = CP_EXAMPLES)]
    Cp(CpArgs),
    /// What happened in a box: commands started and ended
    Logs {
        /// Id of the box, or the beginning of it
        #[arg(value_name = "BOX")]
        sandbox: String,
        /// Go on until Ctrl-C
        #[arg(short, long)]
        follow: bool,
    },
    /// What happened to boxes: created, ended, out of memory
    Events {
        /// Only of this box
        #[arg(value_name = "BOX")]
        sandbox: Option<String>,
        /// Go on until Ctrl-C
        #[arg(short, long)]
        follow: bool,
    },
    /// What a sandbox was refused, why, and what to do about it
    Denials {
        /// ID of the sandbox, or the beginning of it
        #[arg(value_name = "SANDBOX")]
        sandbox: String,
        /// Go on until Ctrl-C
        #[arg(short, long)]
        follow: bool,
    },
    /// Destroy boxes
    #[command(visible_alias = "rm")]
    Kill {
        /// Ids of the boxes, or the beginnings of them
        #[arg(value_name = "BOX", required = true)]
        sandboxes: Vec<String>,
    },
    /// Set when a box ends, counted from now
    Timeout {
        /// Id of the box, or the beginning of it
        #[arg(value_name = "BOX")]
        sandbox: String,
        /// For example 300, 15m, 2h, or never
        span: Span,
    },
    /// What boxes may reach: show, set, test, suggest
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// Values that are added to requests of boxes, which never see them
    #[command(subcommand, after_help = SECRET_EXAMPLES)]
    Secret(SecretCommand),
    /// Show the audit log: what happened and who did it; check that nobody changed it
    #[command(after_help = AUDIT_EXAMPLES)]
    Audit(AuditArgs),
    /// The keys that sign the tokens of boxes
    #[command(subcommand)]
    Identity(IdentityCommand),
    #[command(flatten)]
    Time(TimeCommand),
    /// List the templates boxes can be made from
    Templates,
    /// Print a completion script for a shell
    Completions { shell: clap_complete::Shell },
}

const TEMPLATE_EXAMPLES: &str = "\
A server that runs does the work itself; one that is stopped is not needed. With SANDKEEP_URL
or --url it is done by that server, else by the one of the state directory on this host.";

const RUN_EXAMPLES: &str = "\
Examples:
  sandkeep run -- uname -a
  sandkeep run --memory 256M --timeout 60s -- ./build.sh
  cat data.csv | sandkeep run -- python3 -c 'import sys; print(len(sys.stdin.read()))'
  sandkeep run -it -- bash

The exit code is that of the command; 128 + n when signal n ended it.";

const EXEC_EXAMPLES: &str = "\
Examples:
  sandkeep exec i4f9 -- ls -la
  sandkeep exec -u root -w /tmp -e DEBUG=1 i4f9 -- make
  sandkeep exec -it i4f9 -- top
  sandkeep exec --attach 42 i4f9           a command that runs already, e.g. after a restart

The exit code is that of the command; 127 when there is no such program, 126 when it cannot be
run, 128+N when signal N ended it, and 1 when the server refused or was not reached. When the
server is restarted the command goes on, and so does `exec`, once the server is back.";

const CP_EXAMPLES: &str = "\
Examples:
  sandkeep cp notes.txt i4f9:             into the home directory
  sandkeep cp ./src i4f9:/home/user/      a directory, with what is in it
  sandkeep cp i4f9:/var/log/app.log .     out of the box
  tar c . | sandkeep cp - i4f9:/tmp/a.tar standard input into a file
  sandkeep cp i4f9:result.json - | jq .   a file to standard output";

#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Settings file [default: <state>/sandkeep.toml, else /etc/sandkeep/sandkeep.toml]
    #[arg(long, env = "SANDKEEP_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the address, the key and a first example when ready
    #[arg(long)]
    pub greet: bool,
    #[command(flatten)]
    pub settings: Settings,
}

#[derive(Debug, Args)]
pub struct InitArgs {
    /// Settings file [default: <state>/sandkeep.toml, else /etc/sandkeep/sandkeep.toml]
    #[arg(long, env = "SANDKEEP_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub place: Place,
}

/// The settings that say where things are; commands on this host need no others.
#[derive(Debug, Args)]
pub struct Place {
    /// Directory for everything the server keeps [default: /var/lib/sandkeep]
    #[arg(long, env = "SANDKEEP_STATE", value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// A btrfs directory for disks and templates, instead of the server's own file
    #[arg(long, env = "SANDKEEP_STORAGE_DIR", value_name = "DIR")]
    pub storage_dir: Option<PathBuf>,
    /// How large that file may grow; it is kept from then on [default: 100GiB, or what fits the
    /// disk. It takes what is used and some GiB ahead]
    #[arg(long, env = "SANDKEEP_STORAGE_SIZE", value_name = "SIZE")]
    pub storage_size: Option<Size>,
    /// Go on although the disk use of boxes can not be limited on this host
    #[arg(long, env = "SANDKEEP_ALLOW_UNLIMITED_DISK")]
    pub allow_unlimited_disk: bool,
}

impl Place {
    pub fn settings(&self) -> Settings {
        Settings {
            state: self.state.clone(),
            storage_dir: self.storage_dir.clone(),
            storage_size: self.storage_size,
            allow_unlimited_disk: self.allow_unlimited_disk.then_some(true),
            ..Settings::default()
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum StorageCommand {
    /// Make a storage writable again that the kernel closed after a fault. The server must not run
    Repair(Box<RepairArgs>),
}

#[derive(Debug, Args)]
pub struct RepairArgs {
    #[command(flatten)]
    pub place: Place,
    /// End what still uses it: sandboxes that run, or are paused in memory, are lost
    #[arg(long)]
    pub end_sandboxes: bool,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    pub place: Place,
}

#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Print what a box may reach
    Show {
        /// Id of the box, or the beginning of it
        #[arg(value_name = "BOX")]
        sandbox: String,
    },
    /// Change what a running box may reach; connections that no longer fit are cut
    Set {
        /// Id of the box, or the beginning of it
        #[arg(value_name = "BOX")]
        sandbox: String,
        /// A file with the policy as JSON
        #[arg(required_unless_present = "profile")]
        file: Option<PathBuf>,
        /// air-gapped, package-registries, open, or one of your own: NAME or NAME@VERSION
        #[arg(long, value_name = "NAME", conflicts_with = "file")]
        profile: Option<String>,
    },
    /// Whether a URL would pass, and by which rule; exit code 1 when not
    Test {
        /// By the policy of this box
        #[arg(long = "box", value_name = "BOX")]
        sandbox: Option<String>,
        /// By the policy in this file, or a profile
        #[arg(
            long,
            value_name = "PROFILE|FILE",
            conflicts_with = "sandbox",
            required_unless_present = "sandbox"
        )]
        file: Option<String>,
        #[arg(long, default_value = "GET")]
        method: String,
        /// https://host/path, or host:port
        #[arg(value_name = "URL")]
        target: String,
    },
    /// List the policies that have a name
    Profiles,
    /// Give a policy a name, or make the next version of one that has it
    Save {
        /// 1 to 64 of a-z, 0-9 and -
        name: String,
        /// A file with the policy as JSON
        file: PathBuf,
    },
    /// Forget a name; boxes made with it keep what they may reach
    Forget { name: String },
    /// Propose a policy from what a box was refused; changes nothing
    Suggest {
        /// Id of the box, or the beginning of it
        #[arg(value_name = "BOX")]
        sandbox: String,
    },
}

/// What a new box is to be like.
#[derive(Debug, Clone, Args)]
pub struct BoxArgs {
    /// Template to make the box from
    #[arg(long, default_value = "base")]
    pub template: TemplateName,
    /// How strongly it is kept apart: auto, container, gvisor, microvm
    #[arg(long, default_value = "auto", value_name = "LEVEL")]
    pub isolation: String,
    /// Environment for everything in the box
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = pair)]
    pub env: Vec<(String, String)>,
    /// Labels, for `ls --metadata`
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = pair)]
    pub metadata: Vec<(String, String)>,
    /// Let everyone who reaches the server reach its ports, without a token
    #[arg(long)]
    pub public_ports: bool,
    /// Cores it may use, for example 0.5 or 2
    #[arg(long, value_name = "CORES", value_parser = cores)]
    pub cpu: Option<u32>,
    /// Memory, for example 512M; a bare number means MiB
    #[arg(long, value_name = "SIZE", value_parser = size_in_mib)]
    pub memory: Option<Size>,
    /// Processes and threads
    #[arg(long, value_name = "COUNT")]
    pub pids: Option<u32>,
    /// Disk it may fill beyond its template, for example 5GiB; a bare number means MiB
    #[arg(long, value_name = "SIZE", value_parser = size_in_mib)]
    pub disk: Option<Size>,
    /// Whose it is, in its tokens
    #[arg(long, value_name = "NAME", help_heading = "Identity")]
    pub org: Option<String>,
    /// What it is for, in its tokens
    #[arg(long, value_name = "NAME", help_heading = "Identity")]
    pub task: Option<String>,
    /// What it may do at others, in its tokens, for example repo:acme/web:read; may be repeated
    #[arg(long, value_name = "SCOPE", help_heading = "Identity")]
    pub scope: Vec<String>,
    /// What it may reach: air-gapped, package-registries, open, a profile of your own, or a file
    /// with a policy
    #[arg(long, value_name = "PROFILE|FILE")]
    pub network: Option<String>,
    /// A host it may reach, for example example.org:443 or *.example.org; may be repeated
    #[arg(long, value_name = "HOST[:PORT]")]
    pub allow: Vec<String>,
    /// A secret that is added to its requests to a host it may reach, as `Authorization:
    /// Bearer`; else =header:NAME[:FORMAT], =basic:USER, =query:NAME or =placeholder:TEXT, for
    /// example git@git.example.org=basic:robot; may be repeated
    #[arg(long, value_name = "SECRET@HOST[:PORT][=PLACE]", value_parser = credential)]
    pub credential: Vec<serde_json::Value>,
}

#[derive(Debug, Args)]
pub struct CreateArgs {
    #[command(flatten)]
    pub sandbox: BoxArgs,
    /// When it ends by itself, for example 15m, 2h, or never
    #[arg(long, default_value = "5m", value_name = "SPAN")]
    pub timeout: Span,
    /// Make it from this snapshot (its id, SANDBOX:NAME, or a name that only one sandbox has)
    /// instead of a template
    #[arg(long, value_name = "POINT")]
    pub from_point: Option<String>,
    /// Pause it at its timeout instead of ending it
    #[arg(long)]
    pub pause_at_timeout: bool,
    /// A request to it wakes it when it is paused; this is the default
    #[arg(long)]
    pub auto_resume: bool,
    /// Only `sandkeep resume` wakes it when it is paused
    #[arg(long, conflicts_with_all = ["auto_resume", "idle"])]
    pub no_auto_resume: bool,
    /// Pause it when nothing was asked of it for so long
    #[arg(long, value_name = "SPAN")]
    pub idle: Option<Span>,
    /// End it when it was paused for so long
    #[arg(long, value_name = "SPAN")]
    pub paused_limit: Option<Span>,
    /// When points are made of it by themselves, for example before=risky,every=10m,keep=50;
    /// `sandkeep auto-points --help` tells all words; may be repeated
    #[arg(long, value_name = "RULE")]
    pub auto_points: Vec<AutoRule>,
}

#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub sandbox: BoxArgs,
    /// When the box ends whatever the command does
    #[arg(long, default_value = "1h", value_name = "SPAN")]
    pub timeout: Span,
    #[command(flatten)]
    pub streams: StreamArgs,
    /// The program and its arguments, after --
    #[arg(required = true, last = true, value_name = "CMD")]
    pub command: Vec<String>,
}

#[derive(Debug, Clone, Copy, Args)]
pub struct StreamArgs {
    /// Pass on standard input even when it is a terminal (pipes and files always are)
    #[arg(short, long)]
    pub interactive: bool,
    /// Give the command a terminal
    #[arg(short, long)]
    pub tty: bool,
    /// Pass on no standard input at all
    #[arg(long, conflicts_with_all = ["interactive", "tty"])]
    pub no_stdin: bool,
}

#[derive(Debug, Args)]
pub struct ExecArgs {
    #[command(flatten)]
    pub streams: StreamArgs,
    /// Run as this user of the box
    #[arg(short, long)]
    pub user: Option<String>,
    /// Run in this directory
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Environment for the command
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = pair)]
    pub env: Vec<(String, String)>,
    /// End the command after this time
    #[arg(long, value_name = "SPAN")]
    pub timeout: Option<Span>,
    /// Listen to a command that runs already; `sandkeep ps` lists them
    #[arg(long, value_name = "PID", conflicts_with_all = ["command", "user", "workdir", "env", "timeout"])]
    pub attach: Option<u32>,
    /// Id of the sandbox, or the beginning of it
    #[arg(value_name = "SANDBOX")]
    pub sandbox: String,
    /// The program and its arguments, after --
    #[arg(required_unless_present = "attach", last = true, value_name = "CMD")]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
pub struct ShellArgs {
    /// As this user of the box
    #[arg(short, long)]
    pub user: Option<String>,
    /// In this directory
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Id of the box, or the beginning of it
    #[arg(value_name = "BOX")]
    pub sandbox: String,
}

#[derive(Debug, Args)]
pub struct CpArgs {
    /// As this user of the box
    #[arg(short, long)]
    pub user: Option<String>,
    /// A path here, BOX:PATH, or - for standard input
    pub source: String,
    /// A path here, BOX:PATH, or - for standard output
    pub target: String,
}

#[derive(Debug, Args)]
pub struct LsArgs {
    /// Also boxes that are gone, while their history is kept
    #[arg(short, long)]
    pub all: bool,
    /// Only boxes with this label
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = pair)]
    pub metadata: Vec<(String, String)>,
    /// Only ids, one per line
    #[arg(short, long)]
    pub quiet: bool,
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("\"{text}\" is not of the form NAME=VALUE")),
    }
}

/// Nobody means bytes when they limit a box.
fn size_in_mib(text: &str) -> Result<Size, String> {
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        return format!("{text}M").parse();
    }
    text.parse()
}

/// `0.5` -> 500 thousandths.
fn cores(text: &str) -> Result<u32, String> {
    let bad = || format!("\"{text}\" is no number of cores; write for example 0.5 or 2");
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    if part.len() > 3 || !part.bytes().all(|b| b.is_ascii_digit()) {
        return Err(bad());
    }
    let whole: u32 = whole.parse().map_err(|_| bad())?;
    let millis: u32 = format!("{part:0<3}").parse().map_err(|_| bad())?;
    match whole.checked_mul(1000).and_then(|w| w.checked_add(millis)) {
        Some(cores) if cores > 0 => Ok(cores),
        _ => Err(bad()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn everything_after_the_dashes_is_the_command() {
        let cli = Cli::try_parse_from([
            "sandkeep", "run", "--memory", "256M", "--cpu", "0.25", "-e", "A=b=c", "--", "ls",
            "--json", "-la",
        ])
        .unwrap();
        let Command::Run(args) = cli.command else {
            panic!("not run")
        };
        assert!(!cli.global.json, "a flag of the command is not ours");
        assert_eq!(args.command, ["ls", "--json", "-la"]);
        assert_eq!(args.sandbox.memory, Some(Size(256 << 20)));
        assert_eq!(args.sandbox.cpu, Some(250));
        assert_eq!(size_in_mib("256"), Ok(Size(256 << 20)));
        assert_eq!(args.sandbox.env, [("A".to_owned(), "b=c".to_owned())]);
    }

    #[test]
    fn it_is_short_to_write_for_a_terminal() {
        let cli =
            Cli::try_parse_from(["sandkeep", "exec", "-itu", "root", "i4f9", "--", "top"]).unwrap();
        let Command::Exec(args) = cli.command else {
            panic!("not exec")
        };
        assert!(args.streams.interactive && args.streams.tty);
        assert_eq!(args.user.as_deref(), Some("root"));
    }

    #[test]
    fn json_may_stand_before_or_after_the_command() {
        for words in [["sandkeep", "--json", "ls"], ["sandkeep", "ls", "--json"]] {
            assert!(Cli::try_parse_from(words).unwrap().global.json);
        }
    }

    #[test]
    fn the_url_to_test_is_not_that_of_the_server() {
        let words = [
            "sandkeep",
            "policy",
            "test",
            "--file",
            "open",
            "https://a.test/",
        ];
        let cli = Cli::try_parse_from(words).unwrap();
        assert!(!cli.global.url.contains("a.test"));
        let Command::Policy(PolicyCommand::Test { target, .. }) = cli.command else {
            panic!("not policy test")
        };
        assert_eq!(target, "https://a.test/");
    }

    #[test]
    fn wrong_words_are_refused() {
        for words in [
            &["sandkeep", "run"][..],
            &["sandkeep", "run", "--"],
            &["sandkeep", "kill"],
            &["sandkeep", "create", "--env", "novalue"],
            &["sandkeep", "create", "--cpu", "0"],
            &["sandkeep", "create", "--cpu", "1.2345"],
            &["sandkeep", "timeout", "i4f9", "soon"],
            &["sandkeep", "frobnicate"],
        ] {
            assert!(Cli::try_parse_from(words).is_err(), "{words:?}");
        }
    }
}
