//! Clearing away what belongs to no box that anybody knows.

use crate::{record::Note, ward::Inner};
use sandkeep_host::{
    files::box_dirs,
    work::{blocking, lock},
};
use sandkeep_model::{Error, Result, SandboxId};
use sandkeep_ward::Swept;
use std::{collections::HashSet, time::Duration};

const CGROUP_DEADLINE: Duration = Duration::from_secs(5);

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
                continue;
            }
            let swept = self.clear_unheld(&id).await?;
            total.processes += swept.processes;
            total.cgroups += swept.cgroups;
            total.files += swept.files;
        }
        let cgroups = self.sweep_cgroups(spared).await?;
        total.processes += cgroups.processes;
        total.cgroups += cgroups.cgroups;
        Ok(total)
    }

    /// Cgroups of boxes that died half made, and of workers of a dead launcher.
    async fn sweep_cgroups(&self, mut spared: HashSet<String>) -> Result<Swept> {
        spared.extend(
            lock(&self.boxes)
                .values()
                .filter_map(|held| held.live.record.cgroups.name().map(str::to_owned)),
        );
        // Those of the present launcher are its spares, or boxes that are being made.
        let ours = format!("{}-", self.launcher.tag());
        let tree = self.tree.clone();
        blocking(move || {
            let mut swept = Swept::default();
            for name in tree.children() {
                if spared.contains(&name) || name.starts_with(&ours) {
                    continue;
                }
                let leftover = tree.child(&name);
                swept.processes += leftover.kill_all();
                swept.cgroups += leftover.remove(CGROUP_DEADLINE).map_err(Error::from)?;
            }
            Ok(swept)
        })
        .await
    }
}
