//! Starting a process as a user of the box.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::Mode;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Gid, Pid, Uid};
use sandkeep_agent_api::process::{ProcessConfig, Pty};
use tokio::net::unix::pipe;

use super::pty::Terminal;
use crate::fence::Fence;
use crate::oom::ChildScore;
use crate::reap::{ExitReceiver, Reaper};
use crate::users::{self, User};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const DEFAULT_TERM: &str = "xterm-256color";

/// What to start and as whom.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    pub config: &'a ProcessConfig,
    pub user: &'a User,
    /// Environment of every process of the box.
    pub box_envs: &'a BTreeMap<String, String>,
    pub cwd: &'a Path,
    pub stdio: StdioKind,
    pub score: ChildScore,
    pub fence: Fence,
}

/// What the process reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StdioKind {
    Terminal(Pty),
    Pipes {
        stdin: bool,
    },
    /// Everything is the null device.
    Nothing,
}

/// A process that runs.
#[derive(Debug)]
pub(crate) struct Spawned {
    pub pid: Pid,
    pub exit: ExitReceiver,
    pub ends: Ends,
}

/// The agent's ends of what the process reads and writes.
#[derive(Debug)]
pub(crate) enum Ends {
    Terminal(Terminal),
    Pipes {
        stdin: Option<pipe::Sender>,
        stdout: pipe::Receiver,
        stderr: pipe::Receiver,
    },
    Nothing,
}

/// Starts a process in a session of its own. One with a terminal leads it; another does not, and
/// leads no group either: `setsid` would fork for a leader and end before its command.
pub(crate) fn spawn(reaper: &Reaper, launch: &Launch<'_>) -> io::Result<Spawned> {
    let mut command = Command::new(&launch.config.cmd);
    command
        .args(&launch.config.args)
        .env_clear()
        .envs(environment(launch));
    let ends = connect_stdio(&mut command, launch)?;
    let announced = prepare_child(&mut command, launch)?;
    let (pid, exit) = reaper.spawn(command, announced)?;
    launch.score.give_to(pid.as_raw_nonzero().get());
    Ok(Spawned { pid, exit, ends })
}

/// Later ones win: the agent's PATH, the user, the box, the request.
fn environment(launch: &Launch<'_>) -> BTreeMap<String, String> {
    let user = launch.user;
    let mut envs = BTreeMap::new();
    envs.insert(
        "PATH".into(),
        std::env::var("PATH").unwrap_or_else(|_| DEFAULT_PATH.into()),
    );
    envs.insert("HOME".into(), user.home.to_string_lossy().into_owned());
    envs.insert("USER".into(), user.name.clone());
    envs.insert("LOGNAME".into(), user.name.clone());
    if matches!(launch.stdio, StdioKind::Terminal(_)) {
        envs.insert("TERM".into(), DEFAULT_TERM.into());
    }
    for (name, value) in launch.box_envs.iter().chain(&launch.config.envs) {
        envs.insert(name.clone(), value.clone());
    }
    envs
}

fn connect_stdio(command: &mut Command, launch: &Launch<'_>) -> io::Result<Ends> {
    match launch.stdio {
        StdioKind::Nothing => {
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            Ok(Ends::Nothing)
        }
        StdioKind::Terminal(pty) => {
            let (terminal, slave) = Terminal::open(pty.size, launch.user)?;
            command
                .stdin(slave.try_clone()?)
                .stdout(slave.try_clone()?)
                .stderr(slave);
            Ok(Ends::Terminal(terminal))
        }
        StdioKind::Pipes { stdin } => {
            let stdin = if stdin {
                let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC)?;
                command.stdin(give_to(theirs, launch.user)?);
                Some(pipe::Sender::from_owned_fd(ours)?)
            } else {
                command.stdin(Stdio::null());
                None
            };
            let (stdout, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
            command.stdout(give_to(theirs, launch.user)?);
            let (stderr, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
            command.stderr(give_to(theirs, launch.user)?);
            Ok(Ends::Pipes {
                stdin,
                stdout: pipe::Receiver::from_owned_fd(stdout)?,
                stderr: pipe::Receiver::from_owned_fd(stderr)?,
            })
        }
    }
}

/// Without owning the pipe a user could not open its own `/dev/stdout`.
fn give_to(end: OwnedFd, user: &User) -> io::Result<OwnedFd> {
    rustix::fs::fchown(end.as_fd(), Some(Uid::from_raw(user.uid)), None)?;
    Ok(end)
}

/// Sets what the child does between fork and exec. Without a terminal it is a leader, which starts
/// the program and is gone; the number of the program is written to the file.
fn prepare_child(command: &mut Command, launch: &Launch<'_>) -> io::Result<Option<File>> {
    let groups = users::groups_of(launch.user).unwrap_or_else(|_| vec![launch.user.gid]);
    let groups: Vec<Gid> = groups.into_iter().map(Gid::from_raw).collect();
    let (uid, gid) = (
        Uid::from_raw(launch.user.uid),
        Gid::from_raw(launch.user.gid),
    );
    let cwd = CString::new(launch.cwd.as_os_str().as_bytes())?;
    let has_terminal = matches!(launch.stdio, StdioKind::Terminal(_));
    let (score, fence) = (launch.score, launch.fence);
    let (announced, announce) = if has_terminal {
        (None, None)
    } else {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        (Some(File::from(read)), Some(write))
    };
    let become_child = move || {
        reset_signals();
        rustix::process::setsid()?;
        match &announce {
            // The null descriptors are already replaced: 0 is the terminal.
            None => rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?,
            Some(announce) => leave_to_a_follower(announce.as_fd())?,
        }
        score.apply();
        keep_only_stdio();
        fence.apply()?;
        // The calls act on one thread, and after fork there is only one.
        rustix::thread::set_thread_groups(&groups)?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        rustix::process::chdir(cwd.as_c_str())?;
        rustix::process::umask(Mode::from_raw_mode(0o022));
        Ok(())
    };
    // SAFETY: between fork and exec another thread may have held any lock, so only
    // async-signal-safe calls are allowed. Everything in the closure is a plain system call on
    // memory prepared before the fork; it neither allocates nor takes a lock.
    unsafe { command.pre_exec(become_child) };
    Ok(announced)
}

/// Goes on as a child that leads nothing; the caller, who leads the session, writes its number and
/// ends. The agent inherits the child.
fn leave_to_a_follower(announce: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: a fork by system call, in a process of one thread that was forked itself: it takes no
    // lock, and no memory is shared. All arguments but the signal are null.
    let forked = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
    match forked {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(()),
        pid => {
            // Failing is noticed by who reads it.
            let _ = rustix::io::write(announce, &(pid as i32).to_ne_bytes());
            // SAFETY: ends this process at once and touches nothing of it.
            unsafe { libc::_exit(0) }
        }
    }
}

/// What the agent or the ward ignored must not stay ignored. By system call, because the C
/// library refuses to touch the two signals it keeps for itself.
fn reset_signals() {
    const LAST_SIGNAL: i32 = 64;
    const MASK_BYTES: usize = 8;
    // The kernel's own structure (handler, flags, restorer, mask): all zero means the default.
    let default = [0u64; 4];
    for signal in 1..=LAST_SIGNAL {
        // SAFETY: the kernel reads 32 bytes from `default`, which outlives the call, and writes
        // nothing. Signals that cannot be set are refused, which does no harm.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default.as_ptr(),
                std::ptr::null_mut::<u64>(),
                MASK_BYTES,
            );
        }
    }
}

/// All our descriptors close on exec anyway; this is for those the ward may have left open. The
/// pipe by which the standard library reports a failed exec stays usable until then.
fn keep_only_stdio() {
    // SAFETY: a system call with plain numbers; marking descriptors close-on-exec invalidates
    // none of them in this process.
    unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3u32,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        );
    }
}
