//! Disks in the form their level wants.

use sandkeep_model::{Code, Error, Isolation, Limits, Result, SandboxId, TemplateName};
use sandkeep_vault::Disk;
use sandkeep_ward::{BoxSpec, LiveBox, Ward};
use std::path::Path;

use crate::{core::Core, registry::Entry};

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

/// In an image beside memory and files: the agent, tables, what names and descriptors take.
const IMAGE_BESIDE: u64 = 64 * MIB;

/// The most an image of its memory may take on the disk: all of its memory, and all of its disk, as
/// deleted files that are open. Zero means no bound, for one that may write without end anyway.
pub fn image_quota(limits: &Limits) -> u64 {
    match limits.disk_bytes() {
        0 => 0,
        disk => disk
            .saturating_add(limits.memory_bytes())
            .saturating_add(IMAGE_BESIDE),
    }
}

/// Who brings processes back only sees that a write was refused.
fn is_for_room(error: &Error) -> bool {
    ["Disk quota exceeded", "No space left on device"]
        .iter()
        .any(|sign| error.message.contains(sign))
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

    /// Processes on a disk, from an image or cold. While they come back from an image the disk may hold
    /// more than its limit: deleted files that were open become files again, and take room then that
    /// they did not have to take before. What is over the limit stays until it is deleted, and the
    /// sandbox cannot write meanwhile.
    pub async fn begin_on(
        &self,
        entry: &Entry,
        spec: BoxSpec,
        image: Option<&Path>,
    ) -> Result<LiveBox> {
        // A disk with a file system of its own has these files in it.
        let raised = image.filter(|_| entry.ward.disk_form().is_none());
        let limit = quota(entry.ward.as_ref(), &spec.limits);
        if let Some(image) = raised {
            self.vault.limit_for_wake(&entry.id, limit, image).await?;
        }
        let begin = async {
            match image {
                Some(image) => entry.ward.restore(spec, image).await,
                None => entry.ward.start(spec).await,
            }
        };
        let patience = match image {
            Some(_) => entry.ward.patience_with_memory(),
            None => entry.ward.patience(),
        };
        let begun = tokio::time::timeout(patience, begin).await;
        if raised.is_some() {
            self.vault.set_disk_limit(&entry.id, limit).await?;
        }
        let begun = begun.unwrap_or_else(|_| {
            Err(Error::new(
                Code::DeadlineExceeded,
                format!("the box did not start in {} s", patience.as_secs()),
            )
            .hint("the host may be overloaded; try again"))
        });
        match (begun, self.check_storage()) {
            (Err(error), Err(low)) if raised.is_some() && is_for_room(&error) => {
                Err(low.context("there is no room to bring its deleted files back"))
            }
            (begun, _) => begun,
        }
    }
}
