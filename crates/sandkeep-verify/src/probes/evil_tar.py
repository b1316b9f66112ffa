# A tar that lies: whoever asks it for a directory gets members that lead out of the target.
control(os.geteuid() == 0, "the probe is not root")
with open("/tmp/evil.py", "w") as file:
    file.write(f"""#!/usr/bin/python3
import io, sys, tarfile
out = tarfile.open(fileobj=sys.stdout.buffer, mode='w|')
def add(name):
    info = tarfile.TarInfo(name); info.size = 5
    out.addfile(info, io.BytesIO(b'owned'))
add('../beside')
add({ARGS["beside"]!r})
link = tarfile.TarInfo('link'); link.type = tarfile.SYMTYPE; link.linkname = '..'; out.addfile(link)
add('link/beside')
out.close()
""")
import shutil
shutil.copy("/tmp/evil.py", "/usr/bin/tar")
os.chmod("/usr/bin/tar", 0o755)
refused("4 members that lead out")
