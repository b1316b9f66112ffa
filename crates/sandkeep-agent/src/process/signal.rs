//! How the end of a process is told.

use sandkeep_agent_api::process::EndEvent;

use crate::reap::Exit;

/// The end event of a process.
pub(super) fn end_event(exit: Exit) -> EndEvent {
    match exit {
        Exit::Code(code) => {
            let status = format!("exit status {code}");
            let error = (code != 0).then(|| status.clone());
            EndEvent {
                exit_code: code,
                exited: true,
                status,
                error,
            }
        }
        Exit::Signal(signal) => {
            let status = format!("signal: {}", describe(signal));
            EndEvent {
                exit_code: -1,
                exited: false,
                error: Some(status.clone()),
                status,
            }
        }
    }
}

/// The words clients know signals by.
fn describe(signal: i32) -> String {
    let words = match signal {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        other => return format!("signal {other}"),
    };
    words.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn success_has_no_error() {
        let end = end_event(Exit::Code(0));
        assert_eq!((end.exit_code, end.exited, end.error), (0, true, None));
        assert_eq!(end.status, "exit status 0");
    }

    #[test]
    fn failure_and_signals_say_so_twice() {
        let end = end_event(Exit::Code(3));
        assert_eq!(end.error.as_deref(), Some("exit status 3"));
        let end = end_event(Exit::Signal(libc::SIGKILL));
        assert_eq!((end.exit_code, end.exited), (-1, false));
        assert_eq!(end.error.as_deref(), Some("signal: killed"));
        assert_eq!(end_event(Exit::Signal(40)).status, "signal: signal 40");
    }
}
