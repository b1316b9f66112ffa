//! One box takes what is everybody's: connections, descriptors, the attention of the server.

use std::{io::Read, net::TcpStream, time::Duration};

use sandkeep_moat::{AttachSpec, Moat, policy::Policy};
use sandkeep_model::SandboxId;

use crate::world::{
    GOOD, LONG, OK, World, another_box, at, get, in_world, in_world_with, was_reset,
};

/// Connections on which nothing is said. Those that were reset are not counted.
async fn hold(world: &World, address: &'static str, count: usize) -> Vec<TcpStream> {
    world
        .in_box(move || {
            let streams: Vec<_> = (0..count)
                .filter_map(|_| TcpStream::connect_timeout(&at(address, 80), LONG).ok())
                .collect();
            streams
        })
        .await
}

async fn held(moat: &Moat) -> u32 {
    // A refused connection is counted off a moment after it was made.
    let mut before = moat.open_connections();
    loop {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let now = moat.open_connections();
        if now == before {
            return now;
        }
        before = now;
    }
}

#[test]
fn silent_connections_to_the_metadata_address_take_no_more_than_their_share() {
    in_world(|world| async move {
        let box_moat = world.attach(Policy::air_gapped()).await;
        let streams = hold(&world, "169.254.169.254", 500).await;
        assert!(held(&world.moat).await <= 32);
        drop((streams, box_moat));
    });
}

#[test]
fn a_box_that_opens_all_it_can_leaves_room_for_the_others() {
    in_world_with(
        |config| {
            config.most_in_all = 400;
            config.most_connections = 4096;
        },
        |world| async move {
            world.zone.address("good.test", GOOD);
            let _server = world.server(at(GOOD, 80), OK).await;
            let greedy = world.allowing(&["good.test"]).await;
            let streams = hold(&world, GOOD, 1000).await;
            assert!(held(&world.moat).await <= 300);
            let other = World {
                namespace: another_box(),
                ..world
            };
            let moat = other.allowing(&["good.test"]).await;
            let answer = other.talk(at(GOOD, 80), get("good.test")).await.unwrap();
            assert!(answer.ends_with("hello"));
            drop((streams, greedy, moat));
        },
    );
}

#[test]
fn every_box_has_its_own_bound() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let moat = world.allowing(&["good.test"]).await;
        let streams = hold(&world, GOOD, 600).await;
        assert!(held(&world.moat).await <= 256);
        // The refused ones were told so.
        let reset = world
            .in_box(move || {
                streams
                    .into_iter()
                    .skip(400)
                    .filter_map(|mut stream| {
                        stream.set_read_timeout(Some(LONG)).ok()?;
                        Some(was_reset(&stream.read(&mut [0; 1])))
                    })
                    .filter(|reset| *reset)
                    .count()
            })
            .await;
        assert!(reset > 0);
        drop(moat);
    });
}

#[test]
fn dns_over_tcp_held_open_takes_few_places() {
    in_world(|world| async move {
        let moat = world.attach(Policy::air_gapped()).await;
        let streams: Vec<TcpStream> = world
            .in_box(|| {
                (0..200)
                    .filter_map(|_| TcpStream::connect_timeout(&at("10.0.0.1", 53), LONG).ok())
                    .collect()
            })
            .await;
        assert!(held(&world.moat).await <= 16);
        drop((streams, moat));
    });
}

#[test]
fn a_head_that_never_comes_is_waited_for_a_moment_only() {
    in_world_with(
        |config| {
            config.patience.inside_within = Duration::from_millis(200);
            config.inside = Some(std::sync::Arc::new(sandkeep_moat::InsideDesk::default()));
        },
        |world| async move {
            let moat = world.attach(Policy::air_gapped()).await;
            let ended = world
                .in_box(|| {
                    let mut stream =
                        TcpStream::connect_timeout(&at("169.254.169.254", 80), LONG).unwrap();
                    stream.set_read_timeout(Some(LONG)).unwrap();
                    // Until we are told that it is over; a hang is an error.
                    let mut rest = Vec::new();
                    match stream.read_to_end(&mut rest) {
                        Ok(_) => true,
                        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
                    }
                })
                .await;
            assert!(ended);
            drop(moat);
        },
    );
}

#[test]
fn an_attached_box_ends_with_its_places() {
    in_world(|world| async move {
        world.zone.address("good.test", GOOD);
        let _server = world.server(at(GOOD, 80), OK).await;
        let spec = AttachSpec {
            id: SandboxId::random(),
            netns: world.namespace.try_clone().unwrap(),
            policy: Policy::allowing(["good.test"]).unwrap(),
            bindings: Vec::new(),
            from_point: None,
            copy_of: None,
        };
        let moat = world.moat.attach(spec).await.unwrap();
        world.resolve("good.test").await;
        let streams = hold(&world, GOOD, 50).await;
        assert!(held(&world.moat).await > 0);
        moat.detach().await;
        assert_eq!(held(&world.moat).await, 0);
        drop(streams);
    });
}
