//! Disks in the form their level wants.

use sandkeep_model::{Code, Error, Isolation, Limits, Result, SandboxId, TemplateName};
use sandkeep_vault::Disk;
use sandkeep_ward::Ward;

use crate::core::Core;

const MIB: u64 = 1 << 20;

/// What the vault lets a disk write. A file system in a file writes more than what is in it,
/// and holds the limit itself; the vault's is for one that got out of hand.
pub fn quota(ward: &dyn Ward, limits: &Limits) -> u64 {
    let limit = limits.disk_bytes();
    match ward.disk_form() {
        Some(_) if limit > 0 => limit.saturating_add(limit / 2).saturating_add(512 * MIB),
        _ => limit,
    }
}

impl Core {
    /// A fresh disk from a template. The first one of a form waits until that is made.
    pub async fn template_disk(
        &self,
        ward: &dyn Ward,
        id: &SandboxId,
        template: &TemplateName,
        limits: &Limits,
    ) -> Result<Disk> {
        let limit = quota(ward, limits);
        let Some(form) = ward.disk_form() else {
            return self.vault.create_disk(id, template, limit).await;
        };
        self.make_form(ward, template, form).await?;
        self.vault
            .create_disk_of_form(id, template, form, limit)
            .await
    }

    async fn make_form(&self, ward: &dyn Ward, template: &TemplateName, form: &str) -> Result<()> {
        // One at a time: who wants the same waits for it.
        let _turn = self.forms.lock().await;
        let Some(draft) = self.vault.begin_form(template, form).await? else {
            return Ok(());
        };
        tracing::info!(%template, form, "making another form of a template");
        match ward.form_disk(&draft.tree, &draft.root).await {
            Ok(()) => self.vault.publish_form(draft).await,
            Err(error) => {
                if let Err(left) = self.vault.drop_form(draft).await {
                    tracing::warn!(%template, error = %left, "half a form was left");
                }
                Err(error)
            }
        }
    }

    /// Refuses a point whose disk has another form than boxes of this level have.
    pub fn same_form(&self, of: Isolation, ward: &dyn Ward) -> Result<()> {
        let form = self.levels.ward(of).and_then(|ward| ward.disk_form());
        if form == ward.disk_form() {
            return Ok(());
        }
        Err(Error::new(
            Code::NotEnforceable,
            format!(
                "the disk of this point was made at isolation level {of} and can not be used at {}",
                ward.level()
            ),
        )
        .field("isolation")
        .hint(format!("use isolation level {of}")))
    }
}
