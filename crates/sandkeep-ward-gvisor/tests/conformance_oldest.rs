//! With the oldest `runsc` that we take, too: the gVisor ward keeps the contract.

mod common;

sandkeep_ward::conformance_tests! {
    match common::oldest() {
        Some(bench) => bench,
        None => return,
    }
}
