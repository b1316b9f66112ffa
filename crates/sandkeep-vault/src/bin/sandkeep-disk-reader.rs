//! The reader of disks as a program of its own, for tests; `sandkeep` is one itself.

use std::process::ExitCode;

fn main() -> ExitCode {
    sandkeep_vault::disk_reader_main()
}
