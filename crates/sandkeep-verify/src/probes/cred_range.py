# The value as a file, asked for in two parts: neither is the value.
got = tls_ask("good.test", "/need")
control(b"welcome" in got, f"the credential is not used: {got[:80]}")
parts = []
for part in ("0-15", "16-"):
    got = tls_ask("good.test", "/half", more=f"Range: bytes={part}\r\n")
    parts.append(got.split(b"\r\n\r\n", 1)[-1].hex() if b"\r\n\r\n" in got else "")
FOUND["parts"] = parts
