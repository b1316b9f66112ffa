# Silent connections to the service that every sandbox may reach.
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
kept = []
end = time.monotonic() + 20
for _ in range(ARGS["most"]):
    if time.monotonic() > end:
        break
    s = socket.socket()
    s.settimeout(3)
    try:
        s.connect(("169.254.169.254", 80))
        kept.append(s)
    except OSError as error:
        if len(REFUSED) < 3:
            refused(f"after {len(kept)}: {errno.errorcode.get(error.errno, type(error).__name__)}")
        if len(REFUSED) >= 3:
            break
FOUND.update(ready=1, got=len(kept))
done()
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
time.sleep(15)
sys.exit(0)
