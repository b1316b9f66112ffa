//! The gVisor ward writes boxes to disk and brings them back.

mod common;

sandkeep_ward::memory_tests! {
    match common::bench() {
        Some(bench) => bench,
        None => return,
    }
}
