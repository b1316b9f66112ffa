//! Points as files, to be carried to another machine.

use std::{
    io::{Read, Write},
    path::Path,
    sync::Arc,
};

use sandkeep_model::{
    Code, EngineBuild, Error, Point, PointId, PointKind, Result, ServerKey, check_point_name,
    check_point_tags,
};
use sandkeep_vault::{ImportLimits, Label};
use sandkeep_ward::{ImagesFrom, Ward};

use crate::{Keeper, core::Core};

const FILES_ONLY: &str =
    "import it without its memory: `sandkeep points import --files-only`, or ?files_only=true";
/// Why a point has no memory is a sentence or two.
const LONGEST_WHY: usize = 2000;

/// A point that came in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    pub point: Point,
    /// The server that signed the file, if one did.
    pub signer: Option<ServerKey>,
}

/// A point that was found whole and can be written out.
pub struct Export {
    core: Arc<Core>,
    label: Label,
}

impl std::fmt::Debug for Export {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Export").field(&self.label.point.id).finish()
    }
}

impl Export {
    pub fn point(&self) -> &Point {
        &self.label.point
    }

    /// How much it is before it is packed.
    pub fn unpacked_bytes(&self) -> u64 {
        self.label
            .disk
            .bytes
            .saturating_add(self.label.memory_bytes())
    }

    /// Writes it, as fast as `out` takes it. A file that was broken off is refused everywhere.
    pub async fn write(self, out: impl Write + Send + 'static) -> Result<()> {
        self.core.vault.export_point(self.label, out).await
    }
}

impl Keeper {
    /// By which other servers know the points that were exported here.
    pub fn server_key(&self) -> ServerKey {
        self.core.vault.server_key()
    }

    /// Looks at everything a file of this point would hold.
    pub async fn export_point(&self, id: &PointId) -> Result<Export> {
        let core = Arc::clone(&self.core);
        let point = core.point(id).await?;
        let label = core.vault.label(&point).await?;
        Ok(Export { core, label })
    }

    /// Makes a point from such a file. Nothing is left when `file` fails or is not whole.
    pub async fn import_point(
        &self,
        file: impl Read + Send + 'static,
        files_only: bool,
    ) -> Result<Imported> {
        let core = Arc::clone(&self.core);
        self.core
            .finish(async move { core.import_point(file, files_only).await })
            .await
    }
}

impl Core {
    /// Vault first, then ledger, as for every point.
    async fn import_point(
        self: &Arc<Self>,
        file: impl Read + Send + 'static,
        files_only: bool,
    ) -> Result<Imported> {
        let core = Arc::clone(self);
        let now = tokio::runtime::Handle::current();
        // The work is on a thread that may block.
        let accept = move |label: &Label| {
            check(&label.point)?;
            let engine = label.point.engine.as_ref().filter(|_| !files_only);
            let Some(engine) = engine else {
                return Ok(None);
            };
            let ward = now.block_on(core.reader_of(label, engine))?;
            let take_in = move |image: &Path| {
                now.block_on(ward.take_in(image))
                    .map_err(|error| error.field("archive").hint(FILES_ONLY))
            };
            Ok(Some(take_in))
        };
        let opened = self
            .vault
            .import_point(file, ImportLimits::default(), accept)
            .await?;
        let mut point = Point {
            kind: PointKind::Snapshot,
            reason: None,
            bytes: opened.bytes,
            added_bytes: opened.bytes,
            ..opened.point
        };
        if !opened.memory && point.engine.take().is_some() {
            point.why_disk_only = Some("it was imported without its memory".to_owned());
        }
        if let Err(error) = self.store.insert_point(&point).await {
            self.forget_files(&point.id).await;
            return Err(error.context("writing down the point"));
        }
        Ok(Imported {
            point,
            signer: opened.signer,
        })
    }

    /// Memory from elsewhere is only taken where it can be woken, and where reading it is no
    /// danger to the host, or comes from somebody who is trusted with that.
    async fn reader_of(&self, label: &Label, wrote: &EngineBuild) -> Result<Arc<dyn Ward>> {
        let point = &label.point;
        let ward = self
            .ward_for(point)
            .map_err(|error| error.hint(FILES_ONLY))?;
        self.levels
            .allow(point.isolation, [])
            .map_err(|error| error.hint(FILES_ONLY))?;
        if ward.images_from() == ImagesFrom::KnownServers {
            check_known(label, self.vault.server_key(), &self.config.trusted_servers)?;
        }
        let reads = ward
            .engine()
            .await
            .map_err(|error| error.hint(FILES_ONLY))?;
        if reads.name == wrote.name && reads.build == wrote.build {
            return Ok(ward);
        }
        Err(Error::new(
            Code::NotEnforceable,
            format!(
                "the memory in point \"{}\" was written by {wrote}, this server has {} {}",
                point.id, reads.name, reads.build
            ),
        )
        .hint(FILES_ONLY))
    }
}

/// Whether what the label says is signed by somebody who may have images read here. That it tells
/// the truth is seen at the seal, before anybody reads the memory.
fn check_known(label: &Label, own: ServerKey, trusted: &[ServerKey]) -> Result<()> {
    let (who, hint) = match label.signer {
        Some(key) if key == own || trusted.contains(&key) => return Ok(()),
        Some(key) => (
            format!("it was signed by {key}, which is none of them"),
            format!(
                "if whoever runs that server may be root on this one, put its key into the setting `trusted_servers` and restart; else {FILES_ONLY}"
            ),
        ),
        None => (
            "nobody signed it".to_owned(),
            format!("export it again with a sandkeep that signs; else {FILES_ONLY}"),
        ),
    };
    let Point { id, isolation, .. } = &label.point;
    Err(Error::new(
        Code::NotEnforceable,
        format!(
            "the memory in point \"{id}\" is of isolation level {isolation}, whose engine reads images with the rights of the host, so only those of servers that are trusted: {who}"
        ),
    )
    .field("archive")
    .hint(hint))
}

/// What a file says of its point is held to what may be said here.
fn check(point: &Point) -> Result<()> {
    if let Some(name) = &point.name {
        check_point_name("name", name)?;
    }
    check_point_tags(&point.tags)?;
    let engine = point.engine.as_ref();
    let words = [
        point.why_disk_only.as_deref(),
        engine.map(|engine| engine.name.as_str()),
        engine.map(|engine| engine.build.as_str()),
    ];
    for words in words.into_iter().flatten() {
        if words.len() > LONGEST_WHY || words.chars().any(char::is_control) {
            return Err(Error::invalid(
                "archive",
                "what the file says of its point is no text",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(signer: Option<ServerKey>) -> Label {
        let label = serde_json::json!({
            "format": 2, "made_by": "a test", "signer": signer,
            "disk": {"entries": 1, "bytes": 0}, "memory": [],
            "point": {
                "id": PointId::random(), "sandbox_id": sandkeep_model::SandboxId::random(),
                "kind": "snapshot", "created_at": sandkeep_model::Timestamp::now(),
                "tags": [], "bytes": 0,
                "isolation": "container", "template": "base",
                "limits": sandkeep_model::Limits::default(),
            },
        });
        serde_json::from_value(label).unwrap()
    }

    #[test]
    fn only_who_is_named_is_trusted() {
        let [own, friend, stranger] = [1, 2, 3].map(|n| ServerKey::new([n; ServerKey::BYTES]));
        for known in [own, friend] {
            check_known(&label(Some(known)), own, &[friend]).unwrap();
        }
        let error = check_known(&label(Some(stranger)), own, &[friend]).unwrap_err();
        assert_eq!(error.code, Code::NotEnforceable);
        assert!(error.message.contains(&stranger.to_string()), "{error}");
        let hint = error.hint.unwrap();
        assert!(
            hint.contains("trusted_servers") && hint.contains("--files-only"),
            "{hint}"
        );
        let error = check_known(&label(Some(friend)), own, &[]).unwrap_err();
        assert!(error.message.contains(&friend.to_string()), "{error}");
        let error = check_known(&label(None), own, &[friend]).unwrap_err();
        assert!(error.message.contains("nobody signed it"), "{error}");
        assert!(error.hint.unwrap().contains("--files-only"));
    }
}
