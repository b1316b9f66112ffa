# A server that says it is the bound host, with a certificate that nobody vouches for.
got = tls_ask("good.test", "/need")
control(b"welcome" in got or bool(ARGS.get("own")), f"the credential is not used: {got[:80]}")
refused(f"the impostor: {tls_ask('impostor.test', '/impostor-' + NONCE)[:40]}")
