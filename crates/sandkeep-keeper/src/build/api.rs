//! What the keeper offers about building templates.

use std::{io::Read, sync::Arc};

use sandkeep_model::{BuildId, Error, Limits, LimitsWish, Recipe, Result, Template, TemplateName};
use tokio::sync::watch;

use super::{BuildLine, BuildView, LevelView};
use crate::{EgressWish, Keeper, keeper::template};

/// A template somebody wants built.
#[derive(Debug, Clone)]
pub struct BuildWish {
    pub recipe: Recipe,
    /// What the steps and the start command may reach.
    pub network: EgressWish,
    /// How many steps from the first may be taken from earlier builds.
    pub cached_until: usize,
    /// Under which names it appears; none: under its own.
    pub names: Vec<TemplateName>,
    /// `None`: a new one.
    pub id: Option<BuildId>,
}

impl BuildWish {
    pub(super) fn names(&self, own: &TemplateName) -> Vec<TemplateName> {
        if self.names.is_empty() {
            return vec![own.clone()];
        }
        self.names.clone()
    }
}

impl Keeper {
    /// Begins to build a template; it goes on when the caller is gone. An older template of the
    /// name is there until the new one is ready. `Conflict` while another build of it runs.
    pub fn build_template(&self, name: &TemplateName, wish: BuildWish) -> Result<BuildView> {
        if self.core.closing.is_cancelled() {
            return Err(Error::host_not_ready("the server is shutting down"));
        }
        wish.recipe.check()?;
        let id = wish.id.clone().unwrap_or_else(BuildId::random);
        let build = self.core.builds.begin(name, id)?;
        self.core.build(&build, wish);
        Ok(build.view())
    }

    /// Builds of a template since the server started, oldest first.
    pub fn builds(&self, name: &TemplateName) -> Vec<BuildView> {
        let builds = self.core.builds.of(name);
        builds.iter().map(|build| build.view()).collect()
    }

    pub fn template_build(&self, id: &BuildId) -> Result<BuildView> {
        Ok(self.core.builds.find(id)?.view())
    }

    /// Lines of a build's log after the first `after`.
    pub fn build_lines(&self, id: &BuildId, after: usize, most: usize) -> Result<Vec<BuildLine>> {
        Ok(self.core.builds.find(id)?.lines(after, most))
    }

    /// Changes whenever the build says or does something.
    pub fn follow_build(&self, id: &BuildId) -> Result<watch::Receiver<u64>> {
        Ok(self.core.builds.find(id)?.follow())
    }

    /// Ends a build; the old template stays. One that is over stays as it is.
    pub fn cancel_build(&self, id: &BuildId) -> Result<BuildView> {
        let build = self.core.builds.find(id)?;
        build.cancel.cancel();
        Ok(build.view())
    }

    /// The log of the build a template came from.
    pub async fn template_log(&self, name: &TemplateName) -> Result<Vec<BuildLine>> {
        let text = self.core.vault.template_log(name).await?;
        let lines = text.split(|byte| *byte == b'\n');
        Ok(lines
            .filter_map(|line| serde_json::from_slice(line).ok())
            .collect())
    }

    pub async fn template(&self, name: &TemplateName) -> Result<Option<Template>> {
        Ok(self.core.vault.template(name).await?.map(template))
    }

    /// What a box of this template gets that asks for nothing.
    pub fn limits_of(&self, template: &Template) -> Limits {
        let wish = template.built.as_ref().map(|built| built.limits);
        // A box of one that asks for more than there may be is refused; shown is what it is.
        self.limits_for(&wish.unwrap_or_default())
            .unwrap_or(self.core.config.limits.default)
    }

    /// The limits a wish comes to here; refused when it is for more than there may be.
    pub fn limits_for(&self, wish: &LimitsWish) -> Result<Limits> {
        let limits = &self.core.config.limits;
        wish.resolve(&limits.default, &limits.most)
    }

    /// Marks a template as public, or not.
    pub async fn mark_template(&self, name: &TemplateName, public: bool) -> Result<()> {
        self.core.vault.mark_template(name, public).await
    }

    /// How boxes of a template begin at each level it was built for.
    pub async fn template_levels(&self, name: &TemplateName) -> Result<Vec<LevelView>> {
        self.core.levels_of(name).await
    }

    /// The same template under another name, over one that has it.
    pub async fn copy_template(&self, from: &TemplateName, to: &TemplateName) -> Result<()> {
        let (core, from, to) = (Arc::clone(&self.core), from.clone(), to.clone());
        self.core
            .finish(async move { core.copy_template(&from, &to).await })
            .await
    }

    /// Takes files for the builds to come. `verify`: the key is the hash of the bytes.
    pub async fn put_build_files(
        &self,
        key: &str,
        archive: impl Read + Send + 'static,
        verify: bool,
    ) -> Result<u64> {
        let (core, key) = (Arc::clone(&self.core), key.to_owned());
        self.core
            .finish(async move { core.vault.put_context(&key, archive, verify).await })
            .await
    }

    pub async fn has_build_files(&self, key: &str) -> Result<bool> {
        Ok(self.core.vault.context(key).await?.is_some())
    }
}
