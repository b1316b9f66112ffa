# The first process, by a user: whoever can steer it has what it has.
control(os.geteuid() != 0, "the probe is root")
for name, number, *arguments in (("PTRACE_ATTACH", 101, 16, 1, 0, 0), ("PTRACE_SEIZE", 101, 0x4206, 1, 0, 0),
                                 ("kill", 62, 1, 9)):
    forbidden(name, number, *arguments)
# gVisor shows everyone what programs were started with; memory it shows no one.
for path in ("/proc/1/mem",) if ARGS["own_kernel"] else ("/proc/1/mem", "/proc/1/environ", "/proc/1/maps"):
    attempt(path, lambda: open(path, "rb").read(1) and None)
