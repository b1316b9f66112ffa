# Device nodes that others use, too: a lock on one is felt, and each opening is seen.
import fcntl
node = os.open("/dev/zero", os.O_RDWR)
try:
    fcntl.flock(node, fcntl.LOCK_EX | fcntl.LOCK_NB)
    refused("the lock is free")
except BlockingIOError:
    worked("a lock that a neighbour holds on /dev/zero is felt")
except OSError as error:
    refused(f"no locks on device nodes: {errno.errorcode.get(error.errno)}")
for _ in range(200):
    os.close(os.open("/dev/zero", os.O_RDONLY))
FOUND["opened"] = 200
