//! Other forms of a template, for levels whose boxes do not have files of the host for a disk.
//!
//! A form is made once, from the files of the template, and lies beside them: it goes when the
//! template goes or is made anew. What is in it is the level's own business.

use sandkeep_model::{Error, Result, SandboxId, TemplateName};
use std::path::{Path, PathBuf};

use crate::{
    btrfs,
    disk::{self, Disk},
    doing::Doing as _,
    pool::PoolKind,
    staging::make_private_dir,
    template,
    vault::{Inner, Vault},
};

/// What names of forms begin with, beside the root of the template.
pub const PREFIX: &str = "form-";

/// A form that is being made: fill [`FormDraft::root`], then publish it. One that is dropped is
/// removed at the next start.
#[derive(Debug)]
pub struct FormDraft {
    /// The files it is made of.
    pub tree: PathBuf,
    /// Empty.
    pub root: PathBuf,
    template: template::TemplateInfo,
    form: String,
}

fn place(vault: &Inner, template: &TemplateName, form: &str) -> PathBuf {
    vault
        .layout
        .templates
        .join(template.as_str())
        .join(format!("{PREFIX}{form}"))
}

fn begin(vault: &Inner, name: &TemplateName, form: &str) -> Result<Option<FormDraft>> {
    let Some(template) = template::find(vault, name)? else {
        return Err(template::not_found(name));
    };
    if place(vault, name, form).is_dir() {
        return Ok(None);
    }
    vault.check_room()?;
    let staged = vault.layout.stage(&vault.quota);
    if vault.pool.kind == PoolKind::PlainDirectory {
        make_private_dir(&staged.path)?;
    } else {
        btrfs::create_subvolume(&staged.path).doing_to("making", &staged.path)?;
    }
    Ok(Some(FormDraft {
        tree: template.path.clone(),
        root: staged.keep(),
        template,
        form: form.to_owned(),
    }))
}

fn publish(vault: &Inner, draft: &FormDraft) -> Result<()> {
    let staged = vault.layout.staged(draft.root.clone(), &vault.quota);
    if template::find(vault, &draft.template.name)?.as_ref() != Some(&draft.template) {
        return Err(Error::conflict(format!(
            "template \"{}\" was made anew meanwhile",
            draft.template.name
        ))
        .hint("try again"));
    }
    vault.sync()?;
    let place = place(vault, &draft.template.name, &draft.form);
    // Somebody else may have made it at the same time; theirs is as good.
    let ours = staged.commit(&place)?;
    // Only now: what is read-only can not be given a name.
    if ours && vault.pool.kind != PoolKind::PlainDirectory {
        btrfs::set_read_only(&place, true).doing_to("making read-only", &place)?;
    }
    Ok(())
}

fn create(vault: &Inner, id: &SandboxId, source: &Path, limit: u64) -> Result<Disk> {
    let path = disk::disk_path(vault, id);
    let staged = disk::stage_from(vault, source, limit)?;
    if !staged.commit(&path)? {
        return Err(disk::taken(id));
    }
    Ok(Disk { path })
}

impl Vault {
    /// Begins to make a form of a template; `None` when it is there.
    pub async fn begin_form(
        &self,
        template: &TemplateName,
        form: &str,
    ) -> Result<Option<FormDraft>> {
        let (template, form) = (template.clone(), form.to_owned());
        self.run(move |vault| begin(vault, &template, &form)).await
    }

    pub async fn publish_form(&self, draft: FormDraft) -> Result<()> {
        self.run(move |vault| publish(vault, &draft)).await
    }

    /// Takes away a form that could not be made.
    pub async fn drop_form(&self, draft: FormDraft) -> Result<()> {
        self.run(move |vault| vault.layout.remove(&draft.root, &vault.quota))
            .await
    }

    /// A new disk for a box, in a form that is there.
    pub async fn create_disk_of_form(
        &self,
        id: &SandboxId,
        template: &TemplateName,
        form: &str,
        limit_bytes: u64,
    ) -> Result<Disk> {
        let (id, template, form) = (id.clone(), template.clone(), form.to_owned());
        self.run(move |vault| {
            let source = place(vault, &template, &form);
            create(vault, &id, &source, limit_bytes)
        })
        .await
    }
}
