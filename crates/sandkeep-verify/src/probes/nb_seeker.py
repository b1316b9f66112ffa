# Looks for what a neighbour has.
import fcntl
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError:
        continue
    if ARGS["mark"].encode() in words and NONCE.encode() not in words:
        worked(f"process {pid} of the neighbour is seen")
refused("no process")
if os.path.exists("/tmp/" + ARGS["mark"]):
    worked("a file of the neighbour is there")
refused("no file")
with socket.socket(socket.AF_UNIX) as s:
    try:
        s.connect("\0" + ARGS["mark"])
        worked("an abstract socket of the neighbour is reached")
    except OSError as error:
        refused(f"abstract socket: {errno.errorcode.get(error.errno)}")
if LIBC.shmget(ctypes.c_int(ARGS["key"]), ctypes.c_size_t(4096), ctypes.c_int(0)) >= 0:
    worked("shared memory of the neighbour is there")
refused("no shared memory")
for to in ARGS["addresses"]:
    got = reached(to, ARGS["port"], limit=3)
    if isinstance(got, bytes) and ARGS["mark"].encode() in got:
        worked(f"a port of the neighbour is reached at {to}")
    else:
        refused(f"{to}: {got if isinstance(got, str) else 'closed'}")
