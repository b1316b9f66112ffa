# Programs for the kernel's verifier, and a map as the least of it.
attr = (ctypes.c_uint32 * 32)(2, 4, 4, 1)
forbidden("BPF_MAP_CREATE", 321, 0, attr, 128)
forbidden("BPF_PROG_LOAD", 321, 5, (ctypes.c_uint32 * 32)(), 128)
forbidden("perf_event_open", 298, (ctypes.c_uint32 * 32)(), -1, 0, -1, 0)
