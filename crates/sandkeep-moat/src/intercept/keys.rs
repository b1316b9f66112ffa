//! What a box has at the edge: its authority, made when first needed, and its credentials.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use sandkeep_model::{Result, SandboxId};

use super::{authority::Authority, credential::Credential};
use crate::policy::Host;

#[derive(Debug, Default)]
pub(crate) struct BoxKeys {
    authority: Mutex<Option<Arc<Authority>>>,
    credentials: RwLock<Vec<Arc<Credential>>>,
}

impl BoxKeys {
    pub fn authority(&self, id: &SandboxId) -> Result<Arc<Authority>> {
        let mut kept: MutexGuard<'_, _> = self
            .authority
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(authority) = kept.as_ref() {
            return Ok(Arc::clone(authority));
        }
        let made = Arc::new(Authority::new(id)?);
        *kept = Some(Arc::clone(&made));
        Ok(made)
    }

    pub fn set_credentials(&self, credentials: Vec<Credential>) {
        let shared = credentials.into_iter().map(Arc::new).collect();
        *self
            .credentials
            .write()
            .unwrap_or_else(PoisonError::into_inner) = shared;
    }

    /// Those for exactly this host and port.
    pub fn for_host(&self, host: &Host, port: u16) -> Vec<Arc<Credential>> {
        self.credentials
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .filter(|credential| credential.is_for(host, port))
            .cloned()
            .collect()
    }
}
