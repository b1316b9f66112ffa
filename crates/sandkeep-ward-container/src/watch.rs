//! Watches one box: the end of its PID 1, and kills for want of memory.

use crate::live::Live;
use sandkeep_ward::WardEvent;
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::mpsc::Sender,
    time::{MissedTickBehavior, interval},
};

/// How often the count of memory kills is read: one small file per box.
const LOOK: Duration = Duration::from_millis(500);

/// Runs until the box has ended or nobody listens any more.
pub async fn watch(live: Arc<Live>, mut kills: u64, events: Sender<WardEvent>) {
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let ended = tokio::select! {
            ended = live.first.ended() => Some(ended),
            _ = look.tick() => None,
        };
        let before = kills;
        if let Ok(now) = live.record.cgroups.oom_kills() {
            kills = kills.max(now);
        }
        if kills > before {
            let news = WardEvent::OutOfMemory {
                id: live.id.clone(),
                kills,
            };
            if events.send(news).await.is_err() {
                return;
            }
        }
        if let Some(ended) = ended {
            if let Err(error) = ended {
                tracing::error!(id = %live.id, %error, "the box can not be watched any more");
            } else if !live.first.is_ending() {
                let news = WardEvent::Exited {
                    id: live.id.clone(),
                    out_of_memory: kills > before,
                };
                // Nobody listens: the server is on its way out.
                let _told = events.send(news).await;
            }
            return;
        }
    }
}
