//! Clearing away what belongs to no box that anybody knows.

use crate::{
    record::Note,
    ward::{Inner, blocking, lock},
};
use sandkeep_model::{Error, Result, SandboxId};
use sandkeep_ward::Swept;
use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

const CGROUP_DEADLINE: Duration = Duration::from_secs(5);

/// Every directory of a box below the state directory.
pub(crate) fn box_dirs(state_dir: &Path) -> Vec<(SandboxId, PathBuf)> {
    let Ok(entries) = fs::read_dir(state_dir) else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok())
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let id: SandboxId = name.parse().ok()?;
            // The parser forgives a suffix; a directory of ours has none.
            (id.as_str() == name).then(|| (id, entry.path()))
        })
        .collect()
}

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
            let making = lock(&self.starting).contains(&id);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_named_like_a_box_count() {
        let dir = tempfile::tempdir().unwrap();
        let id = SandboxId::random();
        for name in [id.as_str(), "mnt", "agent", &format!("{id}-x")] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let found = box_dirs(dir.path());
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].0, id);
    }
}
