//! Other processes: the host's, other boxes', the agent.

use crate::attack;
use std::process::Command;

attack!(only_own_processes_are_seen, target, {
    let pids = target.works("ls /proc | grep -c '^[0-9]'").await;
    let count: u32 = pids.trim().parse().unwrap();
    assert!(count < 10, "{count} processes in a fresh box");
    let mut host = Command::new("sleep").arg("600").spawn().unwrap();
    let output = target
        .run(&format!(
            "kill -9 {0}; kill -9 {0} 2>&1; grep -l sleep /proc/[0-9]*/comm",
            host.id()
        ))
        .await;
    let untouched = host.try_wait().unwrap().is_none();
    host.kill().unwrap();
    host.wait().unwrap();
    assert!(untouched, "a process of the host was killed");
    assert_eq!(output.stdout.matches("comm").count(), 0, "{output:?}");
});

attack!(pid_1_can_not_be_looked_into, target, {
    let answers = target
        .python(&format!(
            "
iov = struct.pack('PN', ctypes.addressof(buffer), 8)
attach, seize = 16, 0x4206
print(call({ptrace}, attach, 1, 0, 0))
print(call({ptrace}, seize, 1, 0, 0))
print(call({readv}, 1, iov, 1, struct.pack('PN', 0x400000, 8), 1, 0))
print(call({getfd}, os.pidfd_open(1), 3, 0))
try: open('/proc/1/mem', 'rb'); print('opened')
except OSError as error: print(errno.errorcode[error.errno])",
            ptrace = libc::SYS_ptrace,
            readv = libc::SYS_process_vm_readv,
            getfd = libc::SYS_pidfd_getfd,
        ))
        .await;
    assert_eq!(answers, "EPERM\nEPERM\nEPERM\nEPERM\nEACCES\n");
    // From inside it can not be killed either.
    target.works("kill -9 1; kill -STOP 1; true").await;
    target.works("true").await;
});

attack!(own_children_can_be_traced, target, {
    let answers = target
        .python(&format!(
            "
child = os.fork()
if child == 0:
    import time; time.sleep(60)
print(call({}, 0x4206, child, 0, 0))
os.kill(child, 9)
os.waitpid(child, 0)",
            libc::SYS_ptrace
        ))
        .await;
    assert_eq!(answers, "ok\n");
});

attack!(the_host_name_is_its_own, target, {
    let id = target.stage.live.id.to_string();
    assert_eq!(target.works("hostname").await.trim(), id);
    assert_ne!(rustix::system::uname().nodename().to_str().unwrap(), id);
    target.fails("hostname evil").await;
});

attack!(shared_memory_of_the_host_is_not_there, target, {
    let made = Command::new("ipcmk").args(["-M", "4096"]).output().unwrap();
    let text = String::from_utf8_lossy(&made.stdout).into_owned();
    let id = text
        .rsplit(' ')
        .next()
        .unwrap_or_default()
        .trim()
        .to_owned();
    let seen = target.works("cat /proc/sysvipc/shm | wc -l").await;
    Command::new("ipcrm").args(["-m", &id]).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    assert_eq!(seen.trim(), "1", "only the heading");
});

// With a limit of 0 the kernel would still start a `|program` of the host.
attack!(a_crash_starts_nothing_on_the_host, target, {
    let limit = "grep 'Max core' /proc/self/limits | tr -s ' ' | cut -d' ' -f5,6";
    assert_eq!(target.works(limit).await, "1 1\n");
    assert_eq!(
        target.works(&format!("ulimit -c 0; {limit}")).await,
        "1 1\n"
    );
    let set = target
        .python(
            "import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print(resource.getrlimit(resource.RLIMIT_CORE))",
        )
        .await;
    assert_eq!(set, "(1, 1)\n");
    target
        .works("cd /tmp; sh -c 'kill -SEGV $$'; ls | grep -c core; true")
        .await;
    assert_eq!(target.works("find /tmp -name 'core*' | wc -l").await, "0\n");
});
