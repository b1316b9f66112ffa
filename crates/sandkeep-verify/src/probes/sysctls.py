# Settings of the host's kernel that would start programs as root. Opened, never written.
control(os.geteuid() == 0, "the probe is not root")
roots = ["/proc"]
try:
    call(165, b"none", b"/mnt", b"proc", 0, ctypes.c_char_p(None))
    roots.append("/mnt")
except OSError as error:
    refused(f"a /proc of its own: {errno.errorcode.get(error.errno)}")
paths = [f"{root}/{name}" for root in roots for name in (
    "sys/kernel/core_pattern", "sys/kernel/modprobe", "sys/kernel/hotplug", "sys/vm/drop_caches", "sys/kernel/panic",
    "sys/fs/binfmt_misc/register", "sysrq-trigger", "sys/kernel/sysrq")] + ["/sys/kernel/uevent_helper", "/sys/power/state"]
for path in paths:
    if os.path.exists(path):
        attempt(path, lambda: os.close(os.open(path, os.O_WRONLY)))
if os.path.ismount("/mnt"):
    LIBC.umount2(b"/mnt", 2)
