//! The machine of the server itself is no destination, whatever a policy or the operator opens.

use std::{io::Write, net::TcpListener, thread};

use sandkeep_moat::{Via, policy::Policy};

use crate::world::{World, at, denied, get, in_world_with, inside, refused_via, run, was_reset};

/// A service of the host, on every address it has.
fn serve(world: &World) {
    let listener = inside(&world.here, || TcpListener::bind("[::]:8090").unwrap());
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            drop(stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\ninternal"));
        }
    });
}

fn everything(config: &mut sandkeep_moat::MoatConfig) {
    config.allow_private = vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()];
}

async fn is_closed(world: &World, address: &str) {
    let answer = world.talk(at(address, 8090), get(address)).await;
    let refused = match &answer {
        Ok(answer) => !answer.contains("internal") && denied(answer)["host"] != "",
        Err(_) => was_reset(&answer),
    };
    assert!(refused, "{address} {answer:?}");
}

#[test]
fn open_reaches_the_hosts_own_public_address() {
    in_world_with(everything, |world| async move {
        inside(&world.here, || {
            run("ip addr add 8.8.4.99/32 dev lo");
            run("ip addr add 8.8.5.0/24 dev lo");
            run("ip -6 addr add 2606:4700::99/128 dev lo nodad");
            run("ip addr add 1.2.3.4/24 dev out");
        });
        serve(&world);
        // Known at the latest when it is dialled; sooner when the kernel told of it.
        let moat = world.attach(Policy::open()).await;
        for address in [
            "8.8.4.99",
            "8.8.5.7",
            "1.2.3.4",
            "1.2.3.255",
            "2606:4700::99",
            "100.64.9.1",
            "fd77::1",
            "64:ff9b::808:463",
            "2002:808:463::1",
        ] {
            is_closed(&world, address).await;
        }
        // By a name, too: it is not even told.
        world.zone.address("host.test", "8.8.4.99");
        // The kernel tells of new addresses a moment later.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while !world.resolve("host.test").await.is_empty() {
            assert!(std::time::Instant::now() < end, "the name is told");
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        assert!(refused_via(&moat, Via::Dns, "host.test"));
        // One that it gets later, and one it has only by a route.
        inside(&world.here, || {
            run("ip addr add 8.8.6.6/32 dev out");
            run("ip route add local 8.8.7.0/24 dev lo");
        });
        for address in ["8.8.6.6", "8.8.7.7"] {
            is_closed(&world, address).await;
        }
        let named = world.allowing(&["8.8.4.99", "8.8.7.7"]).await;
        is_closed(&world, "8.8.4.99").await;
        is_closed(&world, "8.8.7.7").await;
        drop((moat, named));
    });
}

#[test]
fn an_address_the_host_gets_is_refused_with_the_first_packet() {
    in_world_with(everything, |world| async move {
        let moat = world.attach(Policy::open()).await;
        let begins = || async {
            world
                .in_box(|| {
                    std::net::TcpStream::connect_timeout(&at("8.8.8.88", 8090), crate::world::LONG)
                })
                .await
                .is_ok()
        };
        assert!(begins().await);
        inside(&world.here, || run("ip addr add 8.8.8.88/32 dev out"));
        // The kernel tells of it; the rules of boxes follow.
        while begins().await {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        inside(&world.here, || run("ip addr del 8.8.8.88/32 dev out"));
        while !begins().await {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        drop(moat);
    });
}

#[test]
fn metadata_and_platform_endpoints_of_every_cloud_under_open() {
    in_world_with(everything, |world| async move {
        let moat = world.attach(Policy::open()).await;
        for address in [
            "168.63.129.16",
            "169.254.170.2",
            "169.254.170.23",
            "100.100.100.200",
            "169.254.42.42",
            "169.254.0.23",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
        ] {
            let answer = world.talk(at(address, 80), get(address)).await;
            assert!(was_reset(&answer), "{address} {answer:?}");
        }
        drop(moat);
    });
}
