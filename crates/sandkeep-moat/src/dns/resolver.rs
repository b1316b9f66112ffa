//! One resolver for all boxes: asks upstream, keeps answers for their time, and throws away
//! what no box may be told.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use hickory_proto::{
    op::{Message, ResponseCode},
    rr::{
        Name, RData, Record, RecordType,
        rdata::{HTTPS, SVCB, svcb::SvcParamKey},
    },
};

use super::upstream::{UpstreamDns, ask};
use crate::policy::{AddressGuard, Decision, Host, LookupFailure, Policy, Refusal};

const MAX_CACHED: usize = 4096;
const MAX_RECORDS: usize = 64;
/// A name that changes its address with every query gains nothing: the proxy dials what was
/// resolved, and for this long it is the same.
const SHORTEST: Duration = Duration::from_secs(5);
const LONGEST: Duration = Duration::from_secs(300);

/// What is known about a name, clean.
#[derive(Debug)]
pub struct Answer {
    pub code: ResponseCode,
    pub records: Vec<Record>,
    /// Addresses that were taken out because no box may reach them.
    pub withheld: Vec<IpAddr>,
    pub expires: Instant,
}

impl Answer {
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.records.iter().filter_map(address_of)
    }

    pub fn remaining(&self) -> Duration {
        self.expires.saturating_duration_since(Instant::now())
    }
}

pub fn address_of(record: &Record) -> Option<IpAddr> {
    match &record.data {
        RData::A(a) => Some(IpAddr::V4(a.0)),
        RData::AAAA(aaaa) => Some(Host::from(IpAddr::V6(aaaa.0)).address()?),
        _ => None,
    }
}

/// What a name stands for at this moment.
#[derive(Debug)]
pub struct Looked {
    /// Those a sandbox may be told.
    pub addresses: Vec<IpAddr>,
    pub withheld: Vec<IpAddr>,
    /// Why there is no address at all.
    pub failure: LookupFailure,
}

impl Looked {
    /// Those that may be dialled for this name, or why there is none. A refusal by the policy or
    /// for the address comes first, for it stays when the resolver is well again.
    pub fn open_to(
        &self,
        host: &Host,
        port: u16,
        policy: &Policy,
        guard: &AddressGuard,
    ) -> Result<Vec<IpAddr>, Refusal> {
        let mut good = Vec::new();
        let mut refusal = None;
        for address in self.addresses.iter().chain(&self.withheld) {
            match policy.allows_resolved(host, port, *address, guard) {
                Decision::Allow { .. } => good.push(*address),
                Decision::Deny(refused) => refusal = refusal.or(Some(refused)),
            }
        }
        if good.is_empty() {
            return Err(refusal.unwrap_or_else(|| Refusal::of_lookup(host, self.failure)));
        }
        Ok(good)
    }
}

type Key = (Host, RecordType);

#[derive(Debug)]
pub struct Resolver {
    upstream: UpstreamDns,
    servers: OnceLock<Vec<SocketAddr>>,
    guard: AddressGuard,
    cache: Mutex<HashMap<Key, Arc<Answer>>>,
}

impl Resolver {
    pub fn new(upstream: UpstreamDns, guard: AddressGuard) -> Self {
        Self {
            upstream,
            servers: OnceLock::new(),
            guard,
            cache: Mutex::default(),
        }
    }

    pub async fn lookup(&self, host: &Host, kind: RecordType) -> io::Result<Arc<Answer>> {
        let key = (host.clone(), kind);
        if let Some(known) = self.cached(&key) {
            return Ok(known);
        }
        let name = Name::from_ascii(format!("{host}.")).map_err(io::Error::other)?;
        let servers = self.servers.get_or_init(|| self.upstream.servers());
        let message = ask(servers, &name, kind).await?;
        let answer = Arc::new(clean(&message, &name, kind, &self.guard));
        if matches!(answer.code, ResponseCode::NoError | ResponseCode::NXDomain) {
            self.keep(key, Arc::clone(&answer));
        }
        Ok(answer)
    }

    /// Whether it would be answered without asking anybody.
    pub fn knows(&self, host: &Host, kind: RecordType) -> bool {
        self.cached(&(host.clone(), kind)).is_some()
    }

    /// All addresses of a name that a box may be told.
    pub async fn addresses(&self, host: &Host) -> io::Result<Vec<IpAddr>> {
        let (v4, v6) = tokio::join!(
            self.lookup(host, RecordType::A),
            self.lookup(host, RecordType::AAAA)
        );
        let found: Vec<IpAddr> = [v6.as_ref().ok(), v4.as_ref().ok()]
            .into_iter()
            .flatten()
            .flat_map(|answer| answer.addresses())
            .collect();
        match (v4, v6) {
            (Err(error), _) | (_, Err(error)) if found.is_empty() => Err(error),
            _ => Ok(found),
        }
    }

    /// The same, and why there is none.
    pub async fn look(&self, host: &Host) -> Looked {
        let (v4, v6) = tokio::join!(
            self.lookup(host, RecordType::A),
            self.lookup(host, RecordType::AAAA)
        );
        let mut looked = Looked {
            addresses: Vec::new(),
            withheld: Vec::new(),
            failure: LookupFailure::NoAddress,
        };
        for answer in [v6, v4] {
            match answer {
                Ok(answer) => {
                    looked.addresses.extend(answer.addresses());
                    looked.withheld.extend(&answer.withheld);
                    match answer.code {
                        ResponseCode::NoError => {}
                        ResponseCode::NXDomain => looked.failure = LookupFailure::NoSuchName,
                        _ => looked.failure = LookupFailure::NoAnswer,
                    }
                }
                Err(error) => {
                    tracing::debug!(%host, %error, "a name could not be looked up");
                    looked.failure = LookupFailure::NoAnswer;
                }
            }
        }
        looked
    }

    fn cached(&self, key: &Key) -> Option<Arc<Answer>> {
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache
            .get(key)
            .filter(|answer| answer.expires > Instant::now())
            .cloned()
    }

    fn keep(&self, key: Key, answer: Arc<Answer>) {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.len() >= MAX_CACHED {
            let now = Instant::now();
            cache.retain(|_, known| known.expires > now);
            if cache.len() >= MAX_CACHED {
                cache.clear();
            }
        }
        cache.insert(key, answer);
    }
}

/// Keeps the chain from the name to records of the kind asked for, and nothing else.
fn clean(message: &Message, name: &Name, kind: RecordType, guard: &AddressGuard) -> Answer {
    let mut records = Vec::new();
    let mut withheld = Vec::new();
    let mut owner = name.clone();
    for record in message.answers.iter().take(MAX_RECORDS) {
        if !record.name.eq_ignore_root(&owner) {
            continue;
        }
        match &record.data {
            RData::CNAME(target) if kind != RecordType::CNAME => {
                owner = target.0.clone();
                records.push(record.clone());
            }
            _ if record.record_type() != kind => {}
            RData::HTTPS(https) => {
                records.push(with_data(record, RData::HTTPS(HTTPS(bare(https)))));
            }
            RData::SVCB(svcb) => records.push(with_data(record, RData::SVCB(bare(svcb)))),
            _ => match address_of(record).filter(|address| guard.refuses(*address).is_some()) {
                Some(address) => withheld.push(address),
                None => records.push(record.clone()),
            },
        }
    }
    let ttl = records
        .iter()
        .map(|record| Duration::from_secs(record.ttl.into()))
        .min()
        .unwrap_or(SHORTEST)
        .clamp(SHORTEST, LONGEST);
    let nothing_left = !withheld.is_empty() && !records.iter().any(|r| r.record_type() == kind);
    Answer {
        code: if nothing_left {
            ResponseCode::NXDomain
        } else {
            message.metadata.response_code
        },
        records: if nothing_left { Vec::new() } else { records },
        withheld,
        expires: Instant::now() + ttl,
    }
}

fn with_data(record: &Record, data: RData) -> Record {
    Record::from_rdata(record.name.clone(), record.ttl, data)
}

/// Without the keys for an encrypted ClientHello, which would hide the name from the proxy, and
/// without addresses, which would go round the check of A and AAAA records.
fn bare(svcb: &SVCB) -> SVCB {
    let params = svcb
        .svc_params
        .iter()
        .filter(|(key, _)| {
            !matches!(
                key,
                SvcParamKey::EchConfigList
                    | SvcParamKey::Ipv4Hint
                    | SvcParamKey::Ipv6Hint
                    | SvcParamKey::Key(_)
                    | SvcParamKey::Mandatory
            )
        })
        .cloned()
        .collect();
    SVCB::new(svcb.svc_priority, svcb.target_name.clone(), params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hickory_proto::rr::rdata::svcb::{EchConfigList, SvcParamValue};
    use hickory_proto::rr::rdata::{A, CNAME};

    fn name(text: &str) -> Name {
        Name::from_ascii(text).unwrap()
    }

    #[test]
    fn only_the_chain_is_kept_and_inner_addresses_are_withheld() {
        let mut message = Message::query();
        message.add_answer(Record::from_rdata(
            name("a.test."),
            60,
            RData::CNAME(CNAME(name("b.test."))),
        ));
        for (owner, last) in [("b.test.", 7), ("evil.test.", 8)] {
            message.add_answer(Record::from_rdata(
                name(owner),
                60,
                RData::A(A::new(9, 9, 9, last)),
            ));
        }
        message.add_answer(Record::from_rdata(
            name("b.test."),
            60,
            RData::A(A::new(10, 0, 0, 1)),
        ));
        let answer = clean(
            &message,
            &name("A.test."),
            RecordType::A,
            &AddressGuard::default(),
        );
        let found: Vec<IpAddr> = answer.addresses().collect();
        assert_eq!(found, [IpAddr::from([9, 9, 9, 7])]);
        assert_eq!(answer.withheld, [IpAddr::from([10, 0, 0, 1])]);
    }

    #[test]
    fn ech_keys_and_hints_are_stripped() {
        let svcb = SVCB::new(
            1,
            name("."),
            vec![
                (
                    SvcParamKey::EchConfigList,
                    SvcParamValue::EchConfigList(EchConfigList(vec![1, 2, 3])),
                ),
                (SvcParamKey::Port, SvcParamValue::Port(443)),
            ],
        );
        let mut message = Message::query();
        message.add_answer(Record::from_rdata(
            name("a.test."),
            60,
            RData::HTTPS(HTTPS(svcb)),
        ));
        let answer = clean(
            &message,
            &name("a.test."),
            RecordType::HTTPS,
            &AddressGuard::default(),
        );
        let RData::HTTPS(https) = &answer.records[0].data else {
            panic!("no HTTPS record");
        };
        assert_eq!(https.svc_params.len(), 1);
        assert_eq!(https.svc_params[0].0, SvcParamKey::Port);
    }
}
