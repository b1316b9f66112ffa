# Processor time, by two busy programs, for two seconds.
begun = time.monotonic()
pids = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        end = time.monotonic() + ARGS["seconds"]
        while time.monotonic() < end:
            pass
        os._exit(0)
    pids.append(pid)
for pid in pids:
    os.waitpid(pid, 0)
times = os.times()
FOUND["used"] = times.children_user + times.children_system
FOUND["wall"] = time.monotonic() - begun
