# The first process, by a user: whoever can steer it has what it has.
control(os.geteuid() != 0, "the probe is root")
VICTIM = 1
if ARGS["own"]:
    # A program of the user's own, which it may trace.
    VICTIM = os.fork()
    if VICTIM == 0:
        time.sleep(30)
        os._exit(0)
for name, number, *arguments in (("PTRACE_ATTACH", 101, 16, VICTIM, 0, 0), ("PTRACE_SEIZE", 101, 0x4206, VICTIM, 0, 0),
                                 ("kill", 62, VICTIM, 9)):
    forbidden(name, number, *arguments)
# gVisor shows everyone what programs were started with; memory it shows no one.
for name in ("mem",) if ARGS["own_kernel"] else ("mem", "environ", "maps"):
    attempt(f"/proc/1/{name}", lambda: open(f"/proc/{VICTIM}/{name}", "rb").read(1) and None)
