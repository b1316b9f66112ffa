# What tells of the host and of who else is on it.
control(os.path.exists("/proc/self/status"), "there is no /proc")
def read(path):
    try:
        return open(path).read()
    except OSError:
        return ""
FOUND["boot_id"] = read("/proc/sys/kernel/random/boot_id").strip()
FOUND["loadavg"] = read("/proc/loadavg").strip()
FOUND["mountinfo"] = read("/proc/self/mountinfo")[:20000]
FOUND["locks"] = len(read("/proc/locks").splitlines())
FOUND["disks"] = sum(1 for line in read("/proc/diskstats").splitlines() if any(int(n) for n in line.split()[3:8]))
FOUND["pressure"] = read("/proc/pressure/cpu")[:200]
# How large the file system of each mount is. The root is left out: docs/threats.md says what it tells.
sizes = []
for line in FOUND["mountinfo"].splitlines():
    point = line.split()[4]
    try:
        found = os.statvfs(point)
    except OSError:
        continue
    if point != "/" and found.f_blocks:
        sizes.append(f"{found.f_blocks * found.f_frsize} bytes, {found.f_files} inodes: {point}")
control(sizes, "no mount tells its size")
FOUND["sizes"] = sizes
