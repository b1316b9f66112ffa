# A file of the host, by its name, wherever it may be mounted.
name = "own-" + NONCE
open("/tmp/" + name, "w").close()
seen = 0
own = False
for path in files("/"):
    seen += 1
    base = os.path.basename(path)
    if base == ARGS["mark"]:
        worked(f"{path} is a file of the host")
    own = own or base == name
os.unlink("/tmp/" + name)
control(own, "a file of its own is not found by the search")
refused(f"not among {seen} files")
