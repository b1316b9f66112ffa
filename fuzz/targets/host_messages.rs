//! What an agent answers and streams, as the host reads it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandkeep_agent_api::{
    ConnectError, EndStream,
    filesystem::{
        EntryResponse, ListDirResponse, WatchDirResponse, WatcherEventsResponse, WriteInfo,
    },
    process::{EventResponse, ListResponse},
};
use sandkeep_fuzz::json_round_trip;

fuzz_target!(|data: &[u8]| {
    let Some((kind, json)) = data.split_first() else {
        return;
    };
    match kind % 9 {
        0 => json_round_trip::<EventResponse>(json),
        1 => json_round_trip::<ListResponse>(json),
        2 => json_round_trip::<EntryResponse>(json),
        3 => json_round_trip::<ListDirResponse>(json),
        4 => json_round_trip::<WatchDirResponse>(json),
        5 => json_round_trip::<WatcherEventsResponse>(json),
        6 => json_round_trip::<Vec<WriteInfo>>(json),
        7 => json_round_trip::<EndStream>(json),
        _ => json_round_trip::<ConnectError>(json),
    }
});
