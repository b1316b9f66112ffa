# Deleted files that are still open, where a link now leads to a directory of the host.
place, target = "/tmp/g-" + NONCE, ARGS["target"]
os.mkdir(place)
link = place + "/L"
os.symlink(target, link)
os.open(link, os.O_PATH | os.O_NOFOLLOW)
os.unlink(link)
os.mkdir(link + ".cr.1.ghost")
kept = open(link + ".cr.1.ghost/OWNED-by-sandbox", "w")
kept.write(NONCE)
kept.flush()
os.unlink(kept.name)
os.rmdir(link + ".cr.1.ghost")
# The simple form, too: a deleted file below a directory that became a link.
os.mkdir(place + "/d")
simple = open(place + "/d/OWNED-simple", "w")
simple.write(NONCE)
simple.flush()
os.unlink(simple.name)
os.rmdir(place + "/d")
os.symlink(target, place + "/d")
FOUND["ready"] = 1
done()
sys.stdout.flush()
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
time.sleep(600)
sys.exit(0)
