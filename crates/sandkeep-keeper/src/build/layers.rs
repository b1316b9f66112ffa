//! What earlier builds left: the files after each step, found again by what went into them.

use std::collections::HashSet;

use sandkeep_model::{Isolation, Point, PointKind, Result, Step, TemplateName};
use sandkeep_vault::TemplateInfo;
use sha2::{Digest as _, Sha256};

use crate::core::Core;

/// Change it when steps come to mean something else.
const MEANING: &str = "sandkeep-layer-1";
/// Layers that are kept, over all templates.
const MOST_LAYERS: usize = 128;

fn hash(parts: &[&str]) -> String {
    let mut sum = Sha256::new();
    for part in parts {
        sum.update(part.len().to_le_bytes());
        sum.update(part.as_bytes());
    }
    sum.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// What a template is, for those built on it: its own layer, or when it was made.
pub fn ground_hash(base: &TemplateInfo, level: Isolation) -> String {
    match &base.built {
        Some(built) => hash(&[MEANING, level.name(), &built.layer]),
        None => {
            let made = base.created_at.millis().to_string();
            hash(&[MEANING, level.name(), base.name.as_str(), &made])
        }
    }
}

/// After each step, in order: what was before and the step itself.
pub fn step_hashes(ground: &str, steps: &[Step]) -> Result<Vec<String>> {
    let mut last = ground.to_owned();
    let mut hashes = Vec::with_capacity(steps.len());
    for step in steps {
        let words = serde_json::to_string(step)
            .map_err(|error| sandkeep_model::Error::internal(format!("writing a step: {error}")))?;
        last = hash(&[&last, &words]);
        hashes.push(last.clone());
    }
    Ok(hashes)
}

impl Core {
    /// The newest layer for each of these, if there is one that is whole.
    pub async fn cached_layers(&self, hashes: &[String]) -> Result<Vec<Option<Point>>> {
        let layers = self.store.points_for(PointKind::Layer).await?;
        let there: HashSet<_> = self.vault.points().await?.into_iter().collect();
        let found = hashes.iter().map(|hash| {
            layers
                .iter()
                .rev()
                .find(|layer| layer.tags.contains(hash) && there.contains(&layer.id))
                .cloned()
        });
        Ok(found.collect())
    }

    /// Layers that this build made anew make older ones of the same useless.
    pub async fn trim_layers(&self) {
        let layers = match self.store.points_for(PointKind::Layer).await {
            Ok(layers) => layers,
            Err(error) => {
                tracing::warn!(%error, "listing the layers of templates");
                return;
            }
        };
        let mut seen = HashSet::new();
        for (age, layer) in layers.iter().rev().enumerate() {
            if !seen.insert(layer.tags.clone()) || age >= MOST_LAYERS {
                self.drop_point(layer).await;
            }
        }
    }

    pub async fn drop_layers_of(&self, template: &TemplateName) {
        match self.store.points_for(PointKind::Layer).await {
            Ok(layers) => {
                for layer in layers.iter().filter(|layer| layer.template == *template) {
                    self.drop_point(layer).await;
                }
            }
            Err(error) => tracing::warn!(%error, "listing the layers of templates"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(command: &str) -> Step {
        Step::Run {
            command: command.to_owned(),
            user: None,
        }
    }

    #[test]
    fn a_changed_step_changes_what_follows_and_nothing_before() {
        let one = step_hashes("g", &[run("a"), run("b"), run("c")]).unwrap();
        let two = step_hashes("g", &[run("a"), run("x"), run("c")]).unwrap();
        assert_eq!(one[0], two[0]);
        assert_ne!(one[1], two[1]);
        assert_ne!(one[2], two[2]);
        assert_ne!(step_hashes("h", &[run("a")]).unwrap()[0], one[0]);
    }
}
