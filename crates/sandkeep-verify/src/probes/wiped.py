# A page that must be empty in every copy of this process: generators of randomness keep their state in such.
import mmap
page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
if LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(4096), 18) != 0:
    control(False, "this kernel wipes no pages")
page[:16] = b"S" * 16
# In a child it is empty: what the kernel promises.
pid = os.fork()
if pid == 0:
    os._exit(0 if page[:16] == b"\0" * 16 else 1)
control(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the kernel does not wipe the page in a child")
FOUND["ready"] = 1
done()
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
for count in range(100_000):
    with open("/tmp/wiped.new", "w") as file:
        file.write(f"{count} {'secret' if page[:16] == b'S' * 16 else 'empty'}")
    os.rename("/tmp/wiped.new", "/tmp/wiped")
    time.sleep(0.1)
sys.exit(0)
