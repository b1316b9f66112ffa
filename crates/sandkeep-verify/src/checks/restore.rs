//! Sandboxes that come back from the disk, and their copies.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf, time::Duration};

use serde_json::json;

use super::neighbours::in_background;
use crate::{
    bench::Bench,
    check::{CONTAINER, Check, Class, Level, SAVED, Verdict, judged},
    fault::{Doing as _, Fault, Result},
    sandbox::{Sandbox, Wish},
    server::random,
    weakness::Weakness,
};

pub const CHECKS: &[Check] = &[
    Check {
        id: "restore-links",
        class: Class::Escape,
        attack: "links that are followed on a resume",
        source: "finding 1",
        levels: CONTAINER,
        means: "A program without rights writes lasting files on the host when its sandbox is \
                paused and resumed, or forked; or it makes its sandbox unable to wake.",
        todo: "Do not pause or fork sandboxes with untrusted code in them; update Sandkeep.",
        weakened_by: &[Weakness::Planted],
        run: links,
    },
    Check {
        id: "restore-randomness",
        class: Class::Neighbours,
        attack: "copies that share their randomness",
        source: "issue 14 item 14",
        levels: SAVED,
        means: "Copies of a sandbox draw the same random numbers: whoever has one computes the \
                keys of the other.",
        todo: "Do not fork or warm up programs that speak TLS until it is mended.",
        weakened_by: &[Weakness::Planted],
        run: randomness,
    },
];

/// A directory that everyone may write to, as /tmp is.
struct Open(PathBuf);

impl Open {
    fn make() -> Result<Self> {
        let path = PathBuf::from(format!("/var/tmp/sandkeep-verify-{}", random(6)?));
        fs::create_dir(&path).doing("making an open directory")?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o1777))
            .doing("opening a directory")?;
        Ok(Self(path))
    }

    fn names(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.0).doing("reading an open directory")? {
            let entry = entry.doing("reading an open directory")?;
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        Ok(names)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // Named after verify, so that what remains is known.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn links(bench: &Bench, level: Level) -> Result<Verdict> {
    let sandbox = bench.sandbox(level, &Wish::default())?;
    // The directory comes after the sandbox, which must not have it among its mounts.
    let open = Open::make()?;
    let script = include_str!("../probes/ghost.py");
    in_background(bench, &sandbox, script, &json!({"target": open.0}), "user")?;
    let mut wrong = Vec::new();
    match sandbox.post("/pause", &json!({})) {
        Ok(view) => {
            let mode = view["pause"]["mode"].as_str().unwrap_or_default();
            if mode == "filesystem" && !bench.weak(Weakness::Planted) {
                let why = view["pause"]["why"]
                    .as_str()
                    .unwrap_or("no reason was told");
                return Ok(Verdict::Held(format!(
                    "memory with such files is not saved: {why}"
                )));
            }
            if let Err(fault) = sandbox.post("/resume", &json!({})) {
                if matches!(fault, Fault::Stopped) {
                    return Err(fault);
                }
                wrong.push(format!("the sandbox never wakes again: {fault}"));
            }
        }
        // Refused in words, and the sandbox goes on.
        Err(Fault::Refused {
            status, message, ..
        }) if status < 500 => {
            if sandbox.exec(&["true"], "user").is_err() {
                wrong.push(format!("the sandbox is lost: {message}"));
            }
        }
        Err(fault) => return Err(fault),
    }
    if bench.weak(Weakness::Planted) {
        fs::write(open.0.join("planted.cr.2.ghost"), "").doing("planting a file")?;
    }
    let left = open.names()?;
    if !left.is_empty() {
        wrong.insert(0, format!("on the host lies now: {}", left.join(", ")));
    }
    Ok(judged(
        &wrong,
        "nothing was written on the host, and the sandbox woke",
    ))
}

fn randomness(bench: &Bench, level: Level) -> Result<Verdict> {
    let sandbox = bench.sandbox(level, &Wish::default())?;
    let script = include_str!("../probes/wiped.py");
    in_background(bench, &sandbox, script, &json!({}), "user")?;
    let made = sandbox.post("/fork", &json!({"count": 1}))?;
    let id = made["forks"][0]["sandbox"]["id"]
        .as_str()
        .ok_or_else(|| Fault::cannot("the fork has no id"))?;
    let copy = Sandbox::known(bench.api(), id.to_owned());
    let first = said(bench, &copy, None)?;
    // Said by the copy after it came back, not before.
    let (_, state) = said(bench, &copy, Some(first.0 + 1))?;
    let (_, original) = said(bench, &sandbox, None)?;
    if original != "secret" {
        return Err(Fault::cannot("the original lost its page, too"));
    }
    let same = state == "secret" || bench.weak(Weakness::Planted);
    let wrong: Vec<String> = same
        .then(|| "a page that kernels wipe in copies was the same in the fork".to_owned())
        .into_iter()
        .collect();
    Ok(judged(
        &wrong,
        "a page that kernels wipe in copies is empty in the fork",
    ))
}

/// What the program of the probe says of its page, after it counted so far.
fn said(bench: &Bench, sandbox: &Sandbox, after: Option<u64>) -> Result<(u64, String)> {
    bench.stop.wait_for(
        Duration::from_secs(60),
        "a program of the copy going on",
        || {
            let ran = sandbox.exec(&["cat", "/tmp/wiped"], "user")?;
            let Some((count, state)) = ran.out.trim().split_once(' ') else {
                return Ok(None);
            };
            let count = count.parse::<u64>().unwrap_or_default();
            Ok((after.is_none_or(|after| count >= after)).then(|| (count, state.to_owned())))
        },
    )
}
