//! A real pool of its own for each test, taken away at the end.

#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use sandkeep_model::{SandboxId, TemplateName};
use sandkeep_vault::{DiskReader, ImportLimits, Vault, VaultConfig};
use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::Command,
};
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;

/// A state directory whose pool is unmounted when the test ends, also by a panic.
pub struct State {
    dir: TempDir,
    pub pool_size: u64,
}

impl State {
    pub fn new() -> Self {
        Self::sized(512 * MIB)
    }

    pub fn sized(pool_size: u64) -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            pool_size,
        }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    pub fn config(&self) -> VaultConfig {
        VaultConfig {
            state_dir: self.path(),
            pool_dir: None,
            pool_size_bytes: Some(self.pool_size),
            allow_unlimited_disk: false,
            disk_reader: Some(DiskReader {
                program: PathBuf::from(env!("CARGO_BIN_EXE_sandkeep-disk-reader")),
                args: Vec::new(),
            }),
        }
    }

    pub async fn open(&self) -> Vault {
        Vault::open(self.config()).await.unwrap()
    }

    /// An open vault with the template `tiny`.
    pub async fn with_template(&self) -> (Vault, TemplateName) {
        let vault = self.open().await;
        let name = import_tiny(&vault, "tiny").await;
        (vault, name)
    }

    pub fn staging(&self) -> usize {
        fs::read_dir(self.path().join("pool/staging"))
            .unwrap()
            .count()
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let pool = self.path().join("pool");
        // Lazily, so that a failed test with open files does not keep its loop device.
        while rustix::mount::unmount(&pool, rustix::mount::UnmountFlags::DETACH).is_ok() {}
    }
}

pub async fn import_tiny(vault: &Vault, name: &str) -> TemplateName {
    let name: TemplateName = name.parse().unwrap();
    vault
        .import_reader(
            &name,
            io::Cursor::new(tiny_tar()),
            ImportLimits::default(),
            |_| {},
        )
        .await
        .unwrap();
    name
}

/// `/etc/motd` and a file of eight megabytes.
pub fn tiny_tar() -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    add_dir(&mut tar, "./", 0o755);
    add_dir(&mut tar, "./etc/", 0o755);
    add_file(&mut tar, "./etc/motd", b"hello\n", 0o644, 0);
    add_file(&mut tar, "./big", &noise(8 * MIB as usize), 0o644, 0);
    tar.into_inner().unwrap()
}

pub fn header(kind: tar::EntryType, size: u64, mode: u32, owner: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(mode);
    header.set_uid(owner);
    header.set_gid(owner);
    header.set_mtime(1_700_000_000);
    header
}

pub fn add_dir(tar: &mut tar::Builder<Vec<u8>>, path: &str, mode: u32) {
    let mut header = header(tar::EntryType::Directory, 0, mode, 0);
    tar.append_data(&mut header, path, io::empty()).unwrap();
}

pub fn add_file(tar: &mut tar::Builder<Vec<u8>>, path: &str, body: &[u8], mode: u32, owner: u64) {
    let mut header = header(tar::EntryType::Regular, body.len() as u64, mode, owner);
    tar.append_data(&mut header, path, body).unwrap();
}

/// Bytes that no file system can make smaller.
pub fn noise(count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        })
        .collect()
}

/// Writes until the kernel says no; how much went in, and what it said.
pub fn fill(path: &Path, at_most: u64) -> (u64, Option<io::Error>) {
    let chunk = noise(256 * 1024);
    let mut file = File::create(path).unwrap();
    let mut written = 0;
    while written < at_most {
        let step = file.write(&chunk).and_then(|count| {
            file.sync_data()?;
            Ok(count)
        });
        match step {
            Ok(count) => written += count as u64,
            Err(error) => return (written, Some(error)),
        }
    }
    (written, None)
}

pub fn sync(path: &Path) {
    rustix::fs::syncfs(File::open(path).unwrap()).unwrap();
}

pub fn run(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
}

pub fn id() -> SandboxId {
    SandboxId::random()
}
