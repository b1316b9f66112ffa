# What /proc and /sys tell of the host, and devices that are not for sandboxes.
control(os.path.exists("/proc/self/status"), "there is no /proc")
for path in ("/proc/kcore", "/proc/kmsg", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/proc/latency_stats",
             "/proc/kallsyms", "/proc/vmallocinfo", "/proc/slabinfo", "/sys/firmware/dmi/tables/DMI",
             "/sys/kernel/debug/sched", "/sys/kernel/tracing/trace"):
    try:
        with open(path, "rb") as file:
            data = file.read(64).strip(b"\0 \n")
        if path == "/proc/kallsyms" and data.startswith(b"0000000000000000"):
            data = b""
        if data:
            worked(f"{path} is readable")
        else:
            refused(f"{path}: empty")
    except OSError as error:
        refused(f"{path}: {errno.errorcode.get(error.errno)}")
