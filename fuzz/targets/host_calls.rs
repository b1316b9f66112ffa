//! The calls for the host alone, both directions.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandkeep_agent_api::host::{
    HttpError, InitRequest, LogsResponse, Metrics, PortsResponse, SignalRequest,
};
use sandkeep_fuzz::json_round_trip;

fuzz_target!(|data: &[u8]| {
    let Some((kind, json)) = data.split_first() else {
        return;
    };
    match kind.wrapping_sub(b'0') % 7 {
        0 => json_round_trip::<InitRequest>(json),
        1 => json_round_trip::<PortsResponse>(json),
        2 => json_round_trip::<LogsResponse>(json),
        3 => metrics(json),
        4 => json_round_trip::<HttpError<u16>>(json),
        5 => json_round_trip::<HttpError<String>>(json),
        _ => json_round_trip::<SignalRequest>(json),
    }
});

/// A share of CPU too large for its type becomes infinite, which JSON can not say: reading and
/// writing it is all that is asked for.
fn metrics(json: &[u8]) {
    if let Ok(metrics) = serde_json::from_slice::<Metrics>(json) {
        serde_json::to_vec(&metrics).expect("numbers can be written");
    }
}
