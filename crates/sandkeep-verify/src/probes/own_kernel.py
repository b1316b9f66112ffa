# As root of its own kernel: for real, because only what is felt outside counts.
def put(path, text):
    try:
        with open(path, "w") as file:
            file.write(text)
        FOUND.setdefault("written", []).append(path)
    except OSError as error:
        refused(f"{path}: {errno.errorcode.get(error.errno)}")
put("/proc/sys/kernel/core_pattern", "|/bin/touch /tmp/" + NONCE)
put("/proc/sys/kernel/modprobe", "/tmp/" + NONCE)
put("/proc/sys/net/ipv4/ip_forward", "1")
put("/proc/sys/kernel/hostname", "owned-" + NONCE[:8])
for name, number, *arguments in (("bpf", 321, 0, 0, 0), ("init_module", 175, 0, 0, b""), ("open_by_handle_at", 304, -100, 0, 0),
                                 ("kexec_load", 246, 0, 1 << 20, 0, 0)):
    try:
        call(number, *arguments)
    except OSError as error:
        refused(f"{name}: {errno.errorcode.get(error.errno)}")
os.makedirs("/tmp/v1", exist_ok=True)
LIBC.mount(b"none", b"/tmp/v1", b"cgroup", 0, b"memory")
try:
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)
    raw.bind((ARGS["device"], 0))
    raw.send(b"\xff" * 14 + b"x" * 1400)
    FOUND.setdefault("written", []).append("a raw packet")
except OSError as error:
    refused(f"raw packet: {errno.errorcode.get(error.errno)}")
