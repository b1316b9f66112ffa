//! Runs the battery and tells what came of it.

use std::{
    fs,
    io::{self, IsTerminal as _, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};
use reqwest::Method;

use crate::{
    bait::Bait,
    bench::Bench,
    check::{Check, Level, Verdict},
    checks::all,
    fault::{Doing as _, Fault, Result},
    prepare::{WorkDir, prepare},
    report::{
        self, Noticed, Outcome, Paint, Row, SelfRow, Uncovered, as_json, as_junit, as_table,
        listed, self_test_as_json, self_test_as_table,
    },
    room,
    server::Place,
    stop::Stop,
    tables::Tables,
    weakness::Weakness,
    world::World,
};

/// Exit codes: all held, something broken (or not noticed), cannot run.
const HELD: u8 = 0;
const BROKEN: u8 = 1;
const CANNOT: u8 = 2;
const INTERRUPTED: u8 = 130;
/// Sparse: it takes what is used, which is about a gigabyte.
const STORAGE: u64 = 8 << 30;
/// Less free space on the disk below would make checks fail for other reasons.
const LEAST_SPACE: u64 = 4 << 30;

#[derive(Debug, Clone)]
pub struct Options {
    /// The operator's state directory: its base template is copied from there.
    pub state: PathBuf,
    /// Empty: all that this host has.
    pub levels: Vec<Level>,
    /// Parts of ids, or patterns with `*`. Empty: all.
    pub only: Vec<String>,
    pub list: bool,
    pub json: bool,
    pub junit: Option<PathBuf>,
    pub self_test: bool,
    pub colour: bool,
    pub microvm_kernel: Option<PathBuf>,
    /// The runsc of the private server.
    pub runsc: Option<PathBuf>,
    pub version: &'static str,
}

/// Runs it all; gives the exit code. Must be called while this process has one thread.
pub fn run(options: &Options) -> u8 {
    match started(options) {
        Ok(code) => code,
        Err(fault) => {
            complain(&fault);
            CANNOT
        }
    }
}

fn complain(fault: &Fault) {
    // If even this cannot be written there is no one left to tell.
    let _ = writeln!(io::stderr().lock(), "error: {fault}");
}

fn print(text: &str) {
    let _ = io::stdout().lock().write_all(text.as_bytes());
}

fn started(options: &Options) -> Result<u8> {
    let checks: Vec<&Check> = all()
        .into_iter()
        .filter(|check| options.only.is_empty() || options.only.iter().any(|p| fits(p, check)))
        .filter(|check| {
            options.levels.is_empty() || check.levels.iter().any(|l| options.levels.contains(l))
        })
        .collect();
    if checks.is_empty() {
        return Err(Fault::cannot(
            "no check fits; `sandkeep verify --list` shows them all",
        ));
    }
    let paint = Paint(options.colour);
    if options.list {
        if options.json {
            let ids: Vec<_> = checks
                .iter()
                .map(|c| {
                    serde_json::json!({
                        "id": c.id, "class": c.class, "attack": c.attack, "source": c.source,
                        "levels": c.levels, "weakened_by": c.weakened_by,
                    })
                })
                .collect();
            print(&format!("{:#}\n", serde_json::Value::from(ids)));
        } else {
            print(&listed(&checks, paint));
        }
        return Ok(HELD);
    }
    if !rustix::process::geteuid().is_root() {
        return Err(Fault::cannot(
            "`sandkeep verify` must run as root, as `sandkeep serve` does: it makes namespaces, \
             mounts and sandboxes of its own; run it with sudo",
        ));
    }
    let work = WorkDir::make(&options.state)?;
    enough_space(&work.path)?;
    let code = room::in_a_room(|stop| {
        let code = in_the_room(options, &checks, &work.path, stop);
        match code {
            Ok(code) => code,
            Err(Fault::Stopped) => INTERRUPTED,
            Err(fault) => {
                complain(&fault);
                CANNOT
            }
        }
    });
    drop(work);
    code
}

fn enough_space(dir: &Path) -> Result<()> {
    let stat = rustix::fs::statvfs(dir).doing("asking for free space")?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free >= LEAST_SPACE {
        return Ok(());
    }
    Err(Fault::Cannot(format!(
        "{} has {} MiB free, and the battery wants {} MiB; free some, or name another place with --state",
        dir.display(),
        free >> 20,
        LEAST_SPACE >> 20
    )))
}

/// `*` stands for anything; without one the pattern is a part of the id, or the class.
fn fits(pattern: &str, check: &Check) -> bool {
    if !pattern.contains('*') {
        return check.id.contains(pattern);
    }
    let mut rest = check.id;
    let pieces: Vec<&str> = pattern.split('*').collect();
    for (place, piece) in pieces.iter().enumerate() {
        let last = place + 1 == pieces.len();
        let found = match place {
            0 => rest.starts_with(piece).then_some(0),
            _ if last => rest
                .ends_with(piece)
                .then(|| rest.len().saturating_sub(piece.len())),
            _ => rest.find(piece),
        };
        let Some(at) = found else { return false };
        rest = rest.get(at + piece.len()..).unwrap_or_default();
    }
    true
}

fn in_the_room(options: &Options, checks: &[&Check], work: &Path, stop: &Stop) -> Result<u8> {
    let place = Place {
        program: "/proc/self/exe".into(),
        state: work.join("state"),
        storage_bytes: STORAGE,
        microvm_kernel: options.microvm_kernel.clone(),
        runsc: options.runsc.clone(),
        outside_ca: work.join("outside-ca.pem"),
    };
    let place = Place {
        // `/proc/self` is somebody else in a child.
        program: fs::read_link(&place.program).doing("finding this program")?,
        ..place
    };
    let line = |text: &str| {
        let _ = writeln!(io::stderr().lock(), "verify: {text}");
    };
    prepare(&place, &options.state, stop, &line)?;
    let tables = Tables::open();
    room::leave_the_network()?;
    let world = World::build(work)?;
    let bait = Bait::lay(&work.join("bait"))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .doing("starting the runtime")?;
    let runtime = Arc::new(runtime);
    line("starting a private server");
    let server = place.start(&runtime, stop)?;
    let bench = Bench::new(
        server,
        place,
        world,
        bait,
        stop.clone(),
        tables,
        runtime,
        work.to_owned(),
    );
    let levels = levels(&bench, options)?;
    if options.self_test {
        self_test(&bench, options, checks, &levels)
    } else {
        battery(&bench, options, checks, &levels)
    }
}

/// The levels that are wanted, each with why it does not work here.
fn levels(bench: &Bench, options: &Options) -> Result<Vec<(Level, Option<String>)>> {
    let host = bench
        .api()
        .json(Method::GET, "/v1/host", None, Duration::from_secs(60))?;
    let mut found = Vec::new();
    for level in Level::ALL {
        if !options.levels.is_empty() && !options.levels.contains(&level) {
            continue;
        }
        let view = host["levels"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|view| view["level"] == level.name());
        let why = match view {
            None => Some("this server does not have the level".to_owned()),
            Some(view) if view["usable"] == true => None,
            Some(view) => Some(
                view["checks"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .find(|check| check["verdict"] == "missing")
                    .map_or_else(
                        || "the level does not work on this host".to_owned(),
                        |check| {
                            let text = |name: &str| check[name].as_str().unwrap_or_default();
                            format!("{}: {} ({})", text("name"), text("found"), text("fix"))
                        },
                    ),
            ),
        };
        found.push((level, why));
    }
    Ok(found)
}

/// A bar on a terminal, else a line for each check.
struct Progress {
    bar: ProgressBar,
}

impl Progress {
    fn new(total: usize, quiet: bool) -> Self {
        let bar = if io::stderr().is_terminal() && !quiet {
            let bar = ProgressBar::new(total.try_into().unwrap_or(u64::MAX));
            if let Ok(style) =
                ProgressStyle::with_template("{bar:24} {pos:>3}/{len} {elapsed:>4}  {msg}")
            {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        } else {
            ProgressBar::hidden()
        };
        Self { bar }
    }

    fn begin(&self, what: &str) {
        self.bar
            .set_message(what.chars().take(40).collect::<String>());
    }

    fn end(&self, line: &str) {
        self.bar.inc(1);
        if self.bar.is_hidden() {
            let _ = writeln!(io::stderr().lock(), "{line}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn battery(
    bench: &Bench,
    options: &Options,
    checks: &[&Check],
    levels: &[(Level, Option<String>)],
) -> Result<u8> {
    let planned: Vec<(&Check, Level, Option<&str>)> = levels
        .iter()
        .flat_map(|(level, why)| {
            checks
                .iter()
                .filter(|check| check.levels.contains(level))
                .map(|check| (*check, *level, why.as_deref()))
        })
        .collect();
    let progress = Progress::new(planned.len(), false);
    let mut rows = Vec::new();
    let mut complete = true;
    for (check, level, why) in planned {
        progress.begin(&format!("{level}: {}", check.attack));
        let begun = Instant::now();
        let came = match why {
            Some(why) => Err(Fault::Cannot(why.to_owned())),
            None => tried(bench, check, level),
        };
        if matches!(came, Err(Fault::Stopped)) {
            complete = false;
            break;
        }
        let row = Row::new(check, level, came, begun.elapsed().as_secs_f64());
        let word = match row.outcome {
            Outcome::Held => "held",
            Outcome::Broken => "BROKEN",
            Outcome::Untested => "no test",
        };
        progress.end(&format!(
            "{level:<10} {word:<8} {} ({:.1} s)",
            row.id, row.seconds
        ));
        rows.push(row);
    }
    drop(progress);
    if let Some(file) = &options.junit {
        fs::write(file, as_junit(&rows)).doing(format_args!("writing {}", file.display()))?;
    }
    if options.json {
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let value = as_json(&rows, options.version, kernel.trim(), complete);
        print(&format!("{value:#}\n"));
    } else {
        print(&as_table(&rows, Paint(options.colour), complete));
    }
    let counts = report::counts(&rows);
    Ok(if !complete {
        INTERRUPTED
    } else if counts.broken > 0 {
        BROKEN
    } else if counts.held == 0 {
        CANNOT
    } else {
        HELD
    })
}

fn tried(bench: &Bench, check: &Check, level: Level) -> Result<Verdict> {
    bench.stop.check()?;
    bench.world.seen.forget();
    let came = (check.run)(bench, level);
    // A request that a stop broke off looks like any other fault.
    bench.stop.check()?;
    if came.is_err() {
        bench.forget_shared(level);
    }
    came
}

fn self_test(
    bench: &Bench,
    options: &Options,
    checks: &[&Check],
    levels: &[(Level, Option<String>)],
) -> Result<u8> {
    let mut planned: Vec<(Weakness, &Check, Level, Option<&str>)> = Vec::new();
    let mut uncovered = Vec::new();
    for check in checks {
        let own: Vec<_> = levels
            .iter()
            .filter(|(level, _)| check.levels.contains(level))
            .collect();
        let mut without = Vec::new();
        for (level, why) in own {
            let possible = check.weakened_by.iter().filter(|w| w.possible(*level));
            let known = planned.len();
            planned.extend(possible.map(|w| (*w, *check, *level, why.as_deref())));
            if planned.len() == known {
                without.push(*level);
            }
        }
        if !without.is_empty() {
            uncovered.push(Uncovered::new(check, without));
        }
    }
    planned.sort_by_key(|(weakness, _, level, _)| (*weakness, *level));
    let progress = Progress::new(planned.len(), false);
    let mut rows = Vec::new();
    let mut complete = true;
    for (weakness, check, level, why) in planned {
        progress.begin(&format!("{level}: {}", check.attack));
        let begun = Instant::now();
        let came = match why {
            Some(why) => Err(Fault::Cannot(why.to_owned())),
            None => {
                bench.weakness.replace(Some(weakness));
                let came = tried(bench, check, level);
                bench.weakness.replace(None);
                came
            }
        };
        let (noticed, detail) = match came {
            Err(Fault::Stopped) => {
                complete = false;
                break;
            }
            Ok(Verdict::Broken(detail)) => (Noticed::Yes, detail),
            Ok(Verdict::Held(detail)) => (Noticed::No, detail),
            Err(fault) => (Noticed::Untested, fault.to_string()),
        };
        let word = match noticed {
            Noticed::Yes => "noticed",
            Noticed::No => "NOT NOTICED",
            Noticed::Untested => "no test",
        };
        progress.end(&format!("{level:<10} {word:<12} {} ({weakness})", check.id));
        rows.push(SelfRow {
            weakness,
            words: weakness.words(),
            id: check.id,
            attack: check.attack,
            level,
            noticed,
            detail: report::printable(&detail),
            seconds: begun.elapsed().as_secs_f64(),
        });
    }
    drop(progress);
    if options.json {
        let value = self_test_as_json(&rows, &uncovered, options.version, complete);
        print(&format!("{value:#}\n"));
    } else {
        print(&self_test_as_table(
            &rows,
            &uncovered,
            Paint(options.colour),
            complete,
        ));
    }
    let of = |noticed| rows.iter().filter(|row| row.noticed == noticed).count();
    Ok(if !complete {
        INTERRUPTED
    } else if of(Noticed::No) > 0 {
        BROKEN
    } else if of(Noticed::Yes) == 0 {
        CANNOT
    } else {
        HELD
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn checks_are_told_apart_and_say_what_they_must() {
        let checks = all();
        let ids: BTreeSet<&str> = checks.iter().map(|check| check.id).collect();
        assert_eq!(ids.len(), checks.len(), "an id is used twice");
        for check in checks {
            assert!(check.attack.chars().count() <= 44, "{}", check.attack);
            assert!(check.id.chars().count() <= 27, "{}", check.id);
            assert!(
                !check.levels.is_empty() && !check.source.is_empty(),
                "{}",
                check.id
            );
            assert!(
                check.means.ends_with('.') && check.todo.ends_with('.'),
                "{}",
                check.id
            );
        }
    }

    #[test]
    fn all_eighteen_scenarios_and_all_sixteen_findings_are_there() {
        let sources: String = all()
            .iter()
            .map(|check| format!("{};", check.source))
            .collect();
        for number in 1..=18 {
            assert!(
                sources.contains(&format!("SandboxEscapeBench {number};"))
                    || sources.contains(&format!("SandboxEscapeBench {number},")),
                "scenario {number}"
            );
        }
        for number in 1..=15 {
            assert!(
                sources.contains(&format!("finding {number};"))
                    || sources.contains(&format!("finding {number},")),
                "finding {number}"
            );
        }
        for words in ["issue 14 item 13", "issue 14 item 14"] {
            assert!(sources.contains(words), "{words}");
        }
    }

    /// A check that cannot fail shows nothing. Into an own kernel nobody reaches from outside.
    #[test]
    fn every_check_can_be_shown_broken_but_for_those_of_own_kernels() {
        for check in all() {
            let covered = |level: &Level| check.weakened_by.iter().any(|w| w.possible(*level));
            // Whether a machine is emulated is told, and no breach.
            let never = check.id == "escape-emulated";
            assert_eq!(check.weakened_by.is_empty(), never, "{}", check.id);
            let without: Vec<&Level> = check.levels.iter().filter(|l| !covered(l)).collect();
            assert!(
                never || without.iter().all(|level| level.own_kernel()),
                "{}: {without:?}",
                check.id
            );
        }
    }

    #[test]
    fn patterns_find_checks() {
        let checks = all();
        let count = |pattern| checks.iter().filter(|check| fits(pattern, check)).count();
        assert_eq!(count("*"), checks.len());
        assert!(count("escape-*") > 5 && count("escape") >= count("escape-*"));
        assert_eq!(count("*-nothing-*"), 0);
        assert_eq!(count("escape"), count("escape*"));
    }
}
