//! Policies as they are written down, in our form and in E2B's.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandkeep_moat::policy::{E2bNetwork, Policy};

fuzz_target!(|data: &[u8]| {
    if let Ok(value) = serde_json::from_slice(data)
        && let Ok(policy) = Policy::from_json(&value)
    {
        survives(&policy);
    }
    if let Ok(network) = serde_json::from_slice::<E2bNetwork>(data) {
        for internet in [None, Some(true), Some(false)] {
            if let Ok(Some(policy)) = Policy::from_e2b(Some(&network), internet) {
                survives(&policy);
            }
        }
    }
});

fn survives(policy: &Policy) {
    let again = Policy::from_json(&policy.to_json()).expect("what was written can be read");
    assert_eq!(&again, policy);
}
