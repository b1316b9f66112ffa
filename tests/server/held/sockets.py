"""Sockets of all kinds and states."""

from .expected import EITHER, WAKES

TCP = {}
for kind in ("v4", "v6", "mapped"):
    TCP |= {
        f"tcp_one_end_is_shut_{kind}": (WAKES, f"""
listener, near, far = connected('{kind}')
far.shutdown(socket.SHUT_WR)
until(lambda: (state(near), state(far)) == (CLOSE_WAIT, FIN_WAIT2))
def check():
    near.sendall(b'still')
    far.settimeout(60)
    return (near.recv(1), far.recv(5), state(near), state(far)) == (b'', b'still', CLOSE_WAIT, FIN_WAIT2) or (state(near), state(far))
"""),
        f"tcp_one_end_is_shut_with_data_{kind}": (WAKES, f"""
listener, near, far = connected('{kind}')
far.sendall(b'before')
far.shutdown(socket.SHUT_WR)
near.sendall(b'against')
def end():
    near.sendall(b'it')
    near.shutdown(socket.SHUT_WR)
    return drain(near) == b'before' and drain(far) == b'againstit'
def drain(sk):
    sk.settimeout(60)
    got = b''
    while more := sk.recv(100):
        got += more
    return got
check = once(end)
"""),
        f"tcp_the_other_end_is_gone_{kind}": (WAKES, f"""
listener, near, far = connected('{kind}')
far.sendall(b'before')
far.close()
until(lambda: state(near) == CLOSE_WAIT)
near.settimeout(60)
check = once(lambda: (near.recv(100), near.recv(100)) == (b'before', b''))
"""),
        f"tcp_both_ends_are_shut_{kind}": (WAKES, f"""
listener, near, far = connected('{kind}')
far.sendall(b'before')
far.shutdown(socket.SHUT_WR)
near.shutdown(socket.SHUT_WR)
until(lambda: (state(near), state(far)) == (CLOSE, CLOSE))
check = lambda: near.fileno() > 0 and far.recv(1) == b''
"""),
        f"tcp_fin_wait1_{kind}": (WAKES, f"""
listener, near, far = connected('{kind}')
sent = fill(near)
near.shutdown(socket.SHUT_WR)
until(lambda: (state(near), state(far)) == (FIN_WAIT1, ESTABLISHED))
check = once(lambda: drained(far, sent))
"""),
        f"tcp_closing_{kind}": (WAKES, f"""
listener, near, far = connected('{kind}')
sent = fill(near)
near.shutdown(socket.SHUT_WR)
far.shutdown(socket.SHUT_WR)
until(lambda: (state(near), state(far)) == (CLOSING, FIN_WAIT2))
check = once(lambda: drained(far, sent) is True and near.recv(1) == b'')
"""),
        f"tcp_last_ack_{kind}": (WAKES, f"""
listener, near, far = connected('{kind}')
far.shutdown(socket.SHUT_WR)
sent = fill(near)
near.shutdown(socket.SHUT_WR)
until(lambda: (state(near), state(far)) == (LAST_ACK, FIN_WAIT2))
check = once(lambda: drained(far, sent) is True and near.recv(1) == b'')
"""),
        f"tcp_queues_are_full_{kind}": (WAKES, f"""
listener, near, far = connected('{kind}')
sizes = fill(near), fill(far)
def end():
    found = []
    def read(sk, size):
        found.append(drained(sk, size))
    readers = [threading.Thread(target=read, args=pair) for pair in ((far, sizes[0]), (near, sizes[1]))]
    for one in readers:
        one.start()
    near.shutdown(socket.SHUT_WR)
    far.shutdown(socket.SHUT_WR)
    for one in readers:
        one.join()
    return found == [True, True] or found
check = once(end)
"""),
        f"tcp_is_shut_in_two_processes_{kind}": (WAKES, f"""
listener, near, far = connected('{kind}')
def other():
    near.close()
    listener.close()
pid = forked(other)
far.close()
near.shutdown(socket.SHUT_WR)
until(lambda: state(near) == FIN_WAIT2)
check = lambda: state(near) == FIN_WAIT2 and alive(pid) == 'S'
"""),
    }

TCP |= {
    "tcp_syn_sent": (EITHER, """
# As long as nobody takes what waits, no further connection is made; it is tried again after 1, 3 and 7 seconds.
listener = socket.socket()
listener.bind(('127.0.0.1', 0))
listener.listen(0)
first = socket.create_connection(listener.getsockname())
near = socket.socket()
near.setblocking(False)
assert near.connect_ex(listener.getsockname()) == errno.EINPROGRESS
time.sleep(3.3)
assert state(near) == SYN_SENT
taken, _ = listener.accept()
def end():
    listener.settimeout(60)
    far, _ = listener.accept()
    return both(first, taken) and both(near, far)
check = once(end)
"""),
    "tcp_with_a_filter_of_its_own": (WAKES, """
listener, near, far = connected('v4')
program = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0xffffffff))
given = struct.pack('HxxxxxxQ', 1, ctypes.addressof(program))
try:
    near.setsockopt(socket.SOL_SOCKET, 26, given)
except OSError as error:
    raise NotHere(error)
def check():
    # SO_GET_FILTER: how many instructions it has.
    size = ctypes.c_uint(0)
    assert libc.getsockopt(near.fileno(), 1, 26, None, ctypes.byref(size)) == 0
    other = ctypes.c_uint(0)
    assert libc.getsockopt(far.fileno(), 1, 26, None, ctypes.byref(other)) == 0
    return (size.value, other.value) == (1, 0) and both(near, far)
"""),
    "tcp_to_the_own_address": (WAKES, """
listener, near, far = connected((socket.AF_INET, '0.0.0.0', own_address()))
check = lambda: near.fileno() > 0 and listener.getsockname()[1] > 0
"""),
    "tcp_to_the_own_address_is_shut": (WAKES, """
listener, near, far = connected((socket.AF_INET, '0.0.0.0', own_address()))
far.shutdown(socket.SHUT_WR)
sent = fill(near)
check = lambda: near.fileno() > 0 and listener.getsockname()[1] > 0
"""),
    "tcp_bound_to_the_own_address": (WAKES, """
listener = socket.socket()
listener.bind((own_address(), 0))
listener.listen(5)
check = lambda: listener.getsockname()[1] > 0
"""),
    "tcp_from_one_address_of_loopback_to_another": (WAKES, """
listener = socket.socket()
listener.bind(('127.0.0.2', 0))
listener.listen(5)
near = socket.socket()
near.bind(('127.0.0.3', 0))
near.connect(listener.getsockname())
far, _ = listener.accept()
check = lambda: both(near, far)
"""),
    "tcp_refused_and_reset": (WAKES, """
listener, near, far = connected('v4')
far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
far.close()
refused = socket.socket()
assert refused.connect_ex(('127.0.0.1', 1)) == errno.ECONNREFUSED
bound = socket.socket()
bound.bind(('127.0.0.1', 0))
check = lambda: state(near) == state(refused) == state(bound) == CLOSE
"""),
    "tcp_urgent_data": (EITHER, """
listener, near, far = connected('v4')
near.sendall(b'one')
near.send(b'!', socket.MSG_OOB)
near.sendall(b'two')
check = lambda: far.fileno() > 0
"""),
    "tcp_many_listen_on_one_port": (WAKES, """
listeners = []
for n in range(4):
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind(('127.0.0.1', listeners[0].getsockname()[1] if listeners else 0))
    one.listen(5)
    listeners.append(one)
check = lambda: all(state(one) == LISTEN for one in listeners)
"""),
    "tcp_half_closed_and_its_listener_gone": (WAKES, """
listener, near, far = connected('v4')
listener.close()
far.shutdown(socket.SHUT_WR)
check = lambda: (state(near), state(far)) == (CLOSE_WAIT, FIN_WAIT2)
"""),
    "tcp_many_half_closed": (WAKES, """
all = [connected('v4') for n in range(60)]
for n, (listener, near, far) in enumerate(all):
    listener.close()
    if n % 3 == 0:
        near.shutdown(socket.SHUT_WR)
    elif n % 3 == 1:
        far.close()
check = lambda: [state(near) for _, near, _ in all] == [FIN_WAIT2, CLOSE_WAIT, ESTABLISHED] * 20 or [state(near) for _, near, _ in all]
"""),
    "tcp_not_accepted": (EITHER, """
listener = socket.socket()
listener.bind(('127.0.0.1', 0))
listener.listen(5)
near = socket.create_connection(listener.getsockname())
check = lambda: listener.fileno() > 0
"""),
    "mptcp": (EITHER, """
try:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
except OSError as error:
    raise NotHere(error)
listener.bind(('127.0.0.1', 0))
listener.listen(5)
check = lambda: listener.getsockname()[1] > 0
"""),
}

OTHERS = {
    "udp_connected": (WAKES, """
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.bind(('127.0.0.1', 0))
other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
other.connect(one.getsockname())
def check():
    other.send(b'x')
    one.settimeout(60)
    return one.recv(10) == b'x'
"""),
    "udp_connected_to_the_world": (WAKES, """
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.connect(('192.0.2.1', 53))
check = lambda: one.getpeername() == ('192.0.2.1', 53)
"""),
    "udp_connected_to_the_world_v6": (EITHER, """
one = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
if one.connect_ex(('2001:db8::1', 53)):
    raise NotHere('no IPv6')
check = lambda: one.getpeername()[0] == '2001:db8::1'
"""),
    "udp_connected_to_the_own_address": (WAKES, """
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.bind((own_address(), 0))
other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
other.connect(one.getsockname())
check = lambda: other.getpeername() == one.getsockname()
"""),
    "udp_connected_to_a_broadcast_address": (EITHER, """
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
if one.connect_ex(('255.255.255.255', 53)):
    raise NotHere('no broadcast')
check = lambda: one.fileno() > 0
"""),
    "udp_in_a_group": (EITHER, """
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.bind(('224.0.0.251', 5353))
one.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton('224.0.0.251') + socket.inet_aton('127.0.0.1'))
check = lambda: one.getsockname() == ('224.0.0.251', 5353)
"""),
    "udp_of_a_link_local_address": (EITHER, """
one = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
try:
    address = next(line.split() for line in open('/proc/net/if_inet6') if line.startswith('fe80'))
except StopIteration:
    raise NotHere('no link-local address')
one.bind((':'.join(address[0][n:n + 4] for n in range(0, 32, 4)), 0, 0, int(address[1], 16)))
check = lambda: one.fileno() > 0
"""),
    "udp_bound_to_a_device": (EITHER, """
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
names = [line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]]
name = next((name for name in names if name != 'lo'), 'lo')
one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
one.connect(('192.0.2.1', 53))
check = lambda: one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b'\\0') == name.encode()
"""),
    "udp_with_data": (WAKES, """
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.bind(('127.0.0.1', 0))
one.sendto(b'x', one.getsockname())
check = lambda: one.getsockname()[1] > 0
"""),
    "udp_corked": (EITHER, """
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.bind(('127.0.0.1', 0))
one.connect(one.getsockname())
one.setsockopt(socket.IPPROTO_UDP, 1, 1)
one.send(b'x')
check = lambda: one.fileno() > 0
"""),
    "ping_socket": (EITHER, """
try:
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
except OSError as error:
    raise NotHere(error)
one.connect(('127.0.0.1', 0))
check = lambda: one.fileno() > 0
"""),
    "netlink": (EITHER, """
one = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
one.bind((0, 1))
check = lambda: one.getsockname()[0] != 0
"""),
    "netlink_with_data": (EITHER, """
one = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
one.bind((0, 0))
one.send(struct.pack('IHHII', 32, 18, 0x301, 1, 0) + b'\\0' * 16)
check = lambda: one.fileno() > 0
"""),
    "algorithm_socket": (EITHER, """
try:
    one = socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)
    one.bind(('hash', 'sha256'))
except OSError as error:
    raise NotHere(error)
check = lambda: one.fileno() > 0
"""),
    "vsock": (EITHER, """
try:
    one = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
except OSError as error:
    raise NotHere(error)
check = lambda: one.fileno() > 0
"""),
    "tls_in_the_kernel": (EITHER, """
listener, near, far = connected('v4')
try:
    near.setsockopt(socket.IPPROTO_TCP, 31, b'tls')
except OSError as error:
    raise NotHere(error)
check = lambda: both(near, far)
"""),
    "unix_stream_with_data": (WAKES, """
one, other = socket.socketpair()
one.sendall(b'data')
check = lambda: other.recv(4, socket.MSG_PEEK) == b'data'
"""),
    "unix_stream_shut": (WAKES, """
one, other = socket.socketpair()
one.sendall(b'data')
one.shutdown(socket.SHUT_WR)
gone, left = socket.socketpair()
gone.sendall(b'data')
gone.close()
other.settimeout(60)
check = once(lambda: other.recv(4) == b'data' and other.recv(1) == b'' and left.recv(4) == b'data' and left.recv(1) == b'')
"""),
    "unix_seqpacket_with_data": (WAKES, """
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
one.send(b'first')
one.send(b'second')
other.settimeout(60)
check = once(lambda: other.recv(100) == b'first' and other.recv(100) == b'second')
"""),
    "unix_datagrams_of_many_senders": (WAKES, """
to = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
to.bind(here + '/to')
senders = []
for n in range(3):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.bind(f'{here}/from{n}')
    one.connect(here + '/to')
    one.send(b'%d' % n)
    senders.append(one)
to.settimeout(60)
check = once(lambda: sorted(to.recv(10) for _ in senders) == [b'0', b'1', b'2'])
"""),
    "unix_abstract": (WAKES, """
listener = socket.socket(socket.AF_UNIX)
listener.bind('\\0held')
listener.listen(5)
near = socket.socket(socket.AF_UNIX)
near.connect('\\0held')
far, _ = listener.accept()
check = lambda: both(near, far)
"""),
    "unix_descriptors_under_way": (EITHER, """
one, other = socket.socketpair()
read, write = os.pipe()
socket.send_fds(one, [b'x'], [read])
os.close(read)
check = lambda: one.fileno() > 0
"""),
    "tcp_under_way": (EITHER, """
listener, near, far = connected('v4')
one, other = socket.socketpair()
socket.send_fds(one, [b'x'], [near.fileno()])
near.close()
def end():
    other.settimeout(60)
    taken = socket.recv_fds(other, 10, 1)[1]
    return both(socket.socket(fileno=taken[0]), far)
check = once(end)
"""),
    "tcp_half_closed_under_way": (EITHER, """
listener, near, far = connected('v4')
far.shutdown(socket.SHUT_WR)
one, other = socket.socketpair()
socket.send_fds(one, [b'x'], [near.fileno()])
near.close()
check = lambda: far.fileno() > 0
"""),
    "unix_itself_under_way": (EITHER, """
one, other = socket.socketpair()
socket.send_fds(one, [b'x'], [one.fileno(), other.fileno()])
check = lambda: one.fileno() > 0
"""),
    "unix_not_accepted": (EITHER, """
listener = socket.socket(socket.AF_UNIX)
listener.bind(here + '/name')
listener.listen(5)
near = socket.socket(socket.AF_UNIX)
near.connect(here + '/name')
near.sendall(b'early')
check = lambda: near.fileno() > 0
"""),
    "unix_full": (WAKES, """
one, other = socket.socketpair()
sent = fill(one)
one.shutdown(socket.SHUT_WR)
check = once(lambda: drained(other, sent))
"""),
    "unix_of_two_names_in_tmpfs": (WAKES, """
listener = socket.socket(socket.AF_UNIX)
listener.bind('/run/first')
listener.listen(5)
os.link('/run/first', '/run/second')
check = lambda: listener.getsockname() == '/run/first'
"""),
    "unix_left_behind": (WAKES, """
one = socket.socket(socket.AF_UNIX)
one.bind('/run/left')
one.close()
check = lambda: True
"""),
    "unix_peer_of_itself": (EITHER, """
one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
one.bind('\\0self')
one.connect('\\0self')
one.send(b'x')
check = lambda: one.recv(10, socket.MSG_PEEK) == b'x'
"""),
    "unix_out_of_band": (EITHER, """
one, other = socket.socketpair()
one.sendall(b'data')
try:
    one.send(b'!', socket.MSG_OOB)
except OSError as error:
    raise NotHere(error)
check = lambda: other.fileno() > 0
"""),
}
