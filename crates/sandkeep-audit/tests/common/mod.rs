use sandkeep_audit::{Action, Actor, Entry};
use sandkeep_model::SandboxId;

pub fn denied(id: &SandboxId, host: &str) -> Entry {
    Entry::now(
        Actor::sandbox(id),
        Some(id.clone()),
        Action::ConnectionDenied {
            host: host.into(),
            port: 443,
            reason: "no rule names it".into(),
            code: "no_rule".into(),
        },
    )
}
