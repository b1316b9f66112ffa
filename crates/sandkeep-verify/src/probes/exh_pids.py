# As many processes as it gets, to a bound; all end at once.
pids = []
try:
    while len(pids) < ARGS["most"]:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        pids.append(pid)
except OSError as error:
    refused(f"after {len(pids)}: {errno.errorcode.get(error.errno)}")
FOUND["got"] = len(pids)
for pid in pids:
    os.kill(pid, 9)
for pid in pids:
    os.waitpid(pid, 0)
