//! What a box has at the edge: its authority, made when first needed, and what is bound to hosts.

use std::{
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Instant,
};

use sandkeep_model::{Result, SandboxId, Secret};

use super::authority::Authority;
use crate::policy::{Binding, Host};

#[derive(Debug, Default)]
pub(crate) struct BoxKeys {
    authority: Mutex<Option<Arc<Authority>>>,
    bindings: RwLock<Bindings>,
}

#[derive(Debug, Default)]
struct Bindings {
    all: Vec<Arc<Binding>>,
    /// Whether they were set at all: the first time is no decision of anybody, the box is attached.
    given: bool,
    set: Option<Instant>,
}

impl BoxKeys {
    /// The seed matters only when it is made.
    pub fn authority(&self, id: &SandboxId, seed: Option<&Secret>) -> Result<Arc<Authority>> {
        let mut kept = self
            .authority
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(authority) = kept.as_ref() {
            return Ok(Arc::clone(authority));
        }
        let made = Arc::new(Authority::new(id, seed)?);
        *kept = Some(Arc::clone(&made));
        Ok(made)
    }

    pub fn set_bindings(&self, bindings: Vec<Binding>) {
        let mut own = self
            .bindings
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        own.all = bindings.into_iter().map(Arc::new).collect();
        own.set = own.given.then(Instant::now);
        own.given = true;
    }

    /// When they were set by hand, while the box was attached.
    pub fn set(&self) -> Option<Instant> {
        self.bindings
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .set
    }

    /// Those for exactly this host and port.
    pub fn for_host(&self, host: &Host, port: u16) -> Vec<Arc<Binding>> {
        self.bindings
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .all
            .iter()
            .filter(|binding| binding.is_for(host, port))
            .cloned()
            .collect()
    }
}
