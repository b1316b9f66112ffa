//! What stands before the pages in the image of a machine, which another server may have written.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandkeep_ward_microvm::pages::{PAGE, Run, runs};

const HEAD: usize = 16;

fuzz_target!(|data: &[u8]| {
    let Some((&[low, high, more], file)) = data.split_first_chunk() else {
        return;
    };
    let pages = u64::from(u16::from_le_bytes([low, high]));
    // The pages themselves are never looked at: as many as the file says, or some more.
    let named = file.len() / 16 * 16;
    for length in [file.len() as u64, (named as u64) + u64::from(more) * PAGE] {
        let Ok(found) = runs(&mut &*file, length, pages * PAGE) else {
            continue;
        };
        let mut end = None;
        let mut sum = 0;
        let mut head = file[..HEAD].to_vec();
        for Run { first, count } in found {
            assert!(count > 0 && end.is_none_or(|end| first > end));
            end = Some(first + count);
            assert!(first + count <= pages);
            sum += count;
            head.extend(first.to_le_bytes());
            head.extend(count.to_le_bytes());
        }
        assert_eq!(length, head.len() as u64 + sum * PAGE);
        assert!(file.starts_with(&head));
    }
});
