//! What a caller asks the agent, as the agent reads it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandkeep_agent_api::{
    filesystem::{ListDirRequest, MoveRequest, PathRequest, WatchRequest, WatcherRef},
    process::{
        SelectRequest, SendInputRequest, SendSignalRequest, StartRequest, StreamInputRequest,
        UpdateRequest,
    },
};
use sandkeep_fuzz::json_round_trip;

fuzz_target!(|data: &[u8]| {
    let Some((kind, json)) = data.split_first() else {
        return;
    };
    match kind % 11 {
        0 => json_round_trip::<StartRequest>(json),
        1 => json_round_trip::<SelectRequest>(json),
        2 => json_round_trip::<UpdateRequest>(json),
        3 => json_round_trip::<SendInputRequest>(json),
        4 => json_round_trip::<StreamInputRequest>(json),
        5 => json_round_trip::<SendSignalRequest>(json),
        6 => json_round_trip::<PathRequest>(json),
        7 => json_round_trip::<MoveRequest>(json),
        8 => json_round_trip::<ListDirRequest>(json),
        9 => json_round_trip::<WatchRequest>(json),
        _ => json_round_trip::<WatcherRef>(json),
    }
});
