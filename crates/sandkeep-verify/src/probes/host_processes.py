# A process of the host, by a word in its arguments.
own = False
count = 0
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError:
        continue
    count += 1
    own = own or NONCE.encode() in words
    if ARGS["mark"].encode() in words.split(b"\0"):
        worked(f"process {pid} of the host is seen")
# With another /proc its own processes are not where they should be; the mark is then enough.
control(own or bool(WORKED), "its own process is not found by the search")
refused(f"not among {count} processes")
