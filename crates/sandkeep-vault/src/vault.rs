//! The vault as others see it. All work that may block happens off the async threads.

use sandkeep_model::{Code, Error, Result, SandboxId, TemplateName};
use std::{
    fs,
    io::Read,
    os::{fd::AsFd as _, unix::fs::DirBuilderExt as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, atomic::AtomicBool},
};

use crate::{
    DiskReader, account,
    archive::{self, ImportLimits},
    attend, base, btrfs,
    disk::{self, Disk},
    doing::Doing as _,
    lock::Lock,
    parcel::ParcelKey,
    pool::{Pool, PoolInfo, PoolKind},
    progress::Progress,
    quota::{Quota, Tidied},
    spare::{self, Spares},
    staging::Layout,
    template::{self, TemplateInfo},
    verified::Verified,
};

#[derive(Debug, Clone)]
pub struct VaultConfig {
    /// Ours alone; made with mode 0700 if it is not there.
    pub state_dir: PathBuf,
    /// A directory on the operator's own btrfs, used instead of a pool file.
    pub pool_dir: Option<PathBuf>,
    /// How large the pool file may become. `None`: as it was told before, or what the disk has.
    pub pool_size_bytes: Option<u64>,
    /// Go on without btrfs or quotas, with nothing that limits a disk.
    pub allow_unlimited_disk: bool,
    /// What reads disks that are images; `None`: they are not compared.
    pub disk_reader: Option<DiskReader>,
}

/// The storage of a server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Vault {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub struct Inner {
    pub state_dir: PathBuf,
    pub pool: Pool,
    pub layout: Layout,
    pub quota: Quota,
    pub allow_unlimited: bool,
    pub spares: Spares,
    /// What the last look at the room found.
    pub was_low: AtomicBool,
    /// The kernel is being told to give freed room back.
    pub hurrying: AtomicBool,
    pub verified: Verified,
    pub disk_reader: Option<DiskReader>,
    /// What an earlier run left half-made and could not be removed yet.
    half_made: Mutex<Vec<PathBuf>>,
    pub parcel_key: ParcelKey,
    _locks: Vec<Lock>,
}

impl Inner {
    fn open(config: &VaultConfig) -> Result<Self> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::host_not_ready(
                "the vault needs root to mount and to keep file owners",
            )
            .hint("start the server as root (`sudo sandkeep serve`)")
            .retryable(false));
        }
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&config.state_dir)
            .doing_to("making the state directory", &config.state_dir)?;
        let state = fs::canonicalize(&config.state_dir)
            .doing_to("finding the state directory", &config.state_dir)?;
        let mut locks = vec![Lock::take(&state.join("vault.lock"))?];
        let parcel_key = ParcelKey::open(&state)?;
        let pool = Pool::open(config, &state)?;
        if pool.kind != PoolKind::LoopFile {
            // Two state directories may name the same pool.
            locks.push(Lock::take(&pool.root.join("vault.lock"))?);
        }
        let read_only = pool.is_read_only();
        let quota = match pool.kind {
            PoolKind::PlainDirectory => Quota::none(),
            _ if read_only => Quota::look(&pool.root)?,
            _ => Quota::enable(&pool.root)?,
        };
        let layout = if read_only {
            Layout::at(&pool.root)
        } else {
            Layout::prepare(&pool.root)?
        };
        let verified = Verified::on(&pool.root);
        let half_made = if read_only {
            Vec::new()
        } else {
            layout.half_made()?
        };
        if !half_made.is_empty() {
            tracing::info!(
                count = half_made.len(),
                "removing half-made things of an earlier run"
            );
        }
        // Nobody uses what remains; that is no reason not to start.
        let half_made = Mutex::new(layout.sweep(half_made, &quota));
        let inner = Self {
            state_dir: state,
            pool,
            layout,
            quota,
            allow_unlimited: config.allow_unlimited_disk,
            disk_reader: config.disk_reader.clone(),
            spares: Spares::default(),
            was_low: AtomicBool::new(false),
            hurrying: AtomicBool::new(false),
            verified,
            half_made,
            parcel_key,
            _locks: locks,
        };
        if !read_only {
            inner.count_all();
            // From the first moment on nobody writes more than there is.
            attend::attend(&inner)?;
        }
        Ok(inner)
    }

    /// Has what an earlier version made count for the sum of all sandboxes.
    fn count_all(&self) {
        let Ok(pool) = btrfs::open_dir(&self.pool.root) else {
            return;
        };
        let disks = disk::list(self).unwrap_or_default().into_iter();
        let volumes = disks.filter_map(|id| disk::volume_of(&disk::disk_path(self, &id)).ok());
        let graves = self.layout.graves().unwrap_or_default();
        self.quota.count_all(pool.as_fd(), volumes.chain(graves));
    }

    /// Refuses to begin something new on a full pool. If removed disks still hold space, the
    /// kernel is told to hurry and trying again makes sense.
    pub fn check_room(&self) -> Result<()> {
        let Err(error) = self.pool.check_room() else {
            return Ok(());
        };
        let freeing = self.tidy()?.groups_waiting > 0;
        Err(error.retryable(freeing))
    }

    /// Removes what is at `path`, also from a pool that is too full to delete: that gets its last
    /// reserve first.
    pub fn delete(&self, path: &Path) -> Result<()> {
        let full = match self.layout.remove(path, &self.quota) {
            Err(error) if error.code == Code::DiskFull => error,
            other => return other,
        };
        match &self.pool.backing {
            Some(backing) if backing.give_tail()? => self.layout.remove(path, &self.quota),
            _ => Err(full),
        }
    }

    /// Finishes what could not be finished before.
    fn tidy(&self) -> Result<Tidied> {
        if self.pool.is_read_only() {
            return Ok(Tidied::default());
        }
        let mut half_made = self
            .half_made
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *half_made = self
            .layout
            .sweep(std::mem::take(&mut half_made), &self.quota);
        drop(half_made);
        self.layout.tidy(&self.quota)
    }

    /// Brings everything written so far to the disk.
    pub fn sync(&self) -> Result<()> {
        let root = &self.pool.root;
        let dir = btrfs::open_dir(root).doing_to("opening", root)?;
        rustix::fs::syncfs(dir.as_fd()).doing_to("writing out", root)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        spare::clear(self);
    }
}

impl Vault {
    /// Makes or mounts the pool, switches quotas on and sweeps what a crash left.
    pub async fn open(config: VaultConfig) -> Result<Self> {
        let inner = off_thread(move || Inner::open(&config)).await?;
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Inner) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let inner = Arc::clone(&self.inner);
        off_thread(move || work(&inner)).await
    }

    pub async fn pool(&self) -> Result<PoolInfo> {
        self.run(|vault| {
            let space = vault.pool.space()?;
            Ok(PoolInfo {
                path: vault.pool.root.clone(),
                kind: vault.pool.kind,
                quota: vault.quota.kind,
                total_bytes: space.total,
                free_bytes: space.free,
                growable_bytes: vault.pool.growable(&space)?,
            })
        })
        .await
    }

    pub async fn templates(&self) -> Result<Vec<TemplateInfo>> {
        self.run(template::list).await
    }

    /// Marks a template as public, or not. The mark stays when it is built anew.
    pub async fn mark_template(&self, name: &TemplateName, public: bool) -> Result<()> {
        let name = name.clone();
        self.run(move |vault| template::mark(vault, &name, public))
            .await
    }

    pub async fn template(&self, name: &TemplateName) -> Result<Option<TemplateInfo>> {
        let name = name.clone();
        self.run(move |vault| template::find(vault, &name)).await
    }

    /// Disks made from it live on.
    pub async fn remove_template(&self, name: &TemplateName) -> Result<()> {
        let name = name.clone();
        self.run(move |vault| {
            template::remove(vault, &name)?;
            spare::drop_of(vault, |of| of.name == name);
            Ok(())
        })
        .await
    }

    /// Makes the template `base` from the host's own package sources, replacing an older
    /// one. Dropping the future ends the build.
    pub async fn build_base(
        &self,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<TemplateInfo> {
        let stop = base::Stop::default();
        let _ends_with_us = stop.clone().on_drop();
        self.run(move |vault| base::build(vault, &stop, progress))
            .await
    }

    /// Takes a root file system from a tar file (plain, gzip or zstd) as a new template.
    pub async fn import_tar(
        &self,
        name: &TemplateName,
        path: impl Into<PathBuf>,
        limits: ImportLimits,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<TemplateInfo> {
        let path = path.into();
        let file = tokio::fs::File::open(&path)
            .await
            .doing_to("opening", &path)?
            .into_std()
            .await;
        let size = file.metadata().doing_to("looking at", &path)?.len();
        let file_name = path.file_name().unwrap_or_default().to_string_lossy();
        let origin = format!("imported from {file_name}");
        self.import(name, file, Some(size), origin, limits, progress)
            .await
    }

    /// The same from anything that can be read, e.g. an upload.
    pub async fn import_reader(
        &self,
        name: &TemplateName,
        reader: impl Read + Send + 'static,
        limits: ImportLimits,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<TemplateInfo> {
        let origin = "imported from a stream".to_owned();
        self.import(name, reader, None, origin, limits, progress)
            .await
    }

    async fn import(
        &self,
        name: &TemplateName,
        reader: impl Read + Send + 'static,
        size: Option<u64>,
        origin: String,
        limits: ImportLimits,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<TemplateInfo> {
        let name = name.clone();
        self.run(move |vault| {
            if template::find(vault, &name)?.is_some() {
                return Err(template::taken(&name));
            }
            let draft = template::Draft::begin(vault)?;
            archive::unpack(reader, size, &draft.root(), &limits, progress)?;
            account::add_user(&draft.root())?;
            draft.publish(&name, &origin, false)
        })
        .await
    }

    /// A new disk for a box: a writable snapshot that may hold `limit_bytes` beyond the
    /// template (zero: no limit).
    pub async fn create_disk(
        &self,
        id: &SandboxId,
        template: &TemplateName,
        limit_bytes: u64,
    ) -> Result<Disk> {
        let (id, template) = (id.clone(), template.clone());
        self.run(move |vault| disk::create(vault, &id, &template, limit_bytes))
            .await
    }

    /// Has the next disks of this template ready before they are asked for. Returns at once
    /// while somebody else does the same.
    pub async fn prepare_disks(&self, template: &TemplateName) -> Result<()> {
        let template = template.clone();
        self.run(move |vault| spare::prepare(vault, &template))
            .await
    }

    pub async fn set_disk_limit(&self, id: &SandboxId, limit_bytes: u64) -> Result<()> {
        let id = id.clone();
        self.run(move |vault| disk::set_limit(vault, &id, limit_bytes))
            .await
    }

    /// Bytes the box has written beyond its template. What still waits in memory to be
    /// written is not in it.
    pub async fn disk_usage(&self, id: &SandboxId) -> Result<u64> {
        let id = id.clone();
        self.run(move |vault| disk::usage(vault, &id)).await
    }

    /// Removes the disk; one that is not there is fine. The kernel frees the space soon after.
    pub async fn remove_disk(&self, id: &SandboxId) -> Result<()> {
        let id = id.clone();
        self.run(move |vault| disk::remove(vault, &id)).await
    }

    /// All disks there are, for finding those whose box is gone.
    pub async fn disks(&self) -> Result<Vec<SandboxId>> {
        self.run(disk::list).await
    }

    /// Upkeep to be done now and then: quota groups of disks the kernel has freed, half-made
    /// things that could not be removed.
    pub async fn tidy(&self) -> Result<Tidied> {
        self.run(Inner::tidy).await
    }

    /// Unmounts a pool file if nothing uses it. A server that stops does not call this:
    /// its boxes go on running.
    pub async fn close(&self) -> Result<()> {
        self.run(|vault| {
            spare::clear(vault);
            vault.pool.unmount()
        })
        .await
    }
}

pub(crate) async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(Error::internal(format!(
            "the vault's work ended early: {error}"
        ))),
    }
}
