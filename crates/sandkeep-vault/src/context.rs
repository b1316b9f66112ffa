//! Files that clients send for the builds of templates, kept by a key until they get old.

use sandkeep_model::{Code, Error, Result, TemplateName, check_files_key, human_bytes};
use sha2::{Digest as _, Sha256};
use std::{
    fs::{self, File},
    io::{self, Read, Write as _},
    path::PathBuf,
    time::Duration,
};

use crate::{
    doing::Doing as _,
    spare,
    template::{self, Ground, TemplateInfo},
    vault::{Inner, Vault},
};

/// One archive.
const LARGEST: u64 = 4 << 30;
/// Nobody builds with it for so long: it is sent again if it is needed.
const KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
const CHUNK: usize = 256 * 1024;

fn place(vault: &Inner, key: &str) -> Result<PathBuf> {
    check_files_key(key)?;
    Ok(vault.layout.contexts.join(key))
}

/// Takes an archive. `verify`: the key is the hash of its bytes.
fn put(vault: &Inner, key: &str, mut reader: impl Read, verify: bool) -> Result<u64> {
    let target = place(vault, key)?;
    vault.check_room()?;
    forget_old(vault);
    let staged = vault.layout.stage(&vault.quota);
    let mut file = File::create_new(&staged.path).doing_to("making", &staged.path)?;
    let mut sum = Sha256::new();
    let mut chunk = vec![0; CHUNK];
    let mut bytes = 0_u64;
    loop {
        let count = reader
            .read(&mut chunk)
            .map_err(|error| Error::invalid("body", format!("the archive broke off: {error}")))?;
        if count == 0 {
            break;
        }
        bytes = bytes.saturating_add(count as u64);
        if bytes > LARGEST {
            return Err(Error::new(
                Code::TooLarge,
                format!("the files are more than {}", human_bytes(LARGEST)),
            )
            .hint("leave out what the template does not need"));
        }
        sum.update(&chunk[..count]);
        file.write_all(&chunk[..count])
            .doing_to("writing", &staged.path)?;
    }
    let found: String = sum.finalize().iter().map(|b| format!("{b:02x}")).collect();
    if verify && found != key {
        return Err(
            Error::invalid("files", format!("the SHA-256 of what arrived is {found}"))
                .hint("send it again under its own hash"),
        );
    }
    file.sync_all().doing_to("writing out", &staged.path)?;
    fs::rename(&staged.path, &target).doing_to("moving into place", &target)?;
    Ok(bytes)
}

fn find(vault: &Inner, key: &str) -> Result<Option<PathBuf>> {
    let path = place(vault, key)?;
    match File::options().append(true).open(&path) {
        Ok(file) => {
            // Used now: it is young again.
            file.set_modified(std::time::SystemTime::now())
                .doing_to("touching", &path)?;
            Ok(Some(path))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).doing_to("looking at", &path),
    }
}

fn forget_old(vault: &Inner) {
    let Ok(entries) = fs::read_dir(&vault.layout.contexts) else {
        return;
    };
    for entry in entries.flatten() {
        let modified = entry.metadata().and_then(|meta| meta.modified());
        let old = modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > KEPT));
        if old && let Err(error) = fs::remove_file(entry.path()) {
            tracing::warn!(%error, path = %entry.path().display(), "old files of a build stay");
        }
    }
}

impl Vault {
    /// Keeps an archive for the builds to come. `verify`: the key is the hash of its bytes.
    pub async fn put_context(
        &self,
        key: &str,
        reader: impl Read + Send + 'static,
        verify: bool,
    ) -> Result<u64> {
        let key = key.to_owned();
        self.run(move |vault| put(vault, &key, reader, verify))
            .await
    }

    /// Where an archive is, if it is here.
    pub async fn context(&self, key: &str) -> Result<Option<PathBuf>> {
        let key = key.to_owned();
        self.run(move |vault| find(vault, &key)).await
    }

    /// Makes files a template, over an older one of the name.
    pub async fn publish_template(
        &self,
        ground: Ground,
        name: &TemplateName,
        built: sandkeep_model::Built,
        log: Vec<u8>,
    ) -> Result<TemplateInfo> {
        let name = name.clone();
        self.run(move |vault| {
            let made = template::publish(vault, &ground, &name, built, &log)?;
            spare::drop_of(vault, |spare| spare.name == name && *spare != made);
            Ok(made)
        })
        .await
    }

    /// What the build of a template said.
    pub async fn template_log(&self, name: &TemplateName) -> Result<Vec<u8>> {
        let name = name.clone();
        self.run(move |vault| template::read_log(vault, &name))
            .await
    }
}
