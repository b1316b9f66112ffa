//! Boxes nobody wants anything of are put to rest.

use std::{sync::Arc, time::Duration};

use crate::{core::Core, registry::Entry};

/// A box that uses more of one core than this, beyond what its level uses by itself, works for
/// somebody.
const CPU_FLOOR_PCT: f64 = 1.0;

impl Core {
    /// Called with each sample of a running box.
    pub fn look_idle(self: &Arc<Self>, entry: &Arc<Entry>, cpu_used_pct: f64) {
        // Both are asked: what was moved is compared with what was moved before.
        let talks = entry.reach.talked();
        if talks || cpu_used_pct > CPU_FLOOR_PCT + entry.ward.cpu_at_rest_pct() {
            entry.activity.touch();
            return;
        }
        let Some(limit) = entry.with(|sandbox| sandbox.time.idle_seconds) else {
            return;
        };
        let limit = Duration::from_secs(limit);
        if !is_idle(entry, limit) {
            return;
        }
        let (core, entry) = (Arc::clone(self), Arc::clone(entry));
        self.tasks.spawn(async move {
            let memory = entry.with(|sandbox| !sandbox.time.pause_files_only);
            // Somebody may have come meanwhile.
            let still = |_: &sandkeep_model::Sandbox| is_idle(&entry, limit);
            match core.pause_if(&entry, memory, still).await {
                Ok(_) => {}
                Err(error) => tracing::debug!(id = %entry.id, %error, "pausing an idle box"),
            }
        });
    }
}

fn is_idle(entry: &Entry, limit: Duration) -> bool {
    entry
        .activity
        .idle_for()
        .is_some_and(|since| since >= limit)
}
