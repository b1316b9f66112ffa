//! The container ward writes boxes to disk by CRIU and brings them back.

mod common;

sandkeep_ward::memory_tests! {
    match common::bench() {
        Some(bench) => bench,
        None => return,
    }
}
