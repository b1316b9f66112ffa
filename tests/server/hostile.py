"""A program for hostile sandboxes: it takes what is everybody's of the server.

Its first argument says for how many seconds, its second where to: `ADDRESS:PORT`. It opens all the
connections it can, says nothing on them, and tries what is refused again. For each word that
follows another process floods in another way: `refused` opens connections that no policy allows, `names`
asks the resolver for names that are not allowed. When it has begun there is a file at `FLOODING`.
"""

FLOODING = "/tmp/flooding"
PROGRAM = f"""
import os, resource, socket, sys, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
end = time.monotonic() + float(sys.argv[1])
address, port = sys.argv[2].rsplit(":", 1)

def silent():
    wanted, held = min(4090, most - 50), []
    while time.monotonic() < end:
        while len(held) < wanted:
            s = socket.socket()
            s.setblocking(False)
            s.connect_ex((address, int(port)))
            held.append(s)
        open("{FLOODING}", "w").close()
        time.sleep(0.5)
        for s in held[:]:
            try:
                if s.recv(1) == b"":
                    raise ConnectionResetError
            except BlockingIOError:
                continue
            except OSError:
                held.remove(s)
                s.close()

def refused():
    while time.monotonic() < end:
        with socket.socket() as s:
            s.settimeout(5)
            s.connect_ex(("203.0.113.9", 443))
        time.sleep(0.001)

def names():
    query = b"\\0\\1\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\4evil\\4test\\0\\0\\1\\0\\1"
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setblocking(False)
    while time.monotonic() < end:
        for _ in range(50):
            try:
                s.sendto(query, ("10.0.0.1", 53))
            except OSError:
                pass
        time.sleep(0.05)

for word in sys.argv[3:]:
    if os.fork() == 0:
        dict(refused=refused, names=names)[word]()
        os._exit(0)
silent()
"""


def begin(box, seconds: int, to: str, *ways: str) -> None:
    """Starts it in the background; it may take a while until it floods."""
    box.write("/tmp/flood.py", PROGRAM.encode())
    words = " ".join([str(seconds), to, *ways])
    assert box.root(f"setsid python3 /tmp/flood.py {words} > /tmp/flood.log 2>&1 < /dev/null &").ok


def has_begun(box) -> bool:
    return box.exec(["test", "-e", FLOODING]).ok
