# The calls of the mount family, each the attack itself and not the tool around it.
control(os.geteuid() == 0, "the probe is not root")
os.makedirs("/tmp/m", exist_ok=True)
AT = -100
tried = {
    "mount tmpfs": (165, b"none", b"/tmp/m", b"tmpfs", 0, None),
    "mount proc": (165, b"none", b"/tmp/m", b"proc", 0, None),
    "mount cgroup2": (165, b"none", b"/tmp/m", b"cgroup2", 0, None),
    "mount cgroup": (165, b"none", b"/tmp/m", b"cgroup", 0, b"memory"),
    "bind /": (165, b"/", b"/tmp/m", None, 4096, None),
    "remount /proc/sys": (165, b"none", b"/proc/sys", None, 32 | 4096, None),
    "fsopen": (430, b"tmpfs", 0),
    "open_tree": (428, AT, b"/", 1),
    "mount_setattr": (442, AT, b"/", 0, (ctypes.c_uint64 * 4)(0, 0, 0, 0), 32),
}
def with_null(arguments):
    return [ctypes.c_char_p(None) if a is None else a for a in arguments]
for name, (number, *arguments) in tried.items():
    attempt(name, lambda: call(number, *with_null(arguments)) and None)
if ARGS["own_kernel"]:
    for disk in sorted(os.listdir("/sys/class/block") if os.path.isdir("/sys/class/block") else []):
        for kind in (b"ext4", b"btrfs", b"xfs"):
            attempt(f"mount {disk}", lambda: call(165, f"/dev/{disk}".encode(), b"/tmp/m", kind, 1, ctypes.c_char_p(None)) and None)
    for path in files("/tmp/m", "/mnt"):
        if os.path.basename(path) == ARGS["mark"]:
            FOUND["canary"] = path
    FOUND.setdefault("canary", "")
for _ in range(12):
    LIBC.umount2(b"/tmp/m", 2)
