# A device node with the numbers of a disk of the host, and what can be read through it.
import stat
control(os.geteuid() == 0, "the probe is not root")
# Whoever may mount has a place where nodes count.
attempt("a file system for nodes", lambda: call(165, b"none", b"/mnt", b"tmpfs", 0, ctypes.c_char_p(None)) and None)
own = bool(WORKED)
WORKED.clear()
try:
    os.mknod("/mnt/pipe", stat.S_IFIFO | 0o600)
except OSError as error:
    control(False, f"not even a pipe can be made: {error}")
for place in ("/mnt/disk", "/tmp/verify-disk", "/dev/verify-disk", "/root/verify-disk", "/run/verify-disk"):
    def read():
        try:
            os.mknod(place, stat.S_IFBLK | 0o600, os.makedev(ARGS["major"], ARGS["minor"]))
            with open(place, "rb") as disk:
                data = disk.read(4096)
        finally:
            if os.path.lexists(place):
                os.unlink(place)
        if ARGS["mark"].encode() in data:
            return "read the host's disk"
        raise OSError(errno.ENXIO, "another disk")
    attempt(place, read)
for node in ("/dev/mem", "/dev/kmem", "/dev/port", "/dev/kvm", "/dev/loop-control", "/dev/fuse"):
    if os.path.exists(node) and not ARGS["own_kernel"]:
        attempt(node, lambda: os.close(os.open(node, os.O_RDONLY)))
os.unlink("/mnt/pipe")
if own:
    LIBC.umount2(b"/mnt", 2)
