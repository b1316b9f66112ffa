//! What CRIU says, in words for people.

/// Longer lines are cut.
const MOST: usize = 300;

/// Signs in CRIU's log of what it can not write, and what to call it.
const SIGNS: [(&str, &str); 17] = [
    ("io_uring", "a process uses io_uring"),
    ("mqueue", "a process has a POSIX message queue open"),
    (
        "Can't lookup mount",
        "a process holds something that is in no file system of the box, like a POSIX message queue",
    ),
    ("is traced by", "a process is being traced by a debugger"),
    ("is being traced", "a process is being traced by a debugger"),
    (
        "found while seizing",
        "a process is being traced, or is one whose end nobody has asked for",
    ),
    ("anon_inode:[userfaultfd]", "a process uses userfaultfd"),
    ("[landlock", "a process holds a Landlock ruleset"),
    ("seccomp notify", "a process holds a seccomp listener"),
    ("perf_event", "a process uses perf events"),
    ("in-flight", "a connection to the agent is under way"),
    ("Can't dump nested", "a process has namespaces of its own"),
    ("nested", "a process has namespaces of its own"),
    (
        "inotify",
        "a process watches files in a way that can not be written",
    ),
    (
        "link-remap",
        "a process has a file open that was deleted under this name but not under another",
    ),
    ("ghost", "a process holds a large deleted file open"),
    (
        "on procfs: Permission denied",
        "the box was on disk before, and this CRIU is not built to write such a box again",
    ),
];

/// Why a dump was refused.
pub fn obstacle(log: &str) -> String {
    let errors = errors(log);
    for line in &errors {
        if let Some((_, words)) = SIGNS.iter().find(|(sign, _)| line.contains(sign)) {
            return format!("{words} ({line})");
        }
    }
    match errors.first() {
        Some(line) => line.clone(),
        None => "CRIU gave no reason".to_owned(),
    }
}

/// Why a restore failed.
pub fn reason(log: &str) -> String {
    errors(log)
        .into_iter()
        .next()
        .unwrap_or_else(|| "CRIU gave no reason".to_owned())
}

/// Errors that CRIU goes on after: not every root may raise its limits.
const HARMLESS: [&str; 1] = ["RLIMIT_NOFILE"];

/// The texts of the error lines: `(00.123) Error (criu/x.c:1): text`.
fn errors(log: &str) -> Vec<String> {
    log.lines()
        .filter_map(|line| line.split_once("Error (")?.1.split_once("): "))
        .filter(|(_, text)| !HARMLESS.iter().any(|sign| text.contains(sign)))
        .map(|(_, text)| text.trim().chars().take(MOST).collect())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_obstacle_is_named_and_so_is_what_criu_said() {
        let log = "(00.00) Error (criu/rlimit.c:9): rlimit: Can't setup RLIMIT_NOFILE for self\n\
                   (00.01) Warn  (criu/x.c:1): a\n\
                   (00.02) Error (criu/files-ext.c:99): Can't dump file 5 of that type [20600] (unknown anon_inode:[io_uring])\n\
                   (00.03) Error (criu/cr-dump.c:2): Dumping FAILED.\n";
        let words = obstacle(log);
        assert!(
            words.starts_with("a process uses io_uring (Can't dump file 5"),
            "{words}"
        );
        assert_eq!(obstacle(""), "CRIU gave no reason");
        assert_eq!(reason("(0.1) Error (a:1): x: y\n"), "x: y");
    }
}
