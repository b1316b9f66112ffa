//! The microVM ward keeps the contract.

mod common;

sandkeep_ward::conformance_tests! {
    match common::bench() {
        Some(bench) => bench,
        None => return,
    }
}

sandkeep_ward::memory_tests! {
    match common::bench() {
        Some(bench) => bench,
        None => return,
    }
}
