//! What Prometheus is told. One test: the recorder is the process's only one.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::sync::atomic::Ordering;

use metrics_exporter_prometheus::PrometheusBuilder;
use sandkeep_model::{GoneReason, ListFilter};
use sandkeep_ward::WardEvent;
use support::{World, pooled, request, until};

#[tokio::test(flavor = "multi_thread")]
async fn boxes_creations_and_kills_are_counted() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).unwrap();
    let has = |line: &str| handle.render().lines().any(|found| found == line);

    let mut world = World::new().await;
    world.config.pool.size = 1;
    world.config.max_boxes = 3;
    let keeper = world.keeper().await;
    pooled(&keeper, 1).await;
    assert!(has("sandkeep_boxes{state=\"pooled\"} 1"));
    let first = keeper.create(request()).await.unwrap();
    pooled(&keeper, 1).await;
    let mut cold = request();
    cold.template = {
        world.import("other").await;
        "other".parse().unwrap()
    };
    let second = keeper.create(cold.clone()).await.unwrap();
    assert!(has("sandkeep_boxes{state=\"running\"} 2"));
    world.ward.faults.start.store(1, Ordering::SeqCst);
    keeper.create(cold).await.unwrap_err();
    world
        .ward
        .say(WardEvent::OutOfMemory {
            id: second.id.clone(),
            kills: 2,
        })
        .await;
    until("two kills counted", async || {
        has("sandkeep_oom_kills_total 2").then_some(())
    })
    .await;
    for id in [&first.id, &second.id] {
        keeper.kill(id, GoneReason::Killed).await.unwrap();
    }
    for line in [
        "sandkeep_boxes{state=\"running\"} 0",
        "sandkeep_boxes{state=\"creating\"} 0",
        "sandkeep_boxes{state=\"stopping\"} 0",
        "sandkeep_creates_total{path=\"pool\",result=\"ok\"} 1",
        "sandkeep_creates_total{path=\"cold\",result=\"ok\"} 1",
        "sandkeep_creates_total{path=\"cold\",result=\"error\"} 1",
        "sandkeep_gone_total{reason=\"killed\"} 2",
        "sandkeep_gone_total{reason=\"create_failed\"} 1",
    ] {
        until(line, async || has(line).then_some(())).await;
    }
    let text = handle.render();
    assert!(text.contains("sandkeep_create_seconds"), "{text}");
    assert!(text.contains("# HELP sandkeep_pool_size"), "{text}");
    assert!(
        keeper
            .list(&ListFilter::default())
            .await
            .unwrap()
            .items
            .is_empty()
    );
    keeper.shutdown().await;
    world.config.pool.size = 0;
    world.forget_ward();
    let _keeper = world.keeper().await;
    until("nothing is left", async || {
        world.ward.alive().is_empty().then_some(())
    })
    .await;
}
