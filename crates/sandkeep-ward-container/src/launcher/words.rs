//! What CRIU says, in words for people.

/// Longer lines are cut.
const MOST: usize = 300;
/// Of what another program said.
const LINES: usize = 3;

/// Signs in CRIU's log of what it can not write, and what to call it.
const SIGNS: [(&str, &str); 22] = [
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
    ("n-flight", "a connection waits for a program to accept it"),
    (
        "File name too long",
        "a process holds something open whose path has more than 4095 characters",
    ),
    ("Can't dump nested", "a process has namespaces of its own"),
    ("nested", "a process has namespaces of its own"),
    (
        "inotify",
        "a process watches files in a way that can not be written",
    ),
    (
        "be bound to its name again",
        "a process has a socket whose name cannot be given to it again",
    ),
    ("ghost device", "a process holds a deleted device open"),
    ("(chr ", "a process holds a device open"),
    ("(blk ", "a process holds a device open"),
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

/// What stands in the way although CRIU says that it is done: it has written images that nobody can
/// read after such errors.
pub fn unheard(log: &str) -> Option<String> {
    let dumping: String = log
        .lines()
        .filter(|line| !ASKING_THE_KERNEL.iter().any(|sign| line.contains(sign)))
        .flat_map(|line| [line, "\n"])
        .collect();
    (!errors(&dumping).is_empty()).then(|| obstacle(&dumping))
}

/// Where CRIU finds out what the kernel can do: that it can not is no error of a dump.
const ASKING_THE_KERNEL: [&str; 3] = ["(criu/kerndat.c:", "(criu/cr-check.c:", "(criu/tun.c:"];

/// Why a restore failed.
pub fn reason(log: &str) -> String {
    match (errors(log).into_iter().next(), of_a_program(log)) {
        (Some(error), Some(said)) => format!("{error} ({said})"),
        (Some(error), None) => error,
        (None, _) => "CRIU gave no reason".to_owned(),
    }
}

/// What a program said that CRIU ran and that failed: `tar`, or the script that asks. CRIU itself
/// tells only how it ended, and every line of its own begins with the time, or names a file of it.
fn of_a_program(log: &str) -> Option<String> {
    const ENDED: [&str; 2] = ["exited, status=", "killed by signal"];
    let lines: Vec<&str> = log.lines().collect();
    let at = lines
        .iter()
        .position(|line| line.contains("Error (") && ENDED.iter().any(|end| line.contains(end)))?;
    let mut said: Vec<&str> = lines[..at]
        .iter()
        .rev()
        .take_while(|line| !line.starts_with('(') && !line.contains(" (criu/"))
        .take(LINES)
        .copied()
        .collect();
    said.reverse();
    let said = of_the_sandbox(&said.join("; "));
    (!said.is_empty()).then(|| said.chars().take(MOST).collect())
}

/// Errors that CRIU goes on after: not every root may raise its limits, and its root has no `tun`.
const HARMLESS: [&str; 2] = ["RLIMIT_NOFILE", "tun: Unable to create tun"];

/// The texts of the error lines: `(00.123) Error (criu/x.c:1): text`.
fn errors(log: &str) -> Vec<String> {
    log.lines()
        .filter_map(|line| line.split_once("Error (")?.1.split_once("): "))
        .filter(|(_, text)| !HARMLESS.iter().any(|sign| text.contains(sign)))
        .map(|(_, text)| of_the_sandbox(text.trim()).chars().take(MOST).collect())
        .collect()
}

/// Where CRIU puts the mounts together: `/tmp/.criu.mntns.x5Yz1A/mnt-0000000012`.
const ASSEMBLED: &str = "/tmp/.criu.mntns.";
/// Other places in its root; what is below them is the sandbox's.
const PLACES: [&str; 2] = ["/run/root", "/run/image"];

/// The text with paths as the sandbox has them: nothing of the host's, or of CRIU's root.
fn of_the_sandbox(text: &str) -> String {
    let mut made = String::new();
    let mut rest = text;
    while let Some((before, place)) = rest.split_once(ASSEMBLED) {
        made.push_str(before);
        // Its own name, and that of the mount.
        let mut names = place.splitn(3, '/');
        let (_, mount) = (names.next(), names.next());
        rest = match names.next() {
            Some(below) => {
                made.push('/');
                below
            }
            None => mount.or(Some(place)).map_or("", |last| {
                last.find(|end: char| !end.is_ascii_alphanumeric() && end != '-')
                    .map_or("", |end| &last[end..])
            }),
        };
    }
    made.push_str(rest);
    PLACES
        .iter()
        .fold(made, |text, place| text.replace(place, ""))
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
        let words =
            obstacle("(0.1) Error (a:1): unix: Socket /tmp/s can't be bound to its name again\n");
        assert!(
            words.starts_with("a process has a socket") && words.contains("/tmp/s"),
            "{words}"
        );
        assert_eq!(reason("(0.1) Error (a:1): x: y\n"), "x: y");
    }

    #[test]
    fn criu_said_it_was_done_after_an_error() {
        let log = "(00.00) Error (criu/util.c:9): rlimit: Can't setup RLIMIT_NOFILE for self\n\
                   (00.01) Error (criu/kerndat.c:1): Can't probe it\n\
                   (00.02) Warn  (criu/x.c:1): a\n";
        assert_eq!(unheard(log), None);
        let log = format!("{log}(00.03) Error (criu/cr-dump.c:3): The program x can't be run\n");
        assert_eq!(unheard(&log).as_deref(), Some("The program x can't be run"));
    }

    #[test]
    fn a_program_that_criu_ran_is_quoted() {
        let log = "(00.01)      1: mnt: Mounting tmpfs\n\
                   tar: /tmp/.criu.mntns.kLm12a/mnt-0000000085/dev/shm: Cannot open: No space left on device\n\
                   tar: Error is not recoverable: exiting now\n\
                   (00.02)      1: Error (criu/util.c:657): exited, status=2\n\
                   (00.03)      1: Error (criu/filesystems.c:462): Can't restore tmpfs content\n";
        assert_eq!(
            reason(log),
            "exited, status=2 (tar: /dev/shm: Cannot open: No space left on device; \
             tar: Error is not recoverable: exiting now)"
        );
        let own = "     1: Error (criu/util.c:15): rlimit: no\n     6: Error (criu/pidfd.c:8): Could not open it\n\
                   Error (criu/util.c:657): 9 killed by signal 9: Killed\n";
        assert_eq!(reason(own), "rlimit: no");
        let silent = "(00.01) x\n(00.02) Error (criu/util.c:657): exited, status=2\n";
        assert_eq!(reason(silent), "exited, status=2");
    }

    #[test]
    fn paths_of_the_host_were_in_answers() {
        for (said, told) in [
            (
                "Can't create ghost regfile: /tmp/.criu.mntns.kLm12a/mnt-0000000085/tmp/g: x",
                "Can't create ghost regfile: /tmp/g: x",
            ),
            (
                "Can't open /tmp/.criu.mntns.kLm12a/12-000: gone",
                "Can't open : gone",
            ),
            (
                "Can't open /tmp/.criu.mntns.kLm12a: gone",
                "Can't open : gone",
            ),
            ("/tmp/.criu.mntns.a/b/c /tmp/.criu.mntns.a/b/d", "/c /d"),
            ("Can't open /run/root/etc/x", "Can't open /etc/x"),
            ("Can't open /tmp/x", "Can't open /tmp/x"),
        ] {
            assert_eq!(of_the_sandbox(said), told);
        }
    }
}
