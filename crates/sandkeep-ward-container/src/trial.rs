//! Whether an image comes back is found out by bringing it back.
//!
//! CRIU writes what it cannot read, in more ways than anybody can list. So an image only counts once it
//! was brought back beside the sandbox it is of: on a copy of the disk, with host ids, cgroups and a
//! network namespace of its own, and through the very steps of a restore, up to the question that CRIU
//! asks before any process runs. The worker that tries it ends it there.

use crate::{start::Outfit, ward::Inner};
use sandkeep_host::{
    failure::Doing as _,
    files::remove_dir,
    work::{blocking, lock},
};
use sandkeep_model::{Code, Error, Result, human_bytes};
use sandkeep_ward::BoxSpec;
use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// What a trial takes beside what is in the image: CRIU, tables, terminals.
const BESIDE: u64 = 32 << 20;
/// What the host keeps for others.
const KEPT: u64 = 64 << 20;
/// Others may be about to give memory back.
const ROOM_DEADLINE: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(50);

impl Inner {
    pub(crate) async fn try_image(
        &self,
        spec: &BoxSpec,
        image: &Path,
        abandoned: &CancellationToken,
    ) -> Result<()> {
        spec.check()?;
        let needed = blocking({
            let image = image.to_owned();
            move || size_of(&image)
        })
        .await?;
        let _room = self.trials.room_for(needed).await?;
        let tried = self.try_in_room(spec, image, abandoned).await;
        let directory = self.box_dir(&spec.id);
        if let Err(error) = blocking(move || remove_dir(&directory)).await {
            tracing::warn!(id = %spec.id, %error, "the directory of a trial stays");
        }
        tried
    }

    async fn try_in_room(
        &self,
        spec: &BoxSpec,
        image: &Path,
        abandoned: &CancellationToken,
    ) -> Result<()> {
        let image = self.open_image(image).await?;
        let Outfit {
            slot,
            directory,
            start,
        } = self.outfit(spec, Some(&image)).await?;
        let tried = self
            .launcher
            .try_image(image.job(start), &directory, abandoned)
            .await;
        // Until now nobody else may have its ids.
        drop(slot);
        tried
    }
}

/// The memory that its processes will take, as far as it is in the image.
fn size_of(image: &Path) -> Result<u64> {
    let doing = "looking at the image";
    let mut bytes: u64 = 0;
    for entry in fs::read_dir(image).doing(doing)? {
        let entry = entry.doing(doing)?;
        bytes = bytes.saturating_add(entry.metadata().doing(doing)?.len());
    }
    Ok(bytes)
}

/// The memory that trials take now, all together.
#[derive(Debug, Default)]
pub struct Trials(Arc<Mutex<u64>>);

/// Memory of the host that a trial may take, until this is dropped.
#[derive(Debug)]
pub struct Room {
    taken: Arc<Mutex<u64>>,
    bytes: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        *lock(&self.taken) -= self.bytes;
    }
}

impl Trials {
    /// Waits a moment for it; a host must not kill others for want of memory over a trial.
    async fn room_for(&self, needed: u64) -> Result<Room> {
        let until = Instant::now() + ROOM_DEADLINE;
        loop {
            let available = available();
            if let Some(room) = self.take(needed, available) {
                return Ok(room);
            }
            if Instant::now() >= until {
                return Err(Error::new(
                    Code::ResourceExhausted,
                    format!(
                        "the memory of the sandbox cannot be tried: it takes {} beside what it takes now, and the host has {}",
                        human_bytes(needed),
                        human_bytes(available),
                    ),
                )
                .hint("end sandboxes that are not needed, or pause with `{\"memory\": false}`"));
            }
            sleep(LOOK).await;
        }
    }

    /// Trials that have begun may not have taken theirs yet: all of it counts as taken.
    fn take(&self, needed: u64, available: u64) -> Option<Room> {
        let bytes = needed.saturating_add(BESIDE);
        let mut taken = lock(&self.0);
        let all = taken.saturating_add(bytes);
        if all.saturating_add(KEPT) > available {
            return None;
        }
        *taken = all;
        Some(Room {
            taken: Arc::clone(&self.0),
            bytes,
        })
    }
}

/// Memory that programs may have without others losing any. Where the kernel does not tell, there is
/// enough.
fn available() -> u64 {
    fs::read_to_string("/proc/meminfo")
        .ok()
        .as_deref()
        .and_then(available_in)
        .unwrap_or(u64::MAX)
}

fn available_in(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn trials_that_run_at_once_take_no_more_than_there_is() {
        let trials = Trials::default();
        let host = 1024 * MIB;
        let first = trials.take(400 * MIB, host).unwrap();
        let second = trials.take(400 * MIB, host).unwrap();
        assert!(trials.take(400 * MIB, host).is_none());
        drop(first);
        let third = trials.take(400 * MIB, host).unwrap();
        drop((second, third));
        assert_eq!(*lock(&trials.0), 0);
        assert!(trials.take(u64::MAX, host).is_none(), "no overflow");
    }

    #[test]
    fn what_the_host_has_is_read() {
        let text = "MemTotal:       24684000 kB\nMemFree:  1 kB\nMemAvailable:   20789248 kB\n";
        assert_eq!(available_in(text), Some(20_789_248 << 10));
        assert_eq!(available_in("MemTotal: 1 kB\n"), None);
        assert!(available() > 0);
    }
}
