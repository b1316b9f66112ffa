//! The network: there is none but the box's own loopback.

use crate::attack;
use std::os::linux::net::SocketAddrExt as _;

attack!(only_harmless_socket_families, target, {
    let answers = target
        .python(
            "
def make(family, kind, protocol=0):
    try: socket.socket(family, kind, protocol).close(); return 'ok'
    except OSError as error: return errno.errorcode[error.errno]
# can 29, tipc 30, bluetooth 31, alg 38, vsock 40, xdp 44, packet 17, smc 43, rds 21, key 15
for family in (17, 29, 30, 31, 38, 40, 43, 44, 21, 15):
    print(make(family, socket.SOCK_DGRAM), make(family, socket.SOCK_STREAM), make(family, socket.SOCK_RAW))
print(make(2, socket.SOCK_RAW, 1), make(2, socket.SOCK_STREAM, 132), make(10, socket.SOCK_DGRAM, 33))
# netlink: netfilter, xfrm, crypto
print(make(16, socket.SOCK_RAW, 12), make(16, socket.SOCK_RAW, 6), make(16, socket.SOCK_RAW, 21))
print(make(1, socket.SOCK_STREAM), make(2, socket.SOCK_STREAM), make(10, socket.SOCK_DGRAM), make(16, socket.SOCK_RAW, 0))",
        )
        .await;
    let lines: Vec<&str> = answers.lines().collect();
    for line in &lines[..10] {
        assert_eq!(*line, "EAFNOSUPPORT EAFNOSUPPORT EAFNOSUPPORT");
    }
    assert_eq!(lines[10], "EPERM EAFNOSUPPORT EAFNOSUPPORT");
    assert_eq!(lines[11], "EAFNOSUPPORT EAFNOSUPPORT EAFNOSUPPORT");
    assert_eq!(lines[12], "ok ok ok ok");
});

attack!(nothing_but_loopback, target, {
    let devices = target
        .works("tail -n +3 /proc/net/dev | cut -d: -f1 | xargs")
        .await;
    assert_eq!(devices, "lo\n");
    for address in ["192.0.2.1", "169.254.169.254", "10.0.0.1"] {
        target
            .fails(&format!(
                "timeout 5 bash -c 'exec 3<>/dev/tcp/{address}/80'"
            ))
            .await;
    }
    for command in [
        "ip link add dummy0 type dummy",
        "ip link add v0 type veth peer name v1",
        "ip addr add 10.1.1.1/24 dev lo",
        "ip link set lo down",
        "ip route add default dev lo",
    ] {
        target.fails(command).await;
    }
});

attack!(its_own_loopback_is_whole, target, {
    let answers = target
        .python(
            "
# A port below 1024, as any user would expect of root in a box of its own.
server = socket.create_server(('127.0.0.1', 80))
client = socket.create_connection(('127.0.0.1', 80))
peer, _ = server.accept()
client.sendall(b'hello')
print(peer.recv(5).decode())
# Ping without raw sockets.
ping = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
ping.settimeout(60)
ping.sendto(b'\\x08\\x00\\x00\\x00\\x00\\x00\\x00\\x01', ('127.0.0.1', 0))
print(ping.recv(100)[0])",
        )
        .await;
    assert_eq!(answers, "hello\n0\n");
    let output = target
        .stage
        .run_as(
            "user",
            "python3 -c \"import socket; socket.create_server(('127.0.0.1', 81))\"",
        )
        .await;
    assert!(output.success(), "{output:?}");
});

// Services of the host that trust whoever comes from 127.0.0.1.
attack!(loopback_services_of_the_host_are_out_of_reach, target, {
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    target
        .fails(&format!(
            "timeout 5 bash -c 'exec 3<>/dev/tcp/127.0.0.1/{port}'"
        ))
        .await;
    let name = format!("sandkeep-test-{}", std::process::id());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let _abstract = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
    let answer = target
        .python(&format!(
            "
try: socket.socket(socket.AF_UNIX).connect('\\0{name}'); print('reached')
except OSError as error: print(errno.errorcode[error.errno])"
        ))
        .await;
    assert_eq!(answer, "ECONNREFUSED\n");
});
