//! The disk below all sandboxes.

use std::{fs, path::Path, process::Command, time::Duration};

use reqwest::Method;
use serde_json::json;

use crate::{
    bench::Bench,
    check::{Level, Verdict, judged},
    fault::{Doing as _, Fault, Result},
    prepare::prepare,
    sandbox::{Sandbox, Wish},
    server::Place,
    weakness::Weakness,
};

/// A private server of its own, on a small file system of its own, whose disk is really full.
pub fn pool(bench: &Bench, level: Level) -> Result<Verdict> {
    let base = bench.dir.join("small");
    let image = bench.dir.join("small.img");
    fs::create_dir_all(&base).doing("making a directory")?;
    let made = small_disk(bench, &image, &base).and_then(|place| filled(bench, level, &place));
    let _unmounted = Command::new("umount").arg(base.join("state/pool")).output();
    let _unmounted = Command::new("umount").arg("--lazy").arg(&base).output();
    let _ = fs::remove_file(&image);
    made
}

fn small_disk(bench: &Bench, image: &Path, base: &Path) -> Result<Place> {
    let file = fs::File::create(image).doing("making a small disk")?;
    file.set_len(2600 << 20).doing("making a small disk")?;
    drop(file);
    let run = |command: &mut Command| -> Result<()> {
        let ran = command.output().doing("making a small disk")?;
        if ran.status.success() {
            return Ok(());
        }
        Err(Fault::Cannot(format!(
            "making a small disk: {}",
            String::from_utf8_lossy(&ran.stderr).trim()
        )))
    };
    run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(image))?;
    run(Command::new("mount")
        .args(["-o", "loop"])
        .arg(image)
        .arg(base))?;
    let place = Place {
        state: base.join("state"),
        // About what fits on that disk.
        storage_bytes: 1200 << 20,
        microvm_kernel: None,
        runsc: None,
        ..bench.place.clone()
    };
    // The template is taken from the first private server.
    prepare(&place, &bench.server.state, &bench.stop, &|_| {})?;
    Ok(place)
}

fn filled(bench: &Bench, level: Level, place: &Place) -> Result<Verdict> {
    let mut server = place.start(&bench.runtime, &bench.stop)?;
    let wish = |disk: u32| Wish {
        limits: Some(json!({"memory_mib": 256, "cpu_millis": 2000, "disk_mib": disk, "pids": 128})),
        ..Wish::default()
    };
    let came = (|| {
        let neighbour = Sandbox::create(&server.api, level, &wish(512))?;
        let hog = Sandbox::create(&server.api, level, &wish(1100))?;
        let write =
            "dd if=/dev/urandom of=/tmp/kept bs=64k count=16 conv=fsync 2>&1 && ls / >/dev/null";
        if neighbour.exec(&["sh", "-c", write], "user")?.code != Some(0) {
            return Err(Fault::cannot("a sandbox on the small disk cannot write"));
        }
        let fill = "dd if=/dev/urandom of=/fill bs=1M count=4000 conv=fsync 2>&1; sync; sleep 2";
        let ran = hog.exec(&["sh", "-c", fill], "root");
        let mut wrong = Vec::new();
        if let Err(Fault::Stopped) = ran {
            return Err(Fault::Stopped);
        }
        let after = neighbour.exec(&["sh", "-c", write], "user");
        let broken = !matches!(&after, Ok(ran) if ran.code == Some(0));
        if broken || bench.weak(Weakness::Planted) {
            let why = match after {
                Ok(ran) => format!("{} {}", ran.out.trim(), ran.err.trim()),
                Err(fault) => fault.to_string(),
            };
            let why: String = why.chars().take(120).collect();
            wrong.push(format!("a neighbour cannot write: {why}"));
        }
        let path = hog.path("");
        let killed = server
            .api
            .json(Method::DELETE, &path, None, Duration::from_secs(60));
        if let Err(fault) = killed {
            wrong.push(format!("the one that filled it cannot be ended: {fault}"));
        } else {
            let again = bench.stop.wait_for(
                Duration::from_secs(30),
                "a new sandbox after the full one was ended",
                || match Sandbox::create(&server.api, level, &wish(512)) {
                    Ok(made) => Ok(Some(made)),
                    Err(Fault::Stopped) => Err(Fault::Stopped),
                    Err(_) => Ok(None),
                },
            );
            match again {
                Err(Fault::Stopped) => return Err(Fault::Stopped),
                Err(fault) => wrong.push(fault.to_string()),
                Ok(_) => {}
            }
        }
        Ok(judged(
            &wrong,
            "a neighbour went on writing, and ending the full one made room again",
        ))
    })();
    server.end();
    came
}
