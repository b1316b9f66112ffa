//! What other servers and other boxes wrote: memory and disks that nobody vouches for.

mod common;

use sandkeep_model::Limits;
use sandkeep_ward::{
    Adoption, BoxSpec, LiveBox, Ward,
    conformance::{Bench as _, MemoryBench as _, lab::carried, run},
};
use std::{fs, path::Path};

/// With the end of its line as many bytes as go into a page without a rest.
const MARK: &[u8; 31] = b"what a box has in its memory...";
const FORGED: &[u8; 31] = b"what a stranger put in there...";

async fn said(ward: &dyn Ward, live: &LiveBox, command: &str) -> String {
    let output = run(ward, &live.id, command).await;
    assert!(output.success(), "{output:?}");
    output.stdout
}

fn replaced(file: &Path, from: &[u8; 31], to: &[u8; 31]) -> usize {
    let mut bytes = fs::read(file).expect("a file");
    let places: Vec<_> = bytes
        .windows(from.len())
        .enumerate()
        .filter_map(|(at, found)| (found == from).then_some(at))
        .collect();
    for at in &places {
        bytes[*at..at + to.len()].copy_from_slice(to);
    }
    fs::write(file, bytes).expect("it is written");
    places.len()
}

/// Boxes share the memory they began with, which they find by its id. An image from elsewhere may
/// have any id in it: that of a memory which others begin with, and other bytes in its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_imported_image_with_the_base_id_of_somebody_else_reaches_nobody_else() {
    let Some(bench) = common::bench() else {
        return;
    };
    let ward = bench.ward();
    let spec = common::spec(bench.root());
    let root = spec.root.clone();
    let live = ward.start(spec).await.expect("the box starts");
    let mark = String::from_utf8_lossy(MARK);
    said(
        ward.as_ref(),
        &live,
        &format!("yes '{mark}' | head -1000 > /dev/shm/mark"),
    )
    .await;
    // A server that does not know what the box began with writes all of its memory as such.
    let ward = bench.ward();
    assert_eq!(ward.adopt(&live).await, Ok(Adoption::Alive));
    ward.freeze(&live.id).await.expect("it is frozen");
    let image = bench.directory();
    ward.save(&live.id, &image).await.expect("it is written");
    let roots: Vec<_> = (0..3).map(|_| bench.copy_of(&root)).collect();
    ward.destroy(&live.id).await.expect("it is destroyed");

    let forged = carried(&image, bench.directory());
    let count = replaced(&forged.join("base"), MARK, FORGED);
    assert!(count >= 1000, "{count} times in memory");
    let ward = bench.ward();
    ward.take_in(&forged).await.expect("it is an image");
    let mut lives = Vec::new();
    for ((root, image), expected) in roots
        .into_iter()
        .zip([&forged, &image, &forged])
        .zip([FORGED, MARK, FORGED])
    {
        // All of them run at the same time.
        let live = ward.restore(common::spec(root), image).await;
        lives.push(live.expect("a copy starts"));
        let found = said(
            ward.as_ref(),
            &lives[lives.len() - 1],
            "uniq < /dev/shm/mark",
        )
        .await;
        assert_eq!(found.trim().as_bytes(), expected);
    }
    // What was taken in and what it came from are two, whatever is made from them.
    let ids = |image: &Path| fs::read(image.join("image.json")).expect("a note");
    assert_ne!(ids(&image), ids(&forged));
    for live in &lives {
        ward.destroy(&live.id).await.expect("it is destroyed");
        assert_eq!(bench.traces(live), Vec::<String>::new());
    }
}

/// A disk that a box has used is grown outside of it, and what the kernel of the box had begun
/// is not lost over it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_used_disk_grows_with_its_limit() {
    let Some(bench) = common::bench() else {
        return;
    };
    let ward = bench.ward();
    let spec = common::spec(bench.root());
    let (root, limits) = (spec.root.clone(), spec.limits);
    let live = ward.start(spec).await.expect("the box starts");
    let write = "for n in $(seq 200); do echo $n > /root/file$n; done; rm /root/file7; \
                 dd if=/dev/urandom of=/root/noise bs=1M count=20 2>/dev/null; \
                 sha256sum /root/noise; sync";
    let sum = said(ward.as_ref(), &live, write).await;
    ward.settle(&live.id).await.expect("it is on the disk");
    // While it runs: its kernel has not closed its books.
    let copy = bench.copy_of(&root);
    let broken = bench.copy_of(&root);
    ward.destroy(&live.id).await.expect("it is destroyed");
    let roomy = |root| BoxSpec {
        limits: Limits {
            disk_mib: limits.disk_mib + 1024,
            ..limits
        },
        ..common::spec(root)
    };
    let grown = ward.start(roomy(copy)).await.expect("a larger one starts");
    let look = "df -m --output=avail / | tail -1; ls /root | wc -l; sha256sum /root/noise; \
                dd if=/dev/zero of=/root/more bs=1M count=900 2>/dev/null && sync && echo written";
    let found = said(ward.as_ref(), &grown, look).await;
    let lines: Vec<_> = found.lines().map(str::trim).collect();
    let free: u64 = lines[0].parse().expect("a number");
    assert!(free > limits.disk_mib + 900, "{free} MiB are free");
    assert_eq!(lines[1..], ["200", sum.trim(), "written"]);
    ward.destroy(&grown.id).await.expect("it is destroyed");

    // One whose box wrote past its file system is no disk any more; that is all that happens.
    let path = broken.join(sandkeep_ward_microvm::DISK_FILE);
    let disk = fs::File::options().write(true).open(path).expect("a disk");
    std::os::unix::fs::FileExt::write_all_at(&disk, &[0xff; 16 << 10], 0).expect("it is written");
    let spec = roomy(broken);
    let id = spec.id.clone();
    let refused = ward.start(spec).await.expect_err("it is no disk");
    assert!(refused.message.contains("can not be grown"), "{refused}");
    let gone = ward.connect(&id).await.err().expect("there is no box");
    assert_eq!(gone.code, sandkeep_model::Code::NotFound);
}
