//! Watches one box: the end of its QEMU, and kills for want of memory in its machine.

use crate::{record::Live, start};
use sandkeep_host::work::lock;
use sandkeep_ward::WardEvent;
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::mpsc::Sender,
    time::{MissedTickBehavior, interval},
};

/// How often the machine is asked. Only its own kernel knows, and asking wakes it.
const LOOK: Duration = Duration::from_secs(5);
const ANSWERS: Duration = Duration::from_secs(5);

/// Runs until the box has ended or nobody listens any more.
pub async fn watch(live: Arc<Live>, events: Sender<WardEvent>) {
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let ended = tokio::select! {
            ended = live.first.ended() => Some(ended),
            _ = look.tick() => None,
        };
        let Some(ended) = ended else {
            let found = tokio::select! {
                _ = live.first.ended() => continue,
                found = kills(&live) => found,
            };
            let Some(kills) = found else { continue };
            let before = lock(&live.has.kills).replace(kills).unwrap_or(kills);
            if kills > before {
                let id = live.id.clone();
                // Nobody listens: the server is on its way out.
                let _told = events.send(WardEvent::OutOfMemory { id, kills }).await;
            }
            continue;
        };
        live.over.cancel();
        if let Err(error) = ended {
            tracing::error!(id = %live.id, %error, "the box can not be watched any more");
        } else if !live.first.is_ending() {
            let news = WardEvent::Exited {
                id: live.id.clone(),
                // The machine had all its memory, and QEMU wanted more.
                out_of_memory: live.record.cgroups.oom_kills().is_ok_and(|kills| kills > 0),
            };
            let _told = events.send(news).await;
        }
        return;
    }
}

/// A machine that stands still, or does not answer, is not asked.
async fn kills(live: &Live) -> Option<u64> {
    if !live.moves() {
        return None;
    }
    let usage = start::inner_usage(live, ANSWERS).await.ok()?;
    Some(usage.oom_kills)
}
