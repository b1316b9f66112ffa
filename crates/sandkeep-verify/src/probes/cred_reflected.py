# A host that knows the value shows it, in one disguise after another.
got = tls_ask("good.test", "/need")
control(b"welcome" in got, f"the credential is not used: {got[:80]}")
for name in ARGS["disguises"]:
    FOUND[name] = tls_ask("good.test", "/show?" + name).hex()
