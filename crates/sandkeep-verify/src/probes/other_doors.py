# The doors for 32-bit and x32 programs, which filters forget. Machine code, run in a child.
import mmap, platform, signal
control(platform.machine() == "x86_64", "these doors are those of x86-64")
def through(name, number, code):
    pid = os.fork()
    if pid == 0:
        room = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        room.write(code)
        address = ctypes.addressof(ctypes.c_char.from_buffer(room))
        result = ctypes.CFUNCTYPE(ctypes.c_long)(address)()
        result = result if result < 1 << 31 else result - (1 << 32)
        os._exit(0 if result >= 0 else min(-result, 200))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        worked(f"{name}: the call was made")
    else:
        refused(f"{name}: {signal.Signals(-code).name if code < 0 else errno.errorcode.get(code, code)}")
# getpid harms no one: number 20 by int 0x80; by syscall with the bit of x32.
through("32-bit", 20, b"\x53\xb8" + struct.pack("<I", 20) + b"\xcd\x80\x5b\xc3")
through("x32", 39, b"\xb8" + struct.pack("<I", 0x40000000 | 39) + b"\x0f\x05\xc3")
