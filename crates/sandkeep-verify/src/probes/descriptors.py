# What was open when the first process was started: descriptors that lead to the host.
own = open("/etc/hostname")
found = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        continue
    for number in numbers:
        try:
            found.append((pid, os.readlink(f"/proc/{pid}/fd/{number}")))
        except OSError:
            pass
control(any(link == "/etc/hostname" for _, link in found), "a descriptor of its own is not found")
for pid, link in found:
    if link == ARGS["stray"] or link.startswith(ARGS["state"]):
        worked(f"process {pid} has {link}")
refused(f"none of {len(found)} descriptors")
