//! Every decision of the moat, in the audit log.
//!
//! Nothing here waits on the path of a connection but at its beginning: while the log can not
//! keep up, new connections are held back, and what is under way is written when its turn comes.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use metrics::counter;
use sandkeep_audit::{Action, Actor, Audit, Entry};
use sandkeep_keeper::DenialBell;
use sandkeep_moat::{BoxFuture, ConnectionRecord, Denial, Hooks, Phase, SecretUse, Via};
use sandkeep_model::{SandboxId, Timestamp};

use super::secrets::Uses;
use crate::meters::DENIALS;

/// Refusals of one box that are written one by one in a second; the rest is one number. What a
/// box tries is its own choice, the disk is the operator's.
const DENIALS_PER_SECOND: u32 = 50;
const SECOND: Duration = Duration::from_secs(1);

/// Sees what the moat does.
pub struct Witness {
    audit: Audit,
    bell: DenialBell,
    tallies: Mutex<HashMap<SandboxId, Tally>>,
}

/// The refusals of one box in one second.
#[derive(Default)]
struct Tally {
    second: i64,
    written: u32,
    unwritten: u64,
}

impl Witness {
    /// `bell` is rung for the stream of events.
    pub fn new(audit: Audit, bell: DenialBell) -> Self {
        Self {
            audit,
            bell,
            tallies: Mutex::default(),
        }
    }

    fn note(&self, id: &SandboxId, at: Timestamp, action: Action) {
        self.audit.record_in_turn(Entry {
            at,
            actor: Actor::sandbox(id),
            sandbox: Some(id.clone()),
            action,
        });
    }

    fn tallies(&self) -> MutexGuard<'_, HashMap<SandboxId, Tally>> {
        self.tallies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes down what was only counted, for ever.
    pub async fn sum_up(&self) {
        let mut interval = tokio::time::interval(SECOND);
        loop {
            interval.tick().await;
            if !self.audit.is_full() {
                self.sum_before(Timestamp::now().seconds());
            }
        }
    }

    /// The server stops: nothing stays only counted.
    pub fn finish(&self) {
        self.sum_before(i64::MAX);
    }

    fn sum_before(&self, second: i64) {
        self.tallies().retain(|id, tally| {
            if tally.second >= second {
                return true;
            }
            self.sum(id, tally);
            false
        });
    }

    fn sum(&self, id: &SandboxId, tally: &mut Tally) {
        let count = std::mem::take(&mut tally.unwritten);
        if count > 0 {
            self.note(id, Timestamp::now(), Action::DenialsSummed { count });
        }
    }
}

impl Hooks for Witness {
    fn connection(&self, record: &ConnectionRecord) {
        let host = record.host.to_string().as_str().into();
        let rule = record.rule.as_str().into();
        let action = match record.phase {
            Phase::Opened => Action::ConnectionOpened {
                host,
                port: record.port,
                rule,
            },
            Phase::Closed => Action::ConnectionAllowed {
                host,
                port: record.port,
                rule,
                bytes_out: record.bytes_sent,
                bytes_in: record.bytes_received,
                duration_ms: record.milliseconds,
            },
        };
        self.note(&record.id, record.at, action);
    }

    fn denial(&self, id: &SandboxId, denial: &Denial) {
        self.bell.denial(id, denial);
    }

    fn refused(&self, id: &SandboxId, denial: &Denial) {
        counter!(DENIALS, "via" => denial.via.name()).increment(1);
        let second = denial.last.seconds();
        let mut tallies = self.tallies();
        let tally = tallies.entry(id.clone()).or_default();
        if tally.second != second {
            if !self.audit.is_full() {
                self.sum(id, tally);
            }
            (tally.second, tally.written) = (second, 0);
        }
        // A lookup waits for no room, so where there is none it is only counted.
        if tally.written >= DENIALS_PER_SECOND || self.audit.is_full() {
            tally.unwritten += 1;
            return;
        }
        tally.written += 1;
        drop(tallies);
        let host = denial.host.as_str().into();
        let reason = denial.why.as_str().into();
        let code = denial.reason.name().into();
        let action = match denial.via {
            Via::Dns => Action::NameDenied { host, reason, code },
            Via::Tcp | Via::Tls | Via::Http => Action::ConnectionDenied {
                host,
                port: denial.port,
                reason,
                code,
            },
        };
        self.note(id, denial.last, action);
    }

    fn refused_unseen(&self, id: &SandboxId, count: u64) {
        counter!(DENIALS, "via" => "unseen").increment(count);
        self.tallies().entry(id.clone()).or_default().unwritten += count;
    }

    fn room(&self) -> Option<BoxFuture<'_, ()>> {
        if self.audit.is_full() {
            return Some(Box::pin(self.audit.room()));
        }
        None
    }
}

impl Uses for Witness {
    fn used(&self, occasion: &SecretUse<'_>) {
        let action = Action::SecretUsed {
            name: occasion.source.key().as_str().into(),
            host: occasion.host.to_string().as_str().into(),
        };
        self.note(occasion.id, Timestamp::now(), action);
    }

    fn room(&self) -> Option<BoxFuture<'_, ()>> {
        Hooks::room(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandkeep_audit::{Filter, Order, Record};
    use sandkeep_moat::policy::Reason;
    use std::path::Path;

    fn witness(dir: &Path) -> Witness {
        let audit = Audit::open(&dir.join("audit")).unwrap();
        Witness::new(audit, DenialBell::default())
    }

    async fn written(witness: &Witness) -> Vec<Record> {
        witness.audit.flush().await.unwrap();
        let filter = Filter {
            order: Order::OldestFirst,
            ..Filter::default()
        };
        witness
            .audit
            .read(filter)
            .unwrap()
            .collect::<Result<_, _>>()
            .unwrap()
    }

    fn denial(via: Via, at: i64) -> Denial {
        let at = Timestamp::from_millis(at);
        Denial {
            via,
            host: "evil.test".to_owned(),
            port: 443,
            reason: Reason::NoRule,
            range: None,
            request: None,
            why: "no rule".to_owned(),
            hint: String::new(),
            first: at,
            last: at,
            count: 1,
        }
    }

    #[tokio::test]
    async fn a_flood_of_refusals_is_counted_and_none_is_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let witness = witness(dir.path());
        let (loud, quiet) = (SandboxId::random(), SandboxId::random());
        for _ in 0..1000 {
            witness.refused(&loud, &denial(Via::Tcp, 5_000));
        }
        witness.refused(&quiet, &denial(Via::Dns, 5_000));
        witness.sum_before(6);
        witness.finish();
        let found = written(&witness).await;
        let of = |name: &str| found.iter().filter(|r| r.action.name() == name).count();
        assert_eq!(of("connection_denied"), DENIALS_PER_SECOND as usize);
        assert_eq!(of("name_denied"), 1);
        let sums: Vec<_> = found
            .iter()
            .filter_map(|record| match record.action {
                Action::DenialsSummed { count } => Some((record.sandbox.clone(), count)),
                _ => None,
            })
            .collect();
        assert_eq!(sums, [(Some(loud), 1000 - u64::from(DENIALS_PER_SECOND))]);
        assert!(witness.tallies().is_empty());
    }

    #[tokio::test]
    async fn a_connection_is_written_at_both_ends() {
        let dir = tempfile::tempdir().unwrap();
        let witness = witness(dir.path());
        let mut record = ConnectionRecord {
            id: SandboxId::random(),
            phase: Phase::Opened,
            at: Timestamp::now(),
            via: Via::Tls,
            host: "a.test".parse().unwrap(),
            address: None,
            port: 443,
            rule: "*.test".to_owned(),
            intercepted: false,
            bytes_sent: 0,
            bytes_received: 0,
            milliseconds: 0,
        };
        witness.connection(&record);
        record.phase = Phase::Closed;
        (record.bytes_sent, record.bytes_received) = (3, 4);
        witness.connection(&record);
        let found = written(&witness).await;
        let names: Vec<_> = found.iter().map(|record| record.action.name()).collect();
        assert_eq!(names, ["connection_opened", "connection_allowed"]);
        let detail = serde_json::to_value(&found[1]).unwrap()["detail"].clone();
        assert_eq!(detail["rule"], "*.test");
        assert_eq!(
            (&detail["bytes_out"], &detail["bytes_in"]),
            (&3.into(), &4.into())
        );
    }
}
