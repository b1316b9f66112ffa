# The disk, to a bound, in every place that can be written.
data = os.urandom(1 << 20)
written, names = 0, []
space = os.statvfs('/')
FOUND['free'] = (space.f_bavail * space.f_frsize) >> 20
for place in ("/tmp", "/home", "/root", "/var/tmp", "/var/log", "/opt", "/usr/local"):
    # What lies in memory is another limit.
    kind = [line.split()[2] for line in open("/proc/mounts") if line.split()[1] == place]
    if kind and kind[-1] == "tmpfs":
        continue
    name = f"{place}/verify-fill"
    try:
        with open(name, "wb") as file:
            names.append(name)
            while written < ARGS["most"]:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                written += 1
    except OSError as error:
        refused(f"{place} after {written} MiB: {errno.errorcode.get(error.errno)}")
FOUND["got"] = sum(os.path.getsize(name) for name in names if os.path.exists(name)) >> 20
for name in names:
    try:
        os.unlink(name)
    except OSError:
        os.truncate(name, 0)
control(written >= 1, "not even one MiB could be written")
