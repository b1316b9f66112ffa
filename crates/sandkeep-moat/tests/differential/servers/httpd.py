"""httpd.py NAME ADDRESS PORT LOG: says how Python's own server read each request.

It takes any method that can be written: names with NUL are no functions anybody has.
"""

import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

NAME, ADDRESS, PORT, LOG = sys.argv[1:]
OUT = os.open(LOG, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)


def shown(text):
    return quote((text or "").encode("latin-1", "replace"), safe="/:.-_*;%\\?=&@#")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 2

    def __getattr__(self, name):
        if name.startswith("do_") and "\0" not in name:
            return self.saw
        raise AttributeError(name)

    def saw(self):
        headers = getattr(self, "headers", None) or {}
        names = ("X-HTTP-Method-Override", "X-Original-URL", "X-Forwarded-Host")
        override = "".join(headers.get(name, "") for name in names)
        line = ["SAW", NAME, "200", shown(self.command), shown(headers.get("Host", "")), shown(self.path), shown(self.path)]
        os.write(OUT, ("\t".join([*line, shown(override)]) + "\n").encode())
        body = b"seen\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_):
        pass


Server((ADDRESS, int(PORT)), Handler).serve_forever()
