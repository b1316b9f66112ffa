//! What runs the machines of this server: decided once, before the first sandbox.
//!
//! A host may offer a KVM that runs no machine, or none that can be written down and read again, and a
//! QEMU that lacks what it will be asked for. So before anybody counts on KVM a machine is booted on it,
//! used, written down and copied. What fails later is the failure of whoever asked for it: others have
//! machines that run, and memory on disk that nothing else could read.

use crate::{
    kvm,
    program::{self, Candidate},
    qemu::{Accel, Qemu, Shape},
    ward::Inner,
};
use sandkeep_host::work::{blocking, lock};
use sandkeep_model::{Error, Result};
use std::{path::PathBuf, sync::Arc, time::Instant};

impl Inner {
    /// The QEMU of this server. Whoever asks first waits until it was tried.
    pub async fn qemu(self: &Arc<Self>) -> Result<Arc<Qemu>> {
        let mut known = self.qemu.lock().await;
        if let Some(qemu) = known.as_ref() {
            return Ok(Arc::clone(qemu));
        }
        let qemu = self.decide().await?;
        // What is not installed may be later; what was found out stays.
        let _first = self.decided.set(qemu.accel);
        *known = Some(Arc::clone(&qemu));
        Ok(qemu)
    }

    /// What runs machines here; `None` before it was decided.
    pub fn accel(&self) -> Option<Accel> {
        self.decided.get().copied()
    }

    /// Why machines are emulated, where they are.
    pub fn why_emulated(&self) -> Option<String> {
        lock(&self.why_emulated).clone()
    }

    async fn decide(self: &Arc<Self>) -> Result<Arc<Qemu>> {
        let why = match self.decide_for_kvm().await? {
            Ok(qemu) => return Ok(qemu),
            Err(why) => why,
        };
        tracing::info!(why, "machines are emulated");
        *lock(&self.why_emulated) = Some(why.clone());
        let found = self.candidates(Accel::Tcg).await?;
        let missing = |what: String| {
            Error::host_not_ready(what)
                .hint("`sandkeep doctor` tells where to get it")
                .retryable(false)
        };
        match program::best(found) {
            None => Err(missing("QEMU is not installed".to_owned())),
            Some(Candidate {
                program,
                lacks: Some(lacks),
            }) => Err(missing(format!(
                "{}: {lacks}; and without emulation: {why}",
                program.display()
            ))),
            Some(Candidate { program, .. }) => self.look_at(program, Accel::Tcg).await,
        }
    }

    /// Every program that could, until one does; the words say what was wrong with the last one.
    async fn decide_for_kvm(self: &Arc<Self>) -> Result<std::result::Result<Arc<Qemu>, String>> {
        if let Err(why) = blocking(|| Ok(kvm::offered())).await? {
            return Ok(Err(why));
        }
        let mut why = "QEMU is not installed".to_owned();
        for Candidate { program, lacks } in self.candidates(Accel::Kvm).await? {
            let named = program.display().to_string();
            let tried = match lacks {
                Some(lacks) => Err(lacks),
                None => self.tried(program).await.map_err(|error| error.message),
            };
            match tried {
                Ok(qemu) => return Ok(Ok(qemu)),
                Err(wrong) => {
                    tracing::warn!(program = named, wrong, "this QEMU runs no machine on KVM");
                    why = format!("{named} runs no machine on KVM: {wrong}");
                }
            }
        }
        Ok(Err(why))
    }

    async fn tried(self: &Arc<Self>, program: PathBuf) -> Result<Arc<Qemu>> {
        let began = Instant::now();
        let qemu = self.look_at(program, Accel::Kvm).await?;
        let machine = self.machine_of(Shape::smallest(), &qemu).await?;
        self.try_out(&qemu, &machine).await?;
        let ms = began.elapsed().as_millis();
        tracing::info!(program = %qemu.program.display(), ms, "machines run on KVM");
        Ok(qemu)
    }

    async fn candidates(&self, accel: Accel) -> Result<Vec<Candidate>> {
        let given = self.program.clone();
        blocking(move || Ok(program::candidates(given.as_deref(), accel))).await
    }

    async fn look_at(&self, program: PathBuf, accel: Accel) -> Result<Arc<Qemu>> {
        let (kernel, machines) = (self.kernel.clone(), self.machines_dir.clone());
        let qemu = blocking(move || {
            let mut qemu = Qemu::of(program, kernel.as_deref(), accel)?;
            qemu.keep_speed(&machines)?;
            Ok(qemu)
        })
        .await?;
        Ok(Arc::new(qemu))
    }
}
