# Sockets of engines and of the host, by path and by name; accounts of an orchestrator.
import stat
own = socket.socket(socket.AF_UNIX)
own.bind("/tmp/verify-own.sock")
own.listen(1)
found = []
for path in files("/run", "/var", "/mnt", "/tmp", "/opt", "/srv", "/home", "/root", "/media", "/sandkeep"):
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            found.append(path)
    except OSError:
        pass
control("/tmp/verify-own.sock" in found, "a socket of its own is not found by the search")
os.unlink("/tmp/verify-own.sock")
FOUND["sockets"] = found[:20]
names = [path for path in found if path != "/tmp/verify-own.sock"]
names += ["/var/run/docker.sock", "/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/podman/podman.sock", "\0" + ARGS["mark"]]
for name in names:
    shown = name.replace("\0", "@")
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(5)
        try:
            s.connect(name)
            FOUND.setdefault("connected", []).append(shown)
        except OSError as error:
            refused(f"{shown}: {errno.errorcode.get(error.errno)}")
for path in ("/var/run/docker.sock", "/run/containerd/containerd.sock", "/var/run/secrets/kubernetes.io"):
    if os.path.exists(path):
        worked(f"{path} is there")
if any(name.startswith("KUBERNETES_") for name in os.environ):
    worked("variables of an orchestrator are there")
