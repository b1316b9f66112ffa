//! Who took how much of the storage lately: files, and images of memory.
//!
//! A sandbox that is paused writes no more, and may be the one that took the room. So what everybody
//! holds is noted now and then while there is room, and compared with when there is none.

use std::{
    collections::HashMap,
    sync::Mutex,
    time::{Duration, Instant},
};

use sandkeep_model::{Result, SandboxId, Timestamp, human_bytes};

use crate::{core::Core, sync::lock};

const NOTE_EVERY: Duration = Duration::from_secs(60);
/// So many are told of.
const MOST_TOLD: usize = 3;
/// Less than this is not worth telling.
const LEAST_TOLD: u64 = 16 << 20;

/// What one sandbox took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    pub id: SandboxId,
    /// Files and images.
    pub bytes: u64,
    /// The images in it.
    pub images: u64,
}

impl Taken {
    fn words(&self) -> String {
        let images = match self.images {
            0 => String::new(),
            images => format!(" ({} of it images of its memory)", human_bytes(images)),
        };
        format!("\"{}\" took {}{images}", self.id, human_bytes(self.bytes))
    }
}

/// What everybody held at some time.
#[derive(Debug)]
struct Note {
    at: Timestamp,
    held: HashMap<SandboxId, u64>,
}

#[derive(Default)]
pub struct Takers {
    notes: Mutex<Notes>,
    /// Most first, as of the last look while there was no room.
    latest: Mutex<Vec<Taken>>,
}

#[derive(Default)]
struct Notes {
    /// Of one to two minutes ago.
    before: Option<Note>,
    last: Option<Note>,
    noted: Option<Instant>,
}

impl Takers {
    pub fn latest(&self) -> Vec<Taken> {
        lock(&self.latest).clone()
    }

    /// What this one took.
    pub fn of(&self, id: &SandboxId) -> Taken {
        let latest = lock(&self.latest);
        let known = latest.iter().find(|one| one.id == *id).cloned();
        known.unwrap_or_else(|| Taken {
            id: id.clone(),
            bytes: 0,
            images: 0,
        })
    }

    /// The few who took most, in words that follow a sentence.
    pub fn words(&self) -> String {
        let latest = lock(&self.latest);
        let told = latest.iter().take(MOST_TOLD);
        let told: Vec<_> = told.filter(|one| one.bytes >= LEAST_TOLD).collect();
        if told.is_empty() {
            return String::new();
        }
        let told: Vec<_> = told.into_iter().map(Taken::words).collect();
        format!("; of late {}", told.join(", "))
    }

    fn is_due(&self) -> bool {
        let noted = lock(&self.notes).noted;
        noted.is_none_or(|at| at.elapsed() >= NOTE_EVERY)
    }

    fn note(&self, held: HashMap<SandboxId, u64>) {
        let note = Note {
            at: Timestamp::now(),
            held,
        };
        let mut notes = lock(&self.notes);
        notes.before = notes.last.replace(note);
        notes.noted = Some(Instant::now());
        drop(notes);
        lock(&self.latest).clear();
    }

    /// What has come since, most first.
    fn compare(
        &self,
        held: Vec<(SandboxId, u64)>,
        images: Vec<(SandboxId, u64, Timestamp)>,
    ) -> Vec<Taken> {
        let notes = lock(&self.notes);
        let Some(note) = notes.before.as_ref().or(notes.last.as_ref()) else {
            return Vec::new();
        };
        let mut of_images: HashMap<SandboxId, u64> = HashMap::new();
        for (id, bytes, made) in images {
            if made >= note.at {
                let sum = of_images.entry(id).or_default();
                *sum = sum.saturating_add(bytes);
            }
        }
        let mut taken = Vec::new();
        for (id, bytes) in held {
            let files = bytes.saturating_sub(note.held.get(&id).copied().unwrap_or(0));
            let images = of_images.remove(&id).unwrap_or(0);
            taken.push(Taken {
                id,
                bytes: files.saturating_add(images),
                images,
            });
        }
        // Their sandboxes are gone.
        taken.extend(of_images.into_iter().map(|(id, images)| Taken {
            id,
            bytes: images,
            images,
        }));
        taken.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.id.cmp(&b.id)));
        taken
    }
}

impl Core {
    /// While there is room.
    pub async fn note_who_holds_what(&self) {
        if !self.storage.takers.is_due() {
            return;
        }
        match self.all_hold().await {
            Ok(held) => self.storage.takers.note(held.into_iter().collect()),
            Err(error) => tracing::debug!(%error, "looking at what sandboxes hold"),
        }
    }

    /// While there is none. Gives what everybody took.
    pub async fn look_who_took(&self) -> Result<Vec<Taken>> {
        let images = self.vault.images().await?;
        let images = images
            .into_iter()
            .map(|one| (one.sandbox, one.bytes, one.made));
        let held = self.all_hold().await?;
        let taken = self.storage.takers.compare(held, images.collect());
        lock(&self.storage.takers.latest).clone_from(&taken);
        Ok(taken)
    }

    async fn all_hold(&self) -> Result<Vec<(SandboxId, u64)>> {
        let all = self.registry.all().into_iter();
        let ids = all.filter(|entry| !entry.pooled());
        self.vault
            .held_by(ids.map(|entry| entry.id.clone()).collect())
            .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(last: u8) -> SandboxId {
        format!("i0123456789012345678{last}").parse().unwrap()
    }

    #[test]
    fn who_took_the_room_with_images_was_not_named() {
        let takers = Takers::default();
        takers.note([(id(1), 500 << 20), (id(2), 100 << 20)].into());
        let (old, new) = (Timestamp::from_millis(0), Timestamp::now());
        let images = vec![
            (id(1), 7 << 30, old),
            (id(2), 1 << 30, new),
            (id(2), 1 << 30, new),
            (id(3), 5 << 20, new),
        ];
        let held = vec![(id(1), 510 << 20), (id(2), 100 << 20)];
        let taken = takers.compare(held, images);
        let bytes: Vec<_> = taken.iter().map(|one| (one.bytes, one.images)).collect();
        assert_eq!(
            bytes,
            [(2 << 30, 2 << 30), (10 << 20, 0), (5 << 20, 5 << 20)]
        );
        *lock(&takers.latest) = taken;
        let words = takers.words();
        assert!(
            words.contains("\"i01234567890123456782\" took 2.0 GiB"),
            "{words}"
        );
        assert!(!words.contains(id(1).as_str()), "{words}");
    }
}
