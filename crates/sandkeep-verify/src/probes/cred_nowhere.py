# The value of the secret, wherever a program could find it. It is given backwards, so that the search does not find itself.
VALUE = ARGS["backwards"][::-1].encode()
got = tls_ask("good.test", "/need")
control(b"welcome" in got, f"the credential is not used: {got[:80]}")
DECOY = b"decoy-" + NONCE.encode()[::-1]
with open("/tmp/decoy-file", "wb") as file:
    file.write(b"x" * 5000 + DECOY)
found = []
def look(path, data):
    if DECOY in data:
        found.append(path)
    if VALUE in data:
        worked(f"it is in {path}")
count = 0
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try:
            look(f"/proc/{pid}/{name}", open(f"/proc/{pid}/{name}", "rb").read(1 << 20))
            count += 1
        except OSError:
            pass
if VALUE in os.environb.get(b"LEAKED", b""):
    worked("it is in the environment")
for path in files("/etc", "/run", "/home", "/root", "/tmp", "/var/log", "/var/tmp", "/sandkeep", "/opt", limit=40_000):
    try:
        if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) < 4 << 20:
            look(path, open(path, "rb").read())
            count += 1
    except OSError:
        pass
control("/tmp/decoy-file" in found, "a decoy is not found by the search")
refused(f"not in {count} files and environments")
