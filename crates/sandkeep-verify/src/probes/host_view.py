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
