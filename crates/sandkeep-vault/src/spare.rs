//! Snapshots made ahead of the disks they become.
//!
//! For a snapshot btrfs writes out a whole transaction, so it takes as long as the host's disk
//! does, and that may be busy. A box should not have to wait for it: one that is there already
//! only has to be limited and renamed. Spares live in the staging place, so those of a server
//! that died are swept like anything half-made.

use sandkeep_model::{Result, TemplateName};
use std::{
    path::PathBuf,
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
        vault.spares.ready().push(Spare {
            template: template.clone(),
            path: staged.keep(),
        });
    }
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
