# Code for the kernel. What is given is no module: to get past the checks is enough.
control(os.geteuid() == 0, "the probe is not root")
forbidden("init_module", 175, ctypes.create_string_buffer(64), 64, b"")
forbidden("finit_module", 313, os.open("/etc/hostname", os.O_RDONLY), b"", 0)
forbidden("delete_module", 176, b"no_such_module_" + NONCE.encode(), 0x800)
forbidden("kexec_load", 246, 0, 1 << 20, 0, 0)
