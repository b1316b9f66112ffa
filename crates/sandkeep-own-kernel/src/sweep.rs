//! Clearing away what belongs to no box that anybody knows.

use crate::{Kind, Note, Record, Roster};
use sandkeep_host::{
    cgroup::Cgroups,
    failure::Doing as _,
    files::{box_dirs, remove_dir},
    first::END_DEADLINE,
    proc,
    work::{blocking, lock},
};
use sandkeep_model::{Result, SandboxId};
use sandkeep_ward::Swept;
use std::{collections::HashSet, io, path::Path};

impl<K: Kind> Roster<K> {
    /// `spared` knows cgroups that are in use and belong to no box.
    pub async fn sweep(
        &self,
        known: &HashSet<SandboxId>,
        spared: impl Fn(&str) -> bool + Send + 'static,
    ) -> Result<Swept> {
        let mut total = Swept::default();
        let held: Vec<SandboxId> = lock(&self.boxes).keys().cloned().collect();
        for id in held.iter().filter(|id| !known.contains(id)) {
            let Some(live) = self.held(id) else { continue };
            total.processes += live.record.cgroups.processes().len();
            total.cgroups += live.record.cgroups.branches.len();
            total.files += 1;
            self.destroy(id).await?;
        }
        let mut used: HashSet<String> = known.iter().map(ToString::to_string).collect();
        for (id, _) in box_dirs(&self.state_dir) {
            if self.starting.contains(&id) {
                used.insert(id.to_string());
            } else if !known.contains(&id) {
                total += self.clear_unheld(&id).await?;
            }
        }
        // Cgroups are named after their boxes; these have lost theirs.
        used.extend(self.starting.names());
        let tree = self.tree.clone();
        let lost = blocking(move || {
            let mut swept = Swept::default();
            for name in tree.children() {
                if !used.contains(&name) && !spared(&name) {
                    swept += clear_cgroups(&tree.child(&name))?;
                }
            }
            Ok(swept)
        })
        .await?;
        total += lost;
        Ok(total)
    }

    /// Clears a box away of which only files may be left.
    pub async fn clear_unheld(&self, id: &SandboxId) -> Result<Swept> {
        let directory = self.box_dir(id);
        let cgroups = self.tree.child(id.as_str());
        let swept = blocking(move || match Note::read(&directory) {
            Some(Note {
                record: Some(record),
                ..
            }) => clear::<K>(&record, &directory),
            Some(Note { cgroups, .. }) => clear_half(&cgroups, &directory),
            None => clear_half(&cgroups, &directory),
        })
        .await?;
        self.reserved.give_back(id);
        Ok(swept)
    }

    pub(crate) async fn clear_record(
        &self,
        id: &SandboxId,
        record: Record<K::Noted>,
    ) -> Result<()> {
        let directory = self.box_dir(id);
        blocking(move || clear::<K>(&record, &directory)).await?;
        self.reserved.give_back(id);
        lock(&self.boxes).remove(id);
        Ok(())
    }
}

fn clear<K: Kind>(record: &Record<K::Noted>, directory: &Path) -> Result<Swept> {
    let found = record.find();
    let processes = record.cgroups.kill_all();
    if let Some(pidfd) = found {
        proc::kill_by(&pidfd)?;
        if !proc::ended_within(&pidfd, END_DEADLINE) {
            return Err(io::Error::from(io::ErrorKind::TimedOut))
                .doing("waiting for the box to end")?;
        }
    }
    K::clear(&record.more);
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
    let (processes, cgroups) = cgroups.clear(END_DEADLINE)?;
    Ok(Swept {
        processes,
        cgroups,
        files: 0,
    })
}
