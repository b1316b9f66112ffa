//! Snapshots made ahead of the disks they become.
//!
//! For a snapshot btrfs writes out a whole transaction, so it takes as long as the host's disk
//! does, and that may be busy. A box should not have to wait for it: one that is there already
//! only has to be limited and renamed. Spares live in the staging place, so those of a server
//! that died are swept like anything half-made.

use rustix::fs::{Mode, OFlags, ResolveFlags};
use sandkeep_model::{Result, TemplateName};
use std::{
    fs::File,
    io::{self, Read as _},
    os::fd::{AsFd as _, BorrowedFd},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError, TryLockError},
};

use crate::{
    btrfs,
    doing::Doing as _,
    pool::PoolKind,
    staging::Staged,
    template::{self, TemplateInfo},
    vault::Inner,
};

/// For each template that is in use.
const SPARES: usize = 2;
/// A shell and its libraries are far smaller.
const LARGEST_WARMED: u64 = 8 << 20;

#[derive(Debug)]
struct Spare {
    template: TemplateInfo,
    path: PathBuf,
}

#[derive(Debug, Default)]
pub struct Spares {
    ready: Mutex<Vec<Spare>>,
    /// Held by whoever makes some; one is enough.
    making: Mutex<()>,
}

impl Spares {
    fn ready(&self) -> MutexGuard<'_, Vec<Spare>> {
        // A list is whole after every step.
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A snapshot of exactly this version of the template, if one was made ahead.
pub fn take<'a>(vault: &'a Inner, template: &TemplateInfo) -> Option<Staged<'a>> {
    let mut ready = vault.spares.ready();
    let at = ready.iter().position(|spare| spare.template == *template)?;
    let path = ready.swap_remove(at).path;
    Some(vault.layout.staged(path, &vault.quota))
}

/// Makes spares until there are enough, and removes those of older versions.
pub fn prepare(vault: &Inner, name: &TemplateName) -> Result<()> {
    if vault.pool.kind == PoolKind::PlainDirectory {
        return Ok(());
    }
    let _making = match vault.spares.making.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return Ok(()),
    };
    let Some(template) = template::find(vault, name)? else {
        drop_of(vault, |spare| spare.name == *name);
        return Ok(());
    };
    drop_of(vault, |spare| spare.name == *name && *spare != template);
    loop {
        let ready = vault.spares.ready();
        let count = ready.iter().filter(|spare| spare.template == template);
        if count.count() >= SPARES {
            return Ok(());
        }
        drop(ready);
        vault.check_room()?;
        let staged = vault.layout.stage(&vault.quota);
        btrfs::snapshot(&template.path, &staged.path)
            .doing_to("making a disk ahead from", &template.path)?;
        warm(&staged.path);
        vault.spares.ready().push(Spare {
            template: template.clone(),
            path: staged.keep(),
        });
    }
}

/// Files of a snapshot are in no cache, even where those of its template are. What the first
/// command of nearly every box reads is read here, so that the box does not have to.
fn warm(root: &Path) {
    let Ok(dir) = btrfs::open_dir(root) else {
        return;
    };
    let libraries = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    let library = |name: &str| format!("{libraries}/{name}");
    for path in [
        "bin/bash".to_owned(),
        "lib64/ld-linux-x86-64.so.2".to_owned(),
        "lib/ld-linux-aarch64.so.1".to_owned(),
        library("libtinfo.so.6"),
        library("libc.so.6"),
        "etc/ld.so.cache".to_owned(),
        "etc/passwd".to_owned(),
        "etc/group".to_owned(),
        "etc/profile".to_owned(),
        "home/user/.profile".to_owned(),
        "home/user/.bashrc".to_owned(),
    ] {
        // One that is not there, or is no file, is not missed.
        let _ = read_ahead(dir.as_fd(), &path);
    }
}

/// The links of a template lead nowhere but into it, and nothing in it makes us wait.
fn read_ahead(root: BorrowedFd<'_>, path: &str) -> io::Result<()> {
    let file = File::from(rustix::fs::openat2(
        root,
        path,
        OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
    )?);
    if file.metadata()?.is_file() {
        io::copy(&mut file.take(LARGEST_WARMED), &mut io::sink())?;
    }
    Ok(())
}

/// Removes all there are.
pub fn clear(vault: &Inner) {
    drop_of(vault, |_| true);
}

pub fn drop_of(vault: &Inner, unwanted: impl Fn(&TemplateInfo) -> bool) {
    let mut ready = vault.spares.ready();
    let (unwanted, kept) = ready.drain(..).partition(|spare| unwanted(&spare.template));
    *ready = kept;
    drop(ready);
    let unwanted: Vec<Spare> = unwanted;
    for spare in unwanted {
        drop(vault.layout.staged(spare.path, &vault.quota));
    }
}
