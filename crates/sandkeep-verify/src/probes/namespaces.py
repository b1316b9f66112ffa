# Namespaces of its own would give every capability over a new part of the kernel.
for name, flag in (("user", 0x10000000), ("mount", 0x20000), ("net", 0x40000000), ("pid", 0x20000000), ("ipc", 0x8000000),
                   ("uts", 0x4000000), ("cgroup", 0x2000000), ("time", 0x80)):
    pid = os.fork()
    if pid == 0:
        try:
            call(272, flag)
            os._exit(0)
        except OSError as error:
            os._exit(100 if error.errno in (errno.EPERM, errno.ENOSYS, errno.EACCES) else 101)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        worked(f"unshare a {name} namespace")
    elif code == 101:
        refused(f"unshare {name}: not known")
    else:
        refused(f"unshare {name}")
for kind in ("mnt", "net", "user"):
    try:
        call(308, os.open(f"/proc/self/ns/{kind}", os.O_RDONLY), 0)
        worked(f"setns {kind}")
    except OSError as error:
        refused(f"setns {kind}: {errno.errorcode.get(error.errno)}")
