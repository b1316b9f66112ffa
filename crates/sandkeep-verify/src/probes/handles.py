# Files by handles, past every path.
control(os.geteuid() == 0, "the probe is not root")
handle = (ctypes.c_uint8 * 136)()
ctypes.cast(handle, ctypes.POINTER(ctypes.c_uint32))[0] = 128
mount = ctypes.c_int(0)
root = os.open("/", os.O_RDONLY)
try:
    call(303, -100, b"/", handle, ctypes.byref(mount), 0)
except OSError:
    # Handles may be made up; 8 bytes of the kind that file systems on disks use.
    ctypes.cast(handle, ctypes.POINTER(ctypes.c_uint32))[0] = 8
    ctypes.cast(handle, ctypes.POINTER(ctypes.c_uint32))[1] = 1
forbidden("open_by_handle_at", 304, root, handle, 0)
