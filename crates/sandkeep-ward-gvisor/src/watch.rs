//! Watches one box: the end of its sandbox, and kills for want of memory.

use crate::record::Live;
use sandkeep_ward::WardEvent;
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::mpsc::Sender,
    time::{MissedTickBehavior, interval},
};

/// How often the count of memory kills is read: one small file per box.
const LOOK: Duration = Duration::from_millis(500);

/// Runs until the box has ended or nobody listens any more.
///
/// All memory of the box is the sandbox's: whichever of its processes the host's kernel killed
/// for want of memory, the box is broken, so the rest is killed as well.
pub async fn watch(live: Arc<Live>, events: Sender<WardEvent>) {
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let ended = tokio::select! {
            ended = live.first.ended() => Some(ended),
            _ = look.tick() => None,
        };
        let out_of_memory = live.record.cgroups.oom_kills().is_ok_and(|kills| kills > 0);
        let ended = match ended {
            Some(ended) => ended,
            None if out_of_memory => {
                if let Err(failure) = live.first.kill(&live.record.cgroups) {
                    tracing::error!(id = %live.id, %failure, "a box without memory was not ended");
                }
                live.first.ended().await
            }
            None => continue,
        };
        live.over.cancel();
        if let Err(error) = ended {
            tracing::error!(id = %live.id, %error, "the box can not be watched any more");
        } else if !live.first.is_ending() {
            let news = WardEvent::Exited {
                id: live.id.clone(),
                out_of_memory,
            };
            // Nobody listens: the server is on its way out.
            let _told = events.send(news).await;
        }
        return;
    }
}
