# Socket families through which kernels were broken, and packets as one likes them.
probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
probe.close()
for name, family, kind, protocol in (("AF_PACKET", 17, 3, 0x0300), ("AF_ALG", 38, 5, 0), ("AF_VSOCK", 40, 1, 0),
                                     ("AF_XDP", 44, 3, 0), ("AF_KEY", 15, 3, 2), ("AF_TIPC", 30, 2, 0),
                                     ("AF_CAN", 29, 3, 1), ("netfilter netlink", 16, 3, 12)):
    attempt(name, lambda: socket.socket(family, kind, protocol).close())
    if name == "netfilter netlink" and WORKED and WORKED[-1] == name:
        # The socket alone gives nothing; a table made with it would.
        WORKED.pop()
        refused(f"{name}: a socket, no rights")
