//! Values that came with a box and have no name of their own, such as the headers in E2B's network
//! rules. They are kept like all others, under a name made from the value.

use std::collections::{BTreeMap, HashSet};

use aws_lc_rs::hmac;
use sandkeep_model::{Code, Error, Result, Secret, SecretName, Timestamp};

use crate::{SecretStore, key::hex};

const PREFIX: &str = "inline-";
const NAME_BYTES: usize = 20;

pub(crate) fn is_inline(name: &SecretName) -> bool {
    name.as_str().starts_with(PREFIX)
}

pub(crate) fn refuse_inline(name: &SecretName) -> Result<()> {
    if !is_inline(name) {
        return Ok(());
    }
    Err(Error::invalid(
        "name",
        format!("names that begin with {PREFIX} are the server's own"),
    )
    .hint("choose another name"))
}

impl SecretStore {
    /// Keeps a value. The same one has the same name, which tells nothing of it to those who do
    /// not have the key.
    pub fn keep_inline(&self, value: &Secret) -> Result<SecretName> {
        let key = self.subkey("names of inline values")?;
        let key = hmac::Key::new(hmac::HMAC_SHA256, key.expose().as_bytes());
        let tag = hmac::sign(&key, value.expose().as_bytes());
        let name: SecretName = format!("{PREFIX}{}", hex(&tag.as_ref()[..NAME_BYTES])).parse()?;
        // Written again when it is there: that it was wanted just now keeps it from the sweep.
        match self.update(&name, value, None) {
            Err(error) if error.code == Code::NotFound => {}
            done => return done.map(|_| name),
        }
        match self.create_any(name.clone(), value, BTreeMap::new()) {
            // Somebody had the same value at the same moment.
            Err(error) if error.code == Code::Conflict => Ok(name),
            done => done.map(|_| name),
        }
    }

    /// Forgets the values no box has that were last wanted before `since`: a box that is being
    /// made is not known yet. Says how many.
    pub fn sweep_inline(&self, in_use: &HashSet<SecretName>, since: Timestamp) -> usize {
        let unused = self.infos_of(|info| {
            is_inline(&info.name) && info.updated_at < since && !in_use.contains(&info.name)
        });
        let gone = unused.iter().filter(|info| match self.delete(&info.name) {
            Ok(_) => true,
            Err(error) => {
                tracing::warn!(name = %info.name, %error, "a value nobody needs is still stored");
                false
            }
        });
        gone.count()
    }
}
