//! Clearing away what belongs to no box that anybody knows.

use crate::{
    record::Note,
    ward::{CGROUP_DEADLINE, Inner},
    writing::Writers,
};
use sandkeep_host::{
    files::box_dirs,
    work::{blocking, lock},
};
use sandkeep_model::{Result, SandboxId};
use sandkeep_ward::Swept;
use std::collections::HashSet;

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
        let mut spared: HashSet<String> = HashSet::new();
        for (id, directory) in box_dirs(&self.state_dir) {
            let making = self.starting.contains(&id);
            if making || known.contains(&id) {
                let record = Note::read(&directory).and_then(|note| note.record);
                spared.extend(record.and_then(|record| record.cgroups.name().map(str::to_owned)));
                // Who still writes it must not be ended in the middle.
                spared.extend(Writers::of(&directory).cgroups().map(str::to_owned));
                continue;
            }
            total += self.clear_unheld(&id).await?;
        }
        total += self.sweep_cgroups(spared).await?;
        Ok(total)
    }

    /// Cgroups of boxes that died half made, and of workers of a dead launcher.
    async fn sweep_cgroups(&self, mut spared: HashSet<String>) -> Result<Swept> {
        spared.extend(
            lock(&self.boxes)
                .values()
                .filter_map(|held| held.live.record.cgroups.name().map(str::to_owned)),
        );
        let children = self.tree.children();
        let leftovers: Vec<_> = children
            .into_iter()
            .filter(|name| !spared.contains(name) && !self.is_of_our_launcher(name))
            .map(|name| self.tree.child(&name))
            .collect();
        blocking(move || {
            let mut swept = Swept::default();
            for leftover in leftovers {
                let (processes, cgroups) = leftover.clear(CGROUP_DEADLINE)?;
                swept.processes += processes;
                swept.cgroups += cgroups;
            }
            Ok(swept)
        })
        .await
    }

    /// Cgroups of the present launcher are its spares, or boxes that are being made.
    pub(crate) fn is_of_our_launcher(&self, name: &str) -> bool {
        name.strip_prefix(self.launcher.tag())
            .is_some_and(|rest| rest.starts_with('-'))
    }
}
