import pytest
from e2b import FilesystemEventType, InvalidArgumentException, NotFoundException
from flavour import wait_for


class Watch:
    """A watch on either side of the SDK: the blocking one is polled, the asyncio one streams."""

    def __init__(self, box, sdk, path, **options):
        self.events = []
        self.polled = not sdk.is_async
        if sdk.is_async:
            self.handle = box.files.watch_dir(path, on_event=self.events.append, **options)
        else:
            self.handle = box.files.watch_dir(path, **options)

    def seen(self):
        if self.polled:
            self.events += self.handle.get_new_events()
        return [(event.type, event.name) for event in self.events]

    def expect(self, kind, name):
        wait_for(lambda: (kind, name) in self.seen(), f"{kind} {name}, seen {self.events}")


@pytest.fixture
def folder(box):
    box.files.make_dir("/tmp/watched")
    return "/tmp/watched"


def test_a_new_file(box, sdk, folder):
    watch = Watch(box, sdk, folder)
    box.files.write(f"{folder}/new.txt", "x")
    watch.expect(FilesystemEventType.WRITE, "new.txt")
    kinds = [kind for kind, _ in watch.seen()]
    assert kinds[0] == FilesystemEventType.CREATE
    watch.handle.stop()


def test_every_kind(box, sdk, folder):
    box.files.write(f"{folder}/a", "1")
    watch = Watch(box, sdk, folder)
    box.commands.run(f"echo 2 > {folder}/a; chmod 600 {folder}/a; mv {folder}/a {folder}/b; rm {folder}/b")
    watch.expect(FilesystemEventType.WRITE, "a")
    watch.expect(FilesystemEventType.CHMOD, "a")
    watch.expect(FilesystemEventType.RENAME, "a")
    watch.expect(FilesystemEventType.REMOVE, "b")
    watch.handle.stop()


def test_not_recursive(box, sdk, folder):
    box.files.make_dir(f"{folder}/sub")
    watch = Watch(box, sdk, folder)
    box.files.write(f"{folder}/sub/deep", "x")
    box.files.write(f"{folder}/flat", "x")
    watch.expect(FilesystemEventType.CREATE, "flat")
    assert not any("deep" in name for _, name in watch.seen())
    watch.handle.stop()


def test_recursive_also_into_new_directories(box, sdk, folder):
    box.files.make_dir(f"{folder}/old")
    watch = Watch(box, sdk, folder, recursive=True)
    box.files.write(f"{folder}/old/one", "x")
    watch.expect(FilesystemEventType.WRITE, "old/one")
    box.commands.run(f"mkdir -p {folder}/fresh/inner && echo x > {folder}/fresh/inner/two")
    watch.expect(FilesystemEventType.CREATE, "fresh/inner/two")
    watch.handle.stop()


def test_what_cannot_be_watched(box, sdk, folder):
    with pytest.raises(NotFoundException):
        Watch(box, sdk, "/no/such/place")
    box.files.write(f"{folder}/file", "x")
    with pytest.raises(InvalidArgumentException):
        Watch(box, sdk, f"{folder}/file")


def test_entries_with_events(box, sdk, folder):
    watch = Watch(box, sdk, folder, include_entry=True)
    box.files.write(f"{folder}/sized", "12345")
    watch.expect(FilesystemEventType.WRITE, "sized")
    entry = next(e.entry for e in watch.events if e.type == FilesystemEventType.WRITE)
    assert entry.path == f"{folder}/sized"
    assert entry.size == 5
    watch.handle.stop()


def test_nothing_after_stop(box, sdk, folder):
    watch = Watch(box, sdk, folder)
    watch.handle.stop()
    box.files.write(f"{folder}/late", "x")
    if watch.polled:
        with pytest.raises(Exception):
            watch.handle.get_new_events()
    else:
        assert watch.events == []
