import hashlib
import io
import urllib.error
import urllib.request

import pytest
from e2b import FileType, InvalidArgumentException, NotFoundException
from flavour import IS_OLD


def test_write_and_read_text(box):
    info = box.files.write("notes.txt", "hällo\n")
    assert info.path == "/home/user/notes.txt"
    assert box.files.read("notes.txt") == "hällo\n"


@pytest.mark.parametrize("size", [0, 1, 65_536, 3_000_001])
def test_bytes_come_back_as_they_went(box, size):
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    box.files.write("/tmp/data.bin", data)
    assert bytes(box.files.read("/tmp/data.bin", format="bytes")) == data


def test_a_hundred_megabytes_both_ways(box):
    block = hashlib.sha256(b"seed").digest() * 32_768
    data = block * 100
    box.files.write("/home/user/big.bin", io.BytesIO(data))
    assert box.commands.run("stat -c %s big.bin").stdout.strip() == str(len(data))
    digest = hashlib.sha256(data).hexdigest()
    assert box.commands.run("sha256sum big.bin").stdout.split()[0] == digest
    assert hashlib.sha256(box.files.read("/home/user/big.bin", format="bytes")).hexdigest() == digest


def test_read_as_a_stream(box, sdk):
    box.files.write("stream.bin", b"0123456789" * 100_000)
    stream = box.files.read("stream.bin", format="stream")
    if sdk.is_async:
        import flavour

        async def collect():
            return b"".join([bytes(chunk) async for chunk in flavour.unwrap(stream)])

        data = flavour.run(collect())
    else:
        data = b"".join(stream)
    assert data == b"0123456789" * 100_000


def test_overwriting_makes_shorter(box):
    box.files.write("a.txt", "a long text")
    box.files.write("a.txt", "short")
    assert box.files.read("a.txt") == "short"


def test_parents_are_made_and_owned(box):
    box.files.write("/home/user/one/two/three.txt", "x")
    out = box.commands.run("stat -c %U:%G one one/two one/two/three.txt").stdout.split()
    assert out == ["user:user"] * 3


def test_as_root(box):
    box.files.write("/root/secret", "x", user="root")
    assert box.commands.run("stat -c %U /root/secret", user="root").stdout == "root\n"


def test_many_files_in_one_call(box):
    files = [{"path": f"/tmp/many/{n}.txt", "data": f"file {n}"} for n in range(20)]
    written = box.files.write_files(files)
    assert [info.path for info in written] == [entry["path"] for entry in files]
    assert box.files.read("/tmp/many/13.txt") == "file 13"


def test_gzip_upload(box):
    box.files.write("zipped.txt", "z" * 100_000, gzip=True)
    assert box.files.read("zipped.txt") == "z" * 100_000


def test_octet_stream_upload(box):
    box.files.write("octets.bin", b"\x00\x01\xff" * 1000, use_octet_stream=True)
    assert bytes(box.files.read("octets.bin", format="bytes")) == b"\x00\x01\xff" * 1000


def test_metadata_is_kept_and_replaced(box):
    box.files.write("tagged.txt", "x", metadata={"owner": "me", "kind": "note"})
    assert box.files.get_info("tagged.txt").metadata == {"owner": "me", "kind": "note"}
    box.files.write("tagged.txt", "y", metadata={"kind": "other"})
    assert box.files.get_info("tagged.txt").metadata == {"kind": "other"}


@pytest.mark.parametrize("name", ["sp ace.txt", "ümläut.txt", "quote'\".txt", "per%20cent", "a+b&c=d?.txt", "semi;colon"])
def test_awkward_names(box, name):
    box.files.write(f"/tmp/odd/{name}", name)
    assert box.files.read(f"/tmp/odd/{name}") == name
    assert [entry.name for entry in box.files.list("/tmp/odd")] == [name]


def test_reading_what_is_not_there(box):
    with pytest.raises(NotFoundException):
        box.files.read("/no/such/file")


def test_reading_a_directory(box):
    with pytest.raises(InvalidArgumentException):
        box.files.read("/tmp")


def test_writing_over_a_directory(box):
    box.files.make_dir("/tmp/dir")
    with pytest.raises(InvalidArgumentException):
        box.files.write("/tmp/dir", "x")


def test_list_and_depth(box):
    box.commands.run("mkdir -p /tmp/tree/a/b; touch /tmp/tree/f /tmp/tree/a/g /tmp/tree/a/b/h")
    assert sorted(e.path for e in box.files.list("/tmp/tree")) == ["/tmp/tree/a", "/tmp/tree/f"]
    assert sorted(e.path for e in box.files.list("/tmp/tree", depth=2)) == [
        "/tmp/tree/a", "/tmp/tree/a/b", "/tmp/tree/a/g", "/tmp/tree/f",
    ]
    assert len(box.files.list("/tmp/tree", depth=3)) == 5


def test_list_tells_types_and_sizes(box):
    box.commands.run("mkdir -p /tmp/t/d; printf 12345 > /tmp/t/f; chmod 640 /tmp/t/f; ln -s f /tmp/t/l")
    entries = {entry.name: entry for entry in box.files.list("/tmp/t")}
    assert entries["d"].type == FileType.DIR
    assert entries["f"].type == FileType.FILE
    assert entries["f"].size == 5
    assert entries["f"].mode == 0o640
    assert entries["f"].permissions == "-rw-r-----"
    assert (entries["f"].owner, entries["f"].group) == ("user", "user")
    assert entries["l"].symlink_target == "/tmp/t/f"


def test_list_refusals(box):
    with pytest.raises(NotFoundException):
        box.files.list("/no/such/dir")
    with pytest.raises(InvalidArgumentException):
        box.files.list("/tmp", depth=0)
    box.files.write("/tmp/plain", "x")
    with pytest.raises(InvalidArgumentException):
        box.files.list("/tmp/plain")


def test_exists_and_info(box):
    assert box.files.exists("/nope") is False
    box.files.write("/tmp/there", "abc")
    assert box.files.exists("/tmp/there") is True
    info = box.files.get_info("/tmp/there")
    assert (info.name, info.path, info.size, info.type) == ("there", "/tmp/there", 3, FileType.FILE)
    with pytest.raises(NotFoundException):
        box.files.get_info("/nope")


def test_make_dir(box):
    assert box.files.make_dir("/tmp/x/y/z") is True
    assert box.files.make_dir("/tmp/x/y/z") is False


def test_rename(box):
    box.files.write("/tmp/old", "x")
    info = box.files.rename("/tmp/old", "/tmp/sub/new")
    assert info.path == "/tmp/sub/new"
    assert box.files.exists("/tmp/old") is False
    assert box.files.read("/tmp/sub/new") == "x"
    with pytest.raises(NotFoundException):
        box.files.rename("/tmp/old", "/tmp/other")


def test_remove(box):
    box.commands.run("mkdir -p /tmp/gone/deep; touch /tmp/gone/deep/f")
    box.files.remove("/tmp/gone")
    assert box.files.exists("/tmp/gone") is False


def test_home_and_relative_paths(box):
    box.files.write("~/tilde.txt", "t")
    assert box.files.read("/home/user/tilde.txt") == "t"
    assert box.files.read("tilde.txt") == "t"


def test_signed_urls(box):
    url = box.upload_url("/tmp/signed.txt")
    boundary = "----x"
    body = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="signed.txt"\r\n\r\nby url\r\n--{boundary}--\r\n'
    ).encode()
    request = urllib.request.Request(
        url, data=body, headers={"Content-Type": f"multipart/form-data; boundary={boundary}"}, method="POST"
    )
    assert urllib.request.urlopen(request).status == 200
    assert urllib.request.urlopen(box.download_url("/tmp/signed.txt")).read() == b"by url"


def test_signed_urls_with_an_end(box):
    box.files.write("/tmp/s.txt", "x")
    good = box.download_url("/tmp/s.txt", use_signature_expiration=60)
    assert urllib.request.urlopen(good).read() == b"x"
    over = box.download_url("/tmp/s.txt", use_signature_expiration=-60)
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(over)
    assert raised.value.code == 401
    assert b"signature is already expired" in raised.value.read()


def test_a_changed_signed_url_is_refused(box):
    box.files.write("/tmp/s.txt", "x")
    box.files.write("/tmp/t.txt", "y")
    url = box.download_url("/tmp/s.txt").replace("s.txt", "t.txt")
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(url)
    assert raised.value.code in (401, 404)


@pytest.mark.skipif(IS_OLD, reason="2.45 uploads text, bytes and files, not iterables of bytes")
def test_upload_from_an_iterable(box, sdk):
    if sdk.is_async:

        async def source():
            for _ in range(50):
                yield b"z" * 1000

        data = source()
    else:
        data = (b"z" * 1000 for _ in range(50))
    box.files.write("/tmp/iterated", data)
    assert box.files.get_info("/tmp/iterated").size == 50_000
