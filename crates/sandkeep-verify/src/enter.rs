//! How `--self-test` weakens a sandbox of the container level from outside.

use std::{
    ffi::{CStr, CString},
    fs, io,
    io::Read as _,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{ffi::OsStrExt as _, process::CommandExt as _},
    },
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    mount::{OpenTreeFlags, open_tree},
    process::{Pid, PidfdFlags, pidfd_open},
};

use crate::{
    fault::{Doing as _, Fault, Result},
    sandbox::{Ran, Sandbox},
    server::random,
    stop::Stop,
    weakness::Weakness,
};

const PATIENCE: Duration = Duration::from_secs(60);
const NAMESPACES: libc::c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP;

/// A process of a sandbox, as the host sees it.
#[derive(Debug)]
pub struct Anchor {
    handle: OwnedFd,
    /// The capabilities that programs in the sandbox can have.
    capabilities: u64,
}

impl Anchor {
    /// Starts a program in the sandbox and looks for it on the host.
    pub fn find(sandbox: &Sandbox, stop: &Stop) -> Result<Self> {
        let mark = format!("anchor-{}", random(12)?);
        let sleeper = format!("nohup sh -c 'while :; do sleep 600; done' {mark} >/dev/null 2>&1 &");
        sandbox.exec(&["sh", "-c", &sleeper], "root")?;
        let pid = stop.wait_for(
            Duration::from_secs(10),
            "finding a process of the sandbox",
            || Ok(process_with(&mark)),
        )?;
        let handle =
            pidfd_open(pid, PidfdFlags::empty()).doing("holding a process of the sandbox")?;
        let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()))
            .doing("reading about a process of the sandbox")?;
        let capabilities = status
            .lines()
            .find_map(|line| line.strip_prefix("CapBnd:"))
            .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
            .ok_or_else(|| Fault::cannot("the kernel tells no capabilities"))?;
        Ok(Self {
            handle,
            capabilities,
        })
    }

    /// Runs a program in the sandbox, without part of what surrounds programs there.
    pub fn run(&self, weakness: Weakness, words: &[String], user: &str) -> Result<Ran> {
        let [program, arguments @ ..] = words else {
            return Err(Fault::cannot("no program"));
        };
        let mut kinds = NAMESPACES;
        let mut kept = self.capabilities;
        match weakness {
            Weakness::AllCapabilities => kept = u64::MAX,
            Weakness::HostRoot => {
                kinds &= !libc::CLONE_NEWUSER;
                kept = u64::MAX;
            }
            Weakness::OpenMoat => kinds &= !libc::CLONE_NEWNET,
            _ => {}
        }
        let id: libc::uid_t = if user == "root" { 0 } else { 1000 };
        let handle = self.handle.as_raw_fd();
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
            .env("HOME", "/tmp")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // SAFETY: only calls that are allowed between fork and exec; the handle outlives it.
        unsafe {
            command.pre_exec(move || become_one(handle, kinds, kept, id));
        }
        finish(command)
    }
}

/// Between fork and exec: enters the sandbox's namespaces.
fn become_one(handle: i32, kinds: libc::c_int, kept: u64, id: libc::uid_t) -> io::Result<()> {
    // SAFETY: plain system calls on numbers that are ours.
    unsafe {
        check(libc::setns(handle, kinds))?;
        check(libc::chdir(c"/".as_ptr()))?;
        // The process namespace is that of children.
        let child = check(libc::fork())?;
        if child != 0 {
            let mut status = 0;
            while libc::waitpid(child, &raw mut status, 0) < 0 {}
            let code = if libc::WIFEXITED(status) {
                libc::WEXITSTATUS(status)
            } else {
                128 + libc::WTERMSIG(status)
            };
            libc::_exit(code);
        }
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
        for capability in 0..64_u64 {
            if kept >> capability & 1 == 0 {
                // Numbers this kernel does not know are refused; they are not held either.
                libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
            }
        }
        check(libc::setgroups(0, std::ptr::null()))?;
        check(libc::setresgid(id, id, id))?;
        check(libc::setresuid(id, id, id))?;
    }
    Ok(())
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn finish(mut command: Command) -> Result<Ran> {
    let mut child = command.spawn().doing("starting a probe from outside")?;
    let collect = |stream: Option<Box<dyn io::Read + Send>>| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(stream) = stream {
                // What was read until it broke is all there is.
                let _ = stream.take(8 << 20).read_to_end(&mut bytes);
            }
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let out = collect(child.stdout.take().map(|stream| Box::new(stream) as _));
    let err = collect(child.stderr.take().map(|stream| Box::new(stream) as _));
    let end = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait().doing("watching a probe")? {
            break status;
        }
        if Instant::now() > end {
            child.kill().doing("ending a probe")?;
            break child.wait().doing("ending a probe")?;
        }
        thread::sleep(Duration::from_millis(10));
    };
    let text = |thread: thread::JoinHandle<String>| thread.join().unwrap_or_default();
    Ok(Ran {
        code: status.code().map(i64::from),
        out: text(out),
        err: text(err),
    })
}

/// Mounts something of the host over a path in the sandbox.
pub fn mount_into(anchor: &Anchor, from: &Path, to: &CStr, recursive: bool) -> Result<()> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    let tree = open_tree(rustix::fs::CWD, from, flags)
        .doing(format_args!("taking {} as a mount", from.display()))?;
    let (handle, tree_fd) = (anchor.handle.as_raw_fd(), tree.as_raw_fd());
    let to: CString = to.to_owned();
    let mut command = Command::new("/bin/true");
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // SAFETY: only calls that are allowed between fork and exec; descriptors and text outlive it.
    unsafe {
        command.pre_exec(move || {
            check(libc::setns(handle, libc::CLONE_NEWNS))?;
            const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 4;
            let moved = libc::syscall(
                libc::SYS_move_mount,
                tree_fd,
                c"".as_ptr(),
                libc::AT_FDCWD,
                to.as_ptr(),
                MOVE_MOUNT_F_EMPTY_PATH,
            );
            if moved < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
    let ran = finish(command)?;
    if ran.code == Some(0) {
        return Ok(());
    }
    Err(Fault::Cannot(format!(
        "mounting into the sandbox failed: {}",
        ran.err.trim()
    )))
}

/// A process that has this word among its arguments.
pub fn process_with(word: &str) -> Option<Pid> {
    let mut found: Vec<i32> = Vec::new();
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let arguments = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if arguments
            .split(|&byte| byte == 0)
            .any(|argument| argument == word.as_bytes())
        {
            found.push(pid);
        }
    }
    // The oldest is the one itself; what it started is younger.
    found.into_iter().min().and_then(Pid::from_raw)
}

/// Descriptors of a process, as what they lead to.
pub fn descriptors(pid: i32) -> Vec<String> {
    fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .map(|path| String::from_utf8_lossy(path.as_os_str().as_bytes()).into_owned())
        .collect()
}
