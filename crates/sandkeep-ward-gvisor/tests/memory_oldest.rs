//! With the oldest `runsc` that we take, too: the gVisor ward writes boxes to disk and brings them back.

mod common;

sandkeep_ward::memory_tests! {
    match common::oldest() {
        Some(bench) => bench,
        None => return,
    }
}
