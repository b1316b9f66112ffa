# The program of the first process, through /proc: a runtime that can be written is root's next start.
control(os.geteuid() == 0, "the probe is not root")
try:
    control(len(os.readlink("/proc/1/exe")) > 1, "the first process has no program")
except OSError as error:
    refused(f"reading the link: {errno.errorcode.get(error.errno)}")
for name, flags in (("write", os.O_WRONLY), ("read and write", os.O_RDWR), ("append", os.O_WRONLY | os.O_APPEND)):
    attempt(f"open /proc/1/exe to {name}", lambda: os.close(os.open("/proc/1/exe", flags)))
