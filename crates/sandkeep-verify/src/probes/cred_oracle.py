# A host sends back what it was sent. How much of it comes at once must not tell how much of it is the secret.
got = tls_ask("good.test", "/need")
control(b"welcome" in got, f"the credential is not used: {got[:80]}")
def at_once(guess):
    body = b"a" * 300 + guess.encode()
    got = tls_ask("good.test", "/back", body=body, method="POST", pause=0.2)
    return len(got)
whole = tls_ask("good.test", "/back", body=b"a" * 300, method="POST")
control(b"a" * 50 in whole, f"what is sent does not come back: {whole[:60]}")
sizes = {"right": [], "wrong": []}
for _ in range(3):
    for name in ("right", "wrong"):
        sizes[name].append(at_once(ARGS[name]))
FOUND.update(sizes)
