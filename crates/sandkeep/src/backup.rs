//! `backup` and `restore`: everything a server keeps, as one file.

use std::{
    fs,
    io::{self, Read as _},
    os::unix::fs::DirBuilderExt as _,
    path::Path,
    process::{self, Command, Stdio},
};

use sandkeep_model::{Code, Error, PauseMode, Result, State, human_bytes};
use sandkeep_store::Store;
use sandkeep_vault::Vault;
use serde_json::json;

use crate::{
    args::{BackupArgs, RestoreArgs},
    cli::output::{Output, clean},
    config::{Config, LogFormat},
    logging,
    state::{LEDGER, LOCK_FILE, StateDir, is_state, require_root},
    uninstall::{end_processes_of, processes_of},
};

/// What only a server that runs needs, and what a restored one must not find.
const LEFT_OUT: &[&str] = &["./server.lock", "./agent", "./*.sock"];
/// Pausing one that is paused changes nothing.
const PAUSE: &str = "pause all sandboxes (`sandkeep ls -q | xargs -r -n1 sandkeep pause`)";
const SUFFIX: &str = "part";
/// What zstd files begin with.
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// The server is stopped and no sandbox of a user runs, so that what is written is of one moment.
pub async fn backup(output: Output, args: &BackupArgs) -> anyhow::Result<u8> {
    let config = Config::load(args.place.settings(), None)?;
    logging::start(Some("warn"), LogFormat::Text)?;
    require_root("backup")?;
    no_own_storage(&config)?;
    if !is_state(&config.state) {
        return Err(Error::not_found(format!(
            "{} is not the state directory of a Sandkeep server",
            config.state.display()
        ))
        .hint("name it: sandkeep backup --state DIR FILE")
        .into());
    }
    let state = StateDir::take(&config.state).map_err(|error| match error.code {
        Code::Conflict => error.hint(format!("{PAUSE}, stop the server, and try again")),
        _ => error,
    })?;
    let ledger = end_the_pool(&config.state).await?;
    // Unmounted, its file holds all of it.
    let vault = Vault::open(config.vault()).await?;
    vault.close().await?;
    drop(vault);
    check_pool_file(&config.state)?;
    let bytes = pack(&config.state, &args.file)?;
    // Closing it may write, which must not happen while it is packed.
    drop((ledger, state));
    if output.json {
        output.json(&json!({ "file": args.file, "bytes": bytes }))?;
    } else {
        output.line(&clean(&format!(
            "{} ({}); it holds the keys of the server and all secrets: keep it like them",
            args.file.display(),
            human_bytes(bytes)
        )))?;
    }
    Ok(0)
}

/// A server that stops leaves the sandboxes of its pool running. They were never given to anyone:
/// they end here, and the next start makes others. Sandboxes of users are never ended.
async fn end_the_pool(state: &Path) -> Result<Option<Store>> {
    if processes_of(state).is_empty() {
        return Ok(None);
    }
    let ledger = Store::open(state.join(LEDGER)).await?;
    let mut running = Vec::new();
    let mut frozen = Vec::new();
    for record in ledger.live().await? {
        let (sandbox, pooled) = (record.sandbox, record.pooled);
        let in_memory = sandbox.time.pause.as_ref().map(|pause| pause.mode) == Some(PauseMode::Ram);
        match sandbox.state {
            _ if pooled => {}
            State::Creating | State::Running | State::Pausing | State::Resuming => {
                running.push(sandbox.id.to_string());
            }
            State::Paused if in_memory => frozen.push(sandbox.id.to_string()),
            State::Paused | State::Stopping | State::Gone => {}
        }
    }
    if !running.is_empty() {
        return Err(Error::conflict(format!(
            "{} still running, and what they do cannot be in the file: {}",
            counted(running.len(), "sandbox is", "sandboxes are"),
            running.join(", ")
        ))
        .hint(format!(
            "start the server, {PAUSE}, stop the server, and try again"
        )));
    }
    if let Some(first) = frozen.first() {
        return Err(Error::conflict(format!(
            "{} paused in memory, which cannot be in the file: {}",
            counted(frozen.len(), "sandbox is", "sandboxes are"),
            frozen.join(", ")
        ))
        .hint(format!(
            "start the server, keep the files of each (`sandkeep resume {first} && sandkeep pause --files-only {first}`), \
             stop the server, and try again"
        )));
    }
    end_processes_of(state)?;
    Ok(Some(ledger))
}

fn counted(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

pub fn restore(output: Output, args: &RestoreArgs) -> anyhow::Result<u8> {
    let config = Config::load(args.place.settings(), None)?;
    require_root("restore")?;
    no_own_storage(&config)?;
    let state = &config.state;
    if fs::read_dir(state).is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(Error::conflict(format!(
            "{} is not empty, so nothing was restored",
            state.display()
        ))
        .hint(
            "name an empty directory with --state, or remove the server there: sandkeep uninstall",
        )
        .into());
    }
    let mut start = [0_u8; 4];
    fs::File::open(&args.file)
        .and_then(|mut file| file.read_exact(&mut start))
        .map_err(|error| Error::from(error).context(format!("reading {}", args.file.display())))?;
    if start != ZSTD {
        return Err(Error::invalid(
            "file",
            format!("{} is not a backup of a server", args.file.display()),
        )
        .hint("give a file that `sandkeep backup` wrote")
        .into());
    }
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(state)
        .map_err(|error| Error::from(error).context(format!("making {}", state.display())))?;
    let unpacked = unpack(state, &args.file).and_then(|()| {
        if state.join("api-key").exists() || state.join("pool.img").exists() {
            return Ok(());
        }
        Err(Error::invalid("file", "the file holds no server")
            .hint("give a file that `sandkeep backup` wrote"))
    });
    if let Err(error) = unpacked {
        // It was empty: nothing of anybody else is in it.
        let _ = fs::remove_dir_all(state);
        return Err(error.into());
    }
    // By it other commands know a state directory; what it locks is not in the file.
    private(&state.join(LOCK_FILE)).map_err(|error| {
        Error::from(error).context(format!("writing {}/{LOCK_FILE}", state.display()))
    })?;
    if output.json {
        output.json(&json!({ "state": state }))?;
    } else {
        output.line(&clean(&format!(
            "restored; start it with: sandkeep serve --state {}",
            state.display()
        )))?;
    }
    Ok(0)
}

fn no_own_storage(config: &Config) -> Result<()> {
    match &config.storage_dir {
        None => Ok(()),
        Some(dir) => Err(Error::new(
            Code::NotEnforceable,
            format!(
                "the storage is {}, a directory of this host, which is not put into a file",
                dir.display()
            ),
        )
        .hint("stop the server and copy that directory with `btrfs send`, and the state directory with tar")),
    }
}

/// Under another name until it is whole.
fn pack(state: &Path, file: &Path) -> Result<u64> {
    let mut part = file.as_os_str().to_owned();
    part.push(format!(".{}.{SUFFIX}", process::id()));
    let part = Path::new(&part);
    let named =
        |error: io::Error| Error::from(error).context(format!("writing {}", part.display()));
    let packed = (|| {
        let out = private(part).map_err(named)?;
        let mut tar = Command::new("tar");
        tar.args([
            "--create",
            "--sparse",
            "--numeric-owner",
            "--one-file-system",
            "--xattrs",
            "--xattrs-include=*",
        ]);
        for pattern in LEFT_OUT {
            tar.arg(format!("--exclude={pattern}"));
        }
        let mut child = tar
            .arg("--directory")
            .arg(state)
            .arg(".")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| no_tar(&error))?;
        let copied = child.stdout.take().map_or(Ok(()), |mut from| {
            let mut encoder = zstd::Encoder::new(&out, 3)?;
            io::copy(&mut from, &mut encoder)?;
            encoder.finish().map(drop)
        });
        let ended = child.wait().map_err(named)?;
        copied.map_err(named)?;
        if !ended.success() {
            return Err(Error::internal(format!("tar ended with {ended}")));
        }
        out.sync_all().map_err(named)?;
        fs::rename(part, file).map_err(named)?;
        Ok(out.metadata().map_err(named)?.len())
    })();
    if packed.is_err() {
        let _ = fs::remove_file(part);
    }
    packed
}

/// A new file: one that was there could be another user's, or a link of theirs.
fn private(path: &Path) -> io::Result<fs::File> {
    use std::os::unix::fs::OpenOptionsExt as _;
    fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// Whether the file of the storage is in the state directory, and nothing writes to it any more.
fn check_pool_file(state: &Path) -> Result<()> {
    use std::os::unix::fs::MetadataExt as _;
    let image = state.join("pool.img");
    let found = fs::symlink_metadata(&image)
        .map_err(|error| Error::from(error).context(format!("looking at {}", image.display())))?;
    if !found.is_file() {
        return Err(Error::conflict(format!(
            "{} is not a file, so a backup would not hold the disks",
            image.display()
        ))
        .hint("move the file it leads to into the state directory"));
    }
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let used = devices
        .filter_map(|device| fs::read_to_string(device.path().join("loop/backing_file")).ok())
        .filter_map(|backing| fs::metadata(backing.trim_end_matches('\n')).ok())
        .any(|backing| (backing.dev(), backing.ino()) == (found.dev(), found.ino()));
    if used {
        return Err(Error::conflict(format!(
            "{} is still mounted, by a program in a mount namespace of its own",
            image.display()
        ))
        .hint("find it with `grep -l sandkeep /proc/*/mountinfo`, end it, and try again"));
    }
    Ok(())
}

fn unpack(state: &Path, file: &Path) -> Result<()> {
    let named =
        |error: io::Error| Error::from(error).context(format!("reading {}", file.display()));
    let from = fs::File::open(file).map_err(named)?;
    let mut decoder = zstd::Decoder::new(from).map_err(named)?;
    let mut child = Command::new("tar")
        .args([
            "--extract",
            "--sparse",
            "--numeric-owner",
            "--same-owner",
            "--preserve-permissions",
            "--xattrs",
            "--xattrs-include=*",
        ])
        .arg("--directory")
        .arg(state)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .map_err(|error| no_tar(&error))?;
    let copied = child
        .stdin
        .take()
        .map_or(Ok(0), |mut into| io::copy(&mut decoder, &mut into));
    let ended = child.wait().map_err(named)?;
    copied.map_err(|error| {
        Error::invalid("file", format!("{} is not whole: {error}", file.display()))
            .hint("give a file that `sandkeep backup` finished")
    })?;
    if ended.success() {
        return Ok(());
    }
    Err(Error::internal(format!("tar ended with {ended}")))
}

fn no_tar(error: &io::Error) -> Error {
    Error::host_not_ready(format!("tar could not be started: {error}"))
        .hint("install it: apt-get install tar")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backup_was_written_into_a_file_that_another_user_had_made() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("b.part"), dir.path().join("link.part"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), &link).unwrap();
        for there in [&file, &link] {
            assert_eq!(
                private(there).unwrap_err().kind(),
                io::ErrorKind::AlreadyExists
            );
        }
        assert!(private(&dir.path().join("new")).is_ok());
    }

    #[test]
    fn a_backup_without_its_disks_was_said_to_be_one() {
        let dir = tempfile::tempdir().unwrap();
        let (image, moved) = (dir.path().join("pool.img"), dir.path().join("moved"));
        fs::write(&moved, "disks").unwrap();
        std::os::unix::fs::symlink(&moved, &image).unwrap();
        assert_eq!(
            check_pool_file(dir.path()).unwrap_err().code,
            Code::Conflict
        );
        fs::rename(&moved, &image).unwrap();
        assert!(check_pool_file(dir.path()).is_ok());
    }
}
