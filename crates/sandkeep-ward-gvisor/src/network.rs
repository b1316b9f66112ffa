//! The network of a box: one namespace of the host's with both ends of a cable in it.
//!
//! `eth0` is the box's end: `runsc` takes its addresses away and moves frames between it and
//! the network stack of the box. `up0` is the host's end: what the box sends arrives there and
//! is answered by our listeners, or not at all. Nothing else is in the namespace, so there is
//! no way out of it. The addresses are the same in every box: a copy needs no new ones.

use sandkeep_host::{failure::Doing as _, netns};
use sandkeep_model::Result;
use sandkeep_netlink::{self as cable, ACK, CREATE, EXCLUSIVE, Messages, NEW_LINK, device};
use std::{io, os::fd::OwnedFd};

const LO: u32 = 1;
const BOX_END: (u32, &str, [u8; 6]) = (2, cable::BOX_END, cable::BOX_MAC);
const HOST_END: (u32, &str, [u8; 6]) = (3, cable::HOST_END, cable::HOST_MAC);

/// A fresh namespace, ready to be given to `runsc`.
pub async fn make() -> Result<OwnedFd> {
    let (namespace, ()) =
        netns::make(|| lay_cable().doing("making the network of the box")).await?;
    Ok(namespace)
}

/// Switches the host's end on. Before `runsc` has taken the box's end it would take both.
pub async fn open(namespace: &OwnedFd) -> Result<()> {
    netns::inside(namespace, || {
        cable::configure(LO, HOST_END.0, &cable::HOST_SIDE)
            .doing("switching the network of the box on")
    })
    .await
}

/// Switches the host's end off: nothing arrives in the box until it is opened again.
pub async fn cut(namespace: &OwnedFd) -> Result<()> {
    netns::inside(namespace, || {
        cable::switch_off(HOST_END.0).doing("switching the network of the box off")
    })
    .await
}

fn lay_cable() -> io::Result<()> {
    let mut messages = Messages::default();
    lay(&mut messages);
    messages.send(libc::NETLINK_ROUTE)?;
    cable::guard()?;
    cable::configure(LO, BOX_END.0, &cable::BOX_SIDE)
}

fn lay(messages: &mut Messages) {
    const MAC: u16 = 1;
    const NAME: u16 = 3;
    const INFO: u16 = 18;
    const KIND: u16 = 1;
    const DATA: u16 = 2;
    const PEER: u16 = 1;
    let named = |messages: &mut Messages, (_, name, mac): (u32, &str, [u8; 6])| {
        messages.text(NAME, name);
        messages.attribute(MAC, &mac);
    };
    messages.begin(NEW_LINK, ACK | CREATE | EXCLUSIVE, &device(BOX_END.0, 0));
    named(messages, BOX_END);
    messages.nested(INFO, |m| {
        m.text(KIND, "veth");
        m.nested(DATA, |m| {
            m.nested(PEER, |m| {
                m.raw(&device(HOST_END.0, 0));
                named(m, HOST_END);
            });
        });
    });
}
