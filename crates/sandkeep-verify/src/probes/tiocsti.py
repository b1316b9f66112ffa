# Keys pushed into the terminal of whoever watches.
import fcntl, pty
pid, fd = pty.fork()
if pid == 0:
    try:
        fcntl.ioctl(0, 0x5412, b"x")
        os._exit(0)
    except OSError as error:
        os._exit(error.errno)
try:
    while os.read(fd, 100):
        pass
except OSError:
    pass
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
if code == 0:
    worked("a key was pushed")
else:
    refused(f"TIOCSTI: {errno.errorcode.get(code, code)}")
