# The one that is looked for: a process, a file, sockets, shared memory, a lock and a watch, until it is ended.
import fcntl, threading
open("/tmp/" + ARGS["mark"], "w").write(ARGS["mark"])
name = socket.socket(socket.AF_UNIX)
name.bind("\0" + ARGS["mark"])
name.listen(8)
listener = socket.create_server(("0.0.0.0", ARGS["port"]))
def greet():
    while True:
        one, _ = listener.accept()
        one.sendall(b"neighbour " + ARGS["mark"].encode())
        one.close()
threading.Thread(target=greet, daemon=True).start()
LIBC.shmget(ctypes.c_int(ARGS["key"]), ctypes.c_size_t(4096), ctypes.c_int(0o1666))
locked = os.open("/dev/zero", os.O_RDWR)
try:
    fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    pass
watch = LIBC.inotify_init1(0o4000)
LIBC.inotify_add_watch(watch, b"/dev/zero", 0x30)
# Openings and closings in turn: the kernel tells equal ones in a row once.
# Its own opening of the node is seen: watching works.
os.close(os.open("/dev/zero", os.O_RDONLY))
time.sleep(0.05)
try:
    own = len(os.read(watch, 65536)) // 16
except OSError:
    own = 0
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    try:
        s.connect(("198.51.100.1", 9))
        address = s.getsockname()[0]
    except OSError:
        address = ""
FOUND.update(ready=1, own=own, address=address)
done()
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
end = time.monotonic() + ARGS["seconds"]
seen = 0
while time.monotonic() < end:
    try:
        seen += len(os.read(watch, 65536)) // 16
    except OSError:
        time.sleep(0.05)
    open("/tmp/seen", "w").write(str(seen))
sys.exit(0)
