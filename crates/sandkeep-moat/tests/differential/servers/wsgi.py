"""Says how gunicorn read each request; the log and the name come from the environment."""

import os
from urllib.parse import quote

OUT = os.open(os.environ["SAW_LOG"], os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
OVERRIDES = ("HTTP_X_HTTP_METHOD_OVERRIDE", "HTTP_X_ORIGINAL_URL", "HTTP_X_FORWARDED_HOST")


def shown(text):
    return quote(text.encode("latin-1", "replace"), safe="/:.-_*;%\\?=&@#")


def app(environ, start_response):
    override = "".join(environ.get(name, "") for name in OVERRIDES)
    # What is in PATH_INFO is decoded: an encoded percent sign must stay one.
    path = quote(environ.get("PATH_INFO", "").encode("latin-1", "replace"), safe="/:.-_*;\\")
    line = ["SAW", os.environ["SAW_NAME"], "200", shown(environ["REQUEST_METHOD"]), shown(environ.get("HTTP_HOST", ""))]
    line += [path, shown(environ.get("RAW_URI", "")), shown(override)]
    os.write(OUT, ("\t".join(line) + "\n").encode())
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "5")])
    return [b"seen\n"]
