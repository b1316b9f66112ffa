//! One query of a box, answered.

use std::sync::Arc;

use hickory_proto::{
    op::{Edns, Message, MessageType, OpCode, Query, ResponseCode},
    rr::{
        DNSClass, RData, Record, RecordType,
        rdata::{A, AAAA, opt::EdnsOption},
    },
};

use super::resolver::{Answer, address_of};
use crate::{
    denials::Via,
    edge::INSIDE_V4,
    policy::{Host, LookupFailure, Reason, Refusal},
    state::{Attempt, BoxState},
};

/// The name under which a box finds us.
pub const INSIDE_NAME: &str = "sandkeep.internal";

/// Larger queries are not read at all: a name has at most 255 bytes.
pub const MAX_QUERY: usize = 1232;
const SMALLEST_PAYLOAD: u16 = 512;
const LARGEST_PAYLOAD: u16 = 1232;
const EDE: u16 = 15;
const EDE_BLOCKED: u16 = 15;
const LOCAL_TTL: u32 = 60;

/// `None`: not worth an answer. Over UDP the answer fits what the asker said it takes.
pub async fn answer(state: &Arc<BoxState>, bytes: &[u8], over_tcp: bool) -> Option<Vec<u8>> {
    if bytes.len() < 12 || bytes[2] & 0x80 != 0 {
        return None;
    }
    state.traffic.dns_query();
    let Ok(query) = Message::from_vec(bytes) else {
        let id = u16::from_be_bytes([bytes[0], bytes[1]]);
        return Message::error_msg(id, OpCode::Query, ResponseCode::FormErr)
            .to_vec()
            .ok();
    };
    let mut response = respond(state, &query).await;
    let encoded = response.to_vec().ok()?;
    let limit = query
        .edns
        .as_ref()
        .map_or(SMALLEST_PAYLOAD, |edns| {
            edns.max_payload().clamp(SMALLEST_PAYLOAD, LARGEST_PAYLOAD)
        })
        .into();
    if over_tcp || encoded.len() <= limit {
        return Some(encoded);
    }
    response.answers.clear();
    response.metadata.truncation = true;
    response.to_vec().ok()
}

async fn respond(state: &Arc<BoxState>, query: &Message) -> Message {
    let mut response = Message::new(
        query.metadata.id,
        MessageType::Response,
        query.metadata.op_code,
    );
    response.metadata.recursion_desired = query.metadata.recursion_desired;
    response.metadata.recursion_available = true;
    if query.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(LARGEST_PAYLOAD);
        response.set_edns(edns);
    }
    if query.metadata.op_code != OpCode::Query {
        response.metadata.response_code = ResponseCode::NotImp;
        return response;
    }
    let [question] = query.queries.as_slice() else {
        response.metadata.response_code = ResponseCode::FormErr;
        return response;
    };
    response.add_query(question.clone());
    match decide(state, question).await {
        Ok(Found::Local(records)) => {
            response.add_answers(records);
        }
        Ok(Found::Upstream(found)) => {
            response.metadata.response_code = found.code;
            let left = u32::try_from(found.remaining().as_secs().max(1)).unwrap_or(1);
            response.add_answers(found.records.iter().cloned().map(|mut record| {
                record.ttl = record.ttl.min(left);
                record
            }));
        }
        Err(Refused { code, why }) => {
            response.metadata.response_code = code;
            if let Some(edns) = response.edns.as_mut() {
                let mut data = EDE_BLOCKED.to_be_bytes().to_vec();
                data.extend_from_slice(why.as_bytes());
                edns.options_mut().insert(EdnsOption::Unknown(EDE, data));
            }
        }
    }
    response
}

enum Found {
    Local(Vec<Record>),
    Upstream(Arc<Answer>),
}

struct Refused {
    code: ResponseCode,
    why: &'static str,
}

const fn refused(code: ResponseCode, why: &'static str) -> Refused {
    Refused { code, why }
}

async fn decide(state: &Arc<BoxState>, question: &Query) -> Result<Found, Refused> {
    let kind = question.query_type();
    let no_such = |why| refused(ResponseCode::NXDomain, why);
    if question.query_class() != DNSClass::IN {
        return Err(refused(ResponseCode::NotImp, "only the class IN"));
    }
    let Ok(host @ Host::Name(_)) = question.name().to_ascii().parse::<Host>() else {
        return Err(no_such("not a host name"));
    };
    if let Some(records) = local(&host, question) {
        return records.map(Found::Local);
    }
    let policy = state.policy();
    // What is known costs nobody outside anything: programs that look up a name for every
    // connection are not held up.
    let known = policy.allows_lookup(&host) && state.shared.resolver.knows(&host, kind);
    if !known && !state.limiter.dns_query() {
        return Err(refused(
            ResponseCode::Refused,
            "too many queries, ask again later",
        ));
    }
    if !policy.allows_lookup(&host) {
        if kind == RecordType::SRV && service_of(&host).is_some_and(|of| policy.allows_lookup(&of))
        {
            // Asked by apt before every download; without an answer it takes the name itself.
            return Ok(Found::Local(Vec::new()));
        }
        state.traffic.dns_blocked();
        let hint = format!(
            "if the task needs it, ask for \"{host}\" to be added to the policy of this sandbox; `sandkeep policy suggest SANDBOX` proposes it"
        );
        let why = format!("{host} is not in the policy of this sandbox");
        deny(state, &host, Refusal::new(Reason::NoRule, why, hint));
        return Err(no_such("blocked by policy"));
    }
    if !may_be_asked(kind) {
        return Ok(Found::Local(Vec::new()));
    }
    let found = match state.shared.resolver.lookup(&host, kind).await {
        Ok(found) if found.code == ResponseCode::ServFail => {
            deny(
                state,
                &host,
                Refusal::of_lookup(&host, LookupFailure::NoAnswer),
            );
            found
        }
        Ok(found) => found,
        Err(error) => {
            tracing::debug!(box_id = %state.id, %host, %error, "a name could not be looked up");
            deny(
                state,
                &host,
                Refusal::of_lookup(&host, LookupFailure::NoAnswer),
            );
            return Err(refused(
                ResponseCode::ServFail,
                "the upstream resolver did not answer",
            ));
        }
    };
    let withheld = found
        .withheld
        .iter()
        .find_map(|address| Refusal::of_address(state.guard(), *address, Some(&host)));
    if let Some(refusal) = withheld {
        deny(state, &host, refusal);
        if found.records.is_empty() {
            state.traffic.dns_blocked();
            return Err(no_such("resolves to an address no sandbox can reach"));
        }
    } else if found.code == ResponseCode::NXDomain && policy.names(&host) {
        // Where everything is open a name that is not there is nothing out of the ordinary.
        deny(
            state,
            &host,
            Refusal::of_lookup(&host, LookupFailure::NoSuchName),
        );
    }
    let addresses = found.records.iter().filter_map(address_of);
    state
        .tell(&host, addresses, found.remaining())
        .await
        .map_err(|error| {
            tracing::error!(box_id = %state.id, %host, %error, "the address of a name could not be opened");
            refused(ResponseCode::ServFail, "its address could not be opened")
        })?;
    Ok(Found::Upstream(found))
}

fn deny(state: &BoxState, host: &Host, refusal: Refusal) {
    let attempt = Attempt {
        via: Via::Dns,
        host: host.to_string(),
        port: 0,
    };
    state.deny(&attempt, refusal);
}

/// The name in `_service._protocol.name`.
fn service_of(host: &Host) -> Option<Host> {
    let (service, rest) = host.name()?.split_once('.')?;
    let (protocol, name) = rest.split_once('.')?;
    (service.starts_with('_') && protocol.starts_with('_'))
        .then(|| name.parse().ok())
        .flatten()
}

/// Data in other types (keys, mail policies, whole zones) is of no use to what passes the proxy.
const fn may_be_asked(kind: RecordType) -> bool {
    matches!(
        kind,
        RecordType::A
            | RecordType::AAAA
            | RecordType::CNAME
            | RecordType::HTTPS
            | RecordType::SVCB
            | RecordType::SRV
            | RecordType::MX
            | RecordType::TXT
    )
}

fn local(host: &Host, question: &Query) -> Option<Result<Vec<Record>, Refused>> {
    let name = question.name().clone();
    let record = |data| vec![Record::from_rdata(name, LOCAL_TTL, data)];
    let found = match (host.name()?, question.query_type()) {
        (INSIDE_NAME, RecordType::A) => record(RData::A(A(INSIDE_V4))),
        ("localhost", RecordType::A) => record(RData::A(A::new(127, 0, 0, 1))),
        ("localhost", RecordType::AAAA) => record(RData::AAAA(AAAA::new(0, 0, 0, 0, 0, 0, 0, 1))),
        (INSIDE_NAME | "localhost", _) => Vec::new(),
        _ if host.is_below(INSIDE_NAME) || host.is_below("localhost") => {
            return Some(Err(refused(ResponseCode::NXDomain, "no such name")));
        }
        _ => return None,
    };
    Some(Ok(found))
}
