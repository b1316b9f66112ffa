//! Points and pauses in the ledger.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;

use sandkeep_model::{
    BoxTime, EngineBuild, EventKind, Identity, Isolation, Limits, OnTimeout, Pause, PauseMode,
    Point, PointId, PointKind, PointReason, PointWhy, Sandbox, SandboxId, Secret, State, Timestamp,
};
use sandkeep_store::{NewBox, Store, TimeStep, WardNote};

fn sandbox() -> Sandbox {
    Sandbox {
        id: SandboxId::random(),
        template: "base".parse().unwrap(),
        isolation: Isolation::Container,
        limits: Limits::default(),
        state: State::Running,
        created_at: Timestamp::from_millis(1),
        started_at: Timestamp::from_millis(1),
        end_at: Some(Timestamp::from_millis(99)),
        on_timeout: OnTimeout::Pause,
        env: BTreeMap::new(),
        metadata: BTreeMap::new(),
        identity: Identity::default(),
        ports: sandkeep_model::PortAccess::Private,
        e2b: sandkeep_model::E2bSettings::default(),
        access_token: Secret::random(),
        gone: None,
        gone_at: None,
        oom_kills: 0,
        time: BoxTime {
            auto_resume: true,
            lease_seconds: Some(60),
            ..BoxTime::default()
        },
    }
}

fn point(of: &SandboxId, at: i64) -> Point {
    Point {
        id: PointId::random(),
        sandbox_id: of.clone(),
        parent: None,
        name: None,
        tags: vec!["nightly".to_owned()],
        kind: PointKind::Snapshot,
        reason: None,
        engine: None,
        why_disk_only: Some("no engine".to_owned()),
        created_at: Timestamp::from_millis(at),
        bytes: 4096,
        added_bytes: 1024,
        isolation: Isolation::Container,
        template: "base".parse().unwrap(),
        limits: Limits::default(),
    }
}

async fn store(dir: &tempfile::TempDir, made: &Sandbox) -> Store {
    let store = Store::open(dir.path().join("ledger.db")).await.unwrap();
    store
        .insert(NewBox {
            sandbox: made,
            pooled: false,
            network: None,
            idempotency: None,
            by: None,
        })
        .await
        .unwrap();
    store
}

#[tokio::test]
async fn points_come_back_as_they_went() {
    let dir = tempfile::tempdir().unwrap();
    let made = sandbox();
    let store = store(&dir, &made).await;
    let first = point(&made.id, 5);
    let second = Point {
        parent: Some(first.id.clone()),
        name: Some("good".to_owned()),
        engine: Some(EngineBuild {
            name: "runsc".to_owned(),
            build: "1".to_owned(),
        }),
        why_disk_only: None,
        ..point(&made.id, 6)
    };
    for one in [&second, &first] {
        store.insert_point(one).await.unwrap();
    }
    let other = point(&SandboxId::random(), 7);
    store.insert_point(&other).await.unwrap();

    let third = Point {
        parent: Some(second.id.clone()),
        kind: PointKind::Auto,
        reason: Some(PointReason::of_command(
            PointWhy::BeforeMatching,
            "rm -rf /",
            Some("risky".to_owned()),
        )),
        ..point(&made.id, 8)
    };
    store.insert_point(&third).await.unwrap();

    let of_box = store.points_of(&made.id).await.unwrap();
    assert_eq!(of_box, [first.clone(), second.clone(), third.clone()]);
    assert_eq!(store.points().await.unwrap().len(), 4);
    assert_eq!(
        store.points_named("good").await.unwrap(),
        std::slice::from_ref(&second)
    );
    assert_eq!(store.point(&first.id).await.unwrap().unwrap(), first);

    assert!(store.delete_point(&first).await.unwrap());
    assert!(!store.delete_point(&first).await.unwrap());
    assert_eq!(store.point(&first.id).await.unwrap(), None);
    // A child stays whole, and comes after what its parent came after.
    let orphan = store.point(&second.id).await.unwrap().unwrap();
    assert_eq!(orphan.parent, None);
    let labelled = Point {
        name: Some("better".to_owned()),
        tags: vec!["keep".to_owned()],
        ..orphan
    };
    assert!(store.label_point(&labelled).await.unwrap());
    assert_eq!(store.point(&second.id).await.unwrap().unwrap(), labelled);
    assert!(store.delete_point(&labelled).await.unwrap());
    assert!(!store.label_point(&labelled).await.unwrap());
    let last = store.point(&third.id).await.unwrap().unwrap();
    assert_eq!(last.parent, None);
    assert_eq!(last.reason, third.reason);
    let told: Vec<_> = store
        .events_after(0, Some(&made.id), 100)
        .await
        .unwrap()
        .into_iter()
        .map(|event| event.kind.name())
        .collect();
    assert_eq!(
        told,
        [
            "state",
            "point_made",
            "point_made",
            "point_made",
            "point_deleted",
            "point_deleted"
        ]
    );
}

#[tokio::test]
async fn a_step_is_taken_once_and_with_everything_that_belongs_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let made = sandbox();
    let store = store(&dir, &made).await;
    let time = BoxTime {
        pause: Some(Pause {
            mode: PauseMode::Ram,
            why: Some("no engine".to_owned()),
            point: None,
            touched: false,
            at: Timestamp::from_millis(50),
        }),
        ..made.time.clone()
    };
    let step = TimeStep {
        from: State::Running,
        to: State::Paused,
        time: &time,
        ward: WardNote::Set(&serde_json::json!({"pid": 7})),
        end_at: None,
        also: Some(EventKind::Paused {
            mode: PauseMode::Ram,
            why: None,
        }),
    };
    assert!(store.step(&made.id, step.clone()).await.unwrap());
    assert!(!store.step(&made.id, step).await.unwrap());
    let row = store.get(&made.id).await.unwrap().unwrap();
    assert_eq!(row.sandbox.state, State::Paused);
    assert_eq!(row.sandbox.time, time);
    assert_eq!(row.sandbox.end_at, None);
    assert_eq!(row.ward.unwrap()["pid"], 7);

    let step = |from, to, ward| TimeStep {
        from,
        to,
        time: &made.time,
        ward,
        end_at: Some(Timestamp::from_millis(200)),
        also: None,
    };
    let awake = step(State::Paused, State::Resuming, WardNote::Keep);
    assert!(store.step(&made.id, awake).await.unwrap());
    let row = store.get(&made.id).await.unwrap().unwrap();
    assert_eq!(row.ward.unwrap()["pid"], 7);
    let lost = step(State::Resuming, State::Paused, WardNote::Forget);
    assert!(store.step(&made.id, lost).await.unwrap());
    let row = store.get(&made.id).await.unwrap().unwrap();
    assert_eq!(row.ward, None);
    assert_eq!(row.sandbox.time, made.time);
    let events = store.events_after(0, Some(&made.id), 100).await.unwrap();
    assert_eq!(events.len(), 5, "{events:?}");
}
