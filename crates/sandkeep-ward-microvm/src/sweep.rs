//! Clearing away what belongs to no box that anybody knows.

use crate::{
    live,
    record::{Note, Record},
    waiting::WAITING,
    ward::{END_DEADLINE, Inner},
};
use sandkeep_host::{
    cgroup::Cgroups,
    files::{box_dirs, remove_dir},
    work::{blocking, lock},
};
use sandkeep_model::{Result, SandboxId};
use sandkeep_ward::Swept;
use std::{collections::HashSet, path::Path};

impl Inner {
    pub(crate) async fn sweep(&self, known: &HashSet<SandboxId>) -> Result<Swept> {
        let mut total = Swept::default();
        let held: Vec<SandboxId> = lock(&self.boxes).keys().cloned().collect();
        for id in held.iter().filter(|id| !known.contains(id)) {
            let Some(live) = self.held(id) else { continue };
            total.processes += live.record.cgroups.processes().len();
            total.cgroups += live.record.cgroups.branches.len();
            total.files += 1;
            self.destroy(id).await?;
        }
        let mut spared: HashSet<String> = known.iter().map(ToString::to_string).collect();
        for (id, _) in box_dirs(&self.state_dir) {
            if lock(&self.starting).contains(&id) {
                spared.insert(id.to_string());
            } else if !known.contains(&id) {
                add(&mut total, &self.clear_unheld(&id).await?);
            }
        }
        // Cgroups are named after their boxes; these have lost theirs.
        spared.extend(lock(&self.starting).iter().map(ToString::to_string));
        spared.extend(lock(&self.building).iter().cloned());
        let tree = self.tree.clone();
        let lost = blocking(move || {
            let mut swept = Swept::default();
            for name in tree.children() {
                // Those that an earlier server left were cleared away before this one began.
                if !spared.contains(&name) && !name.starts_with(WAITING) {
                    add(&mut swept, &clear_cgroups(&tree.child(&name))?);
                }
            }
            Ok(swept)
        })
        .await?;
        add(&mut total, &lost);
        Ok(total)
    }

    /// Clears a box away of which only files may be left.
    pub(crate) async fn clear_unheld(&self, id: &SandboxId) -> Result<Swept> {
        let directory = self.box_dir(id);
        let cgroups = self.tree.child(id.as_str());
        let swept = blocking(move || match Note::read(&directory) {
            Some(Note {
                record: Some(record),
                ..
            }) => clear(&record, &directory),
            Some(Note { cgroups, .. }) => clear_half(&cgroups, &directory),
            None => clear_half(&cgroups, &directory),
        })
        .await?;
        lock(&self.reserved).remove(id);
        Ok(swept)
    }

    pub(crate) async fn clear_record(&self, id: &SandboxId, record: Record) -> Result<()> {
        let directory = self.box_dir(id);
        blocking(move || clear(&record, &directory)).await?;
        lock(&self.reserved).remove(id);
        lock(&self.boxes).remove(id);
        Ok(())
    }
}

fn clear(record: &Record, directory: &Path) -> Result<Swept> {
    let processes = live::clear(record, END_DEADLINE)?;
    let mut swept = clear_half(&record.cgroups, directory)?;
    // The kill was before.
    swept.processes = processes;
    Ok(swept)
}

fn clear_half(cgroups: &Cgroups, directory: &Path) -> Result<Swept> {
    let mut swept = clear_cgroups(cgroups)?;
    swept.files = usize::from(directory.exists());
    remove_dir(directory)?;
    Ok(swept)
}

fn clear_cgroups(cgroups: &Cgroups) -> Result<Swept> {
    Ok(Swept {
        processes: cgroups.kill_all(),
        cgroups: cgroups.remove(END_DEADLINE)?,
        files: 0,
    })
}

fn add(total: &mut Swept, more: &Swept) {
    total.processes += more.processes;
    total.cgroups += more.cgroups;
    total.files += more.files;
}
