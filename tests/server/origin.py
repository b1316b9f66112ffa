"""A world with an origin in it that demands credentials, under a certificate authority of its own."""

from __future__ import annotations

import base64
import contextlib
import html
import http.server
import json
import ssl
import subprocess
import urllib.parse
from pathlib import Path

from world import GOOD, Dns, World


def each(form: str):
    return lambda text: "".join(form.format(ord(letter)) for letter in text)


def based(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


# How sites show what they were sent.
FORMS = {
    "upper case": str.upper,
    "base64": based,
    "base64 of JSON": lambda text: based(json.dumps({"headers": {"Authorization": text}})),
    "base64 in lines in JSON": lambda text: json.dumps(base64.encodebytes(text.encode() * 3).decode()),
    "base64 in a query": lambda text: urllib.parse.quote(based(text), safe=""),
    "base64 of base64": lambda text: based(based(text)),
    "base64 of UTF-16": lambda text: base64.b64encode(text.encode("utf-16-le")).decode(),
    "base64 of UTF-16, the other way round": lambda text: base64.b64encode(text.encode("utf-16-be")).decode(),
    "base64 of hex": lambda text: based(text.encode().hex()),
    "hex": lambda text: text.encode().hex(),
    "hex of hex": lambda text: text.encode().hex().encode().hex(),
    "hex of base64": lambda text: based(text).encode().hex(),
    "hex of UTF-16": lambda text: text.encode("utf-16-le").hex(),
    "quote": urllib.parse.quote,
    "quote, safe=''": lambda text: urllib.parse.quote(text, safe=""),
    "percent": each("%{:02x}"),
    "PHP JSON": lambda text: json.dumps(text).replace("/", "\\/"),
    "JSON escapes": each("\\u{:04x}"),
    "html.escape": html.escape,
    "entities": each("&#{};"),
    "entities, hex": each("&#x{:X};"),
    "NUL between": lambda text: "\0".join(text),
}


class Request:
    def __init__(self, host: str, method: str, path: str, headers: list[tuple[str, str]], body: bytes):
        self.host, self.method, self.path, self.headers, self.body = host, method, path, headers, body

    def all(self, name: str) -> list[str]:
        return [value for own, value in self.headers if own.lower() == name.lower()]

    def __repr__(self):
        return f"Request({self.method} {self.host}{self.path} {self.headers} {self.body[:80]!r})"


class Origin(World):
    """`/need` answers "welcome" to who has `Authorization: Bearer EXPECTED`, `/repo.git` to who has it as a
    password; `/echo…` shows the request. `strange.test` shows a certificate nobody vouches for."""

    NAMES = ("good.test", "other.test", "closed.test", "strange.test")

    def __init__(self, directory: Path):
        self.expected = ""
        self.requests: list[Request] = []
        super().__init__(directory)
        self.dns.records |= {name: [(Dns.A, GOOD)] for name in self.NAMES}

    def flags(self) -> list[str]:
        return [*super().flags(), "--log-level", "debug"]

    def tls_context(self) -> ssl.SSLContext:
        known = [name for name in self.NAMES if name != "strange.test"]
        right, wrong = self.issued("ca", known), self.issued("nobody", ["strange.test"])

        def named(connection, name, _):
            connection.server_name_seen = name
            if name == "strange.test":
                connection.context = wrong

        right.sni_callback = named
        return right

    def issued(self, authority: str, names: list[str]) -> ssl.SSLContext:
        at = self.directory
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        run = lambda *words: subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)  # noqa: E731
        ca, ca_key = at / f"{authority}.pem", at / f"{authority}.key"
        run("req", "-x509", *curve, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", f"/CN={authority} of the tests")
        leaf, key, asked = at / f"{authority}-leaf.pem", at / f"{authority}-leaf.key", at / f"{authority}.csr"
        run("req", "-new", *curve, "-keyout", key, "-out", asked, "-subj", "/CN=leaf")
        extensions = at / f"{authority}.ext"
        extensions.write_text("basicConstraints=CA:FALSE\nsubjectAltName=" + ",".join(f"DNS:{name}" for name in names))
        run("x509", "-req", "-in", asked, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-out", leaf, "-days", "2",
            "-extfile", extensions)  # fmt: skip
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(leaf, key)
        return context

    def of(self, path: str) -> list[Request]:
        return [request for request in self.requests if request.path.startswith(path)]

    def http(self, connection, first):
        origin = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def handle_one_request(self):
                with contextlib.suppress(ssl.SSLError):
                    super().handle_one_request()

            def any_method(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(first.server_name, self.command, self.path, self.headers.items(), body)
                origin.requests.append(request)
                path = self.path.split("?")[0]
                if path == "/need":
                    good = request.all("Authorization") == [f"Bearer {origin.expected}"]
                    return self.text(200 if good else 401, "welcome\n" if good else "who are you?\n")
                if path == "/echo":
                    return self.text(200, f"{self.path}\n{self.headers}\n{body!r}\n")
                if path == "/echo-header":
                    return self.text(200, "look above\n", {"X-You-Sent": request.all("Authorization")[0]})
                if path == "/echo-pieces":
                    return self.pieces(request.all("Authorization")[0])
                if path == "/echo-as":
                    form = urllib.parse.unquote(self.path.split("?")[1])
                    return self.text(200, f"-> {FORMS[form](request.all('Authorization')[0])} <-\n")
                if path == "/say":
                    return self.say(body, False)
                if path == "/say-paused":
                    return self.say(body, True)
                if path.startswith("/repo.git"):
                    return self.repository(request)
                self.text(200, "open\n")

            do_GET = do_POST = do_PUT = do_DELETE = any_method

            def text(self, status, text, headers=None):
                data = text.encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def pieces(self, text):
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for letter in text + "\n":
                    self.wfile.write(b"1\r\n" + letter.encode() + b"\r\n")
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")

            def say(self, text, paused):
                """Bytes the box chose, in pieces it chose. `paused`: it waits for the box to leave after the first."""
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for piece in text.split(b"|"):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    self.wfile.flush()
                    if paused:
                        self.close_connection = True
                        with contextlib.suppress(OSError):
                            self.rfile.read(1)
                        return
                self.wfile.write(b"0\r\n\r\n")

            def repository(self, request):
                wanted = "Basic " + base64.b64encode(f"robot:{origin.expected}".encode()).decode()
                if request.all("Authorization") != [wanted]:
                    return self.text(401, "who are you?\n", {"WWW-Authenticate": 'Basic realm="r"'})
                super().do_GET()

        Handler(connection, ("origin", 0), None, directory=str(self.directory))
