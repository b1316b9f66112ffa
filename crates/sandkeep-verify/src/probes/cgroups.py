# A program that the host's kernel would start as root: release_agent of a cgroup tree.
control(os.geteuid() == 0, "the probe is not root")
places = ["/sys/fs/cgroup"]
for data in (b"memory", b"rdma", b"pids", b"cpu", b"freezer", b"devices"):
    try:
        call(165, b"none", b"/mnt", b"cgroup", 0, data)
        places.append("/mnt")
        break
    except OSError as error:
        refused(f"mounting the {data.decode()} tree: {errno.errorcode.get(error.errno)}")
for place in places:
    for path in files(place, limit=20_000):
        if os.path.basename(path) in ("release_agent", "cgroup.procs"):
            attempt(path, lambda: os.close(os.open(path, os.O_WRONLY)))
            break
if not REFUSED and not WORKED:
    refused("no cgroup tree is there")
LIBC.umount2(b"/mnt", 2)
