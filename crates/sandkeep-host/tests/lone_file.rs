//! The file that sandboxes share, made by a program that does other things meanwhile. As root.

use sandkeep_host::lone_file::LoneFile;
use std::{
    fs,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

/// A program that is started has what was open at that moment until it runs, also the file that
/// was just written.
#[test]
fn it_is_made_while_other_threads_start_programs() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    fs::write(&source, vec![1; 1 << 20]).unwrap();
    let enough = AtomicBool::new(false);
    let failed = thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !enough.load(Ordering::Relaxed) {
                    Command::new("/bin/true").status().unwrap();
                }
            });
        }
        let failed = (0..50).find_map(|_| LoneFile::of(&source, 0o555).err());
        enough.store(true, Ordering::Relaxed);
        failed
    });
    assert!(failed.is_none(), "{failed:?}");
}
