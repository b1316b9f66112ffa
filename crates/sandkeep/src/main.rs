//! Sandkeep: the server and its command line.

mod args;
mod auto_rule;
mod backup;
mod budget;
mod cli;
mod config;
mod desk;
mod doctor;
mod follow;
mod greet;
mod init;
mod listed;
mod logging;
mod meters;
mod network;
mod notify;
mod operator_args;
mod quantity;
mod reset;
mod running;
mod serve;
mod state;
mod storage;
mod strangers;
mod template_args;
mod time_args;
mod tls;
mod uninstall;
mod verify_args;
mod worded;

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use cli::audit::{AuditArgs, AuditCommand};

/// The name under which the server starts itself as the helper that makes boxes.
pub const LAUNCHER: &str = "internal-launcher";

/// The name under which it starts itself to read disks that boxes wrote.
pub const DISK_READER: &str = "internal-disk-reader";

fn main() -> ExitCode {
    // First of all: the launcher forks and must never have had a second thread.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == LAUNCHER)
    {
        sandkeep_ward_container::launcher_main()
    }
    if std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == DISK_READER)
    {
        return sandkeep_vault::disk_reader_main();
    }
    let cli = Cli::try_parse().unwrap_or_else(|error| wrong_usage(&error));
    if let Command::Completions { shell } = cli.command {
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "sandkeep", &mut text);
        return match io::stdout().write_all(&text) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
            _ => ExitCode::SUCCESS,
        };
    }
    if matches!(cli.command, Command::Serve(_))
        && let Err(error) = sandkeep_host::proc::close_all_on_exec()
    {
        cli::complain(&error.into(), cli.global.json);
        return ExitCode::FAILURE;
    }
    if let Command::Verify(args) = &cli.command {
        // Before there is a second thread: it makes namespaces for itself.
        return ExitCode::from(args.run(&cli.global));
    }
    let json = cli.global.json;
    let ended = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => {
            let ended = runtime.block_on(dispatch(cli));
            // A thread may still read a terminal; nobody waits for it.
            runtime.shutdown_background();
            ended
        }
        Err(error) => Err(error.into()),
    };
    match ended {
        Ok(code) => ExitCode::from(code),
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            cli::complain(&error, json);
            ExitCode::FAILURE
        }
    }
}

/// As clap says it; with what it cannot know: the command for a sandbox stands after `--`.
fn wrong_usage(error: &clap::Error) -> ! {
    let mut words = std::env::args()
        .skip(1)
        .filter(|word| !word.starts_with('-'));
    let runs = words
        .next()
        .filter(|word| matches!(word.as_str(), "exec" | "run"));
    if let (Some(command), clap::error::ErrorKind::UnknownArgument) = (runs, error.kind()) {
        let sandbox = match command.as_str() {
            "exec" => " SANDBOX",
            _ => "",
        };
        // The message of clap comes after it, and the code is its, too.
        let _ = writeln!(
            io::stderr().lock(),
            "hint: put the command after `--`: sandkeep {command}{sandbox} -- COMMAND"
        );
    }
    error.exit()
}

async fn dispatch(cli: Cli) -> anyhow::Result<u8> {
    let output = cli::output::Output::new(&cli.global);
    match cli.command {
        Command::Serve(args) => Box::pin(serve::serve(*args)).await,
        Command::Init(args) => init::init(output, &args).await,
        Command::Doctor(args) => doctor::doctor(output, &args).await,
        Command::Uninstall(args) => uninstall::uninstall(output, &args),
        Command::Backup(args) => backup::backup(output, &args).await,
        Command::Restore(args) => backup::restore(output, &args),
        Command::Key(command) => state::key(output, &command),
        Command::Storage(command) => storage::storage(output, command).await,
        Command::Template(command) => cli::template::template(&cli.global, command).await,
        Command::Audit(AuditArgs {
            command: Some(AuditCommand::Verify { path: Some(path) }),
            ..
        }) => cli::audit::verify_here(output, &path),
        command => Box::pin(cli::run(&cli.global, command)).await,
    }
}

/// The reader of our output went away (`sandkeep ls | head`): nothing is wrong.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
