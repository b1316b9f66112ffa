//! The ledger on real files.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{collections::BTreeMap, path::Path, time::Duration};

use sandkeep_model::{
    BoxTime, Code, EventKind, GoneReason, Identity, Isolation, Limits, ListFilter, OnTimeout,
    Order, Sandbox, SandboxId, Secret, State, Timestamp,
};
use sandkeep_store::{Claim, Idempotency, NewBox, Store};

fn sandbox(started_at: i64) -> Sandbox {
    Sandbox {
        id: SandboxId::random(),
        template: "base".parse().unwrap(),
        isolation: Isolation::Container,
        limits: Limits::default(),
        state: State::Creating,
        created_at: Timestamp::from_millis(started_at),
        started_at: Timestamp::from_millis(started_at),
        end_at: None,
        on_timeout: OnTimeout::Kill,
        env: BTreeMap::from([("A".into(), "ä=1".into())]),
        metadata: BTreeMap::from([("user".into(), "O'Hara \"x\"".into())]),
        identity: serde_json::from_str(r#"{"org": "acme", "scopes": ["a:b"]}"#).unwrap(),
        ports: sandkeep_model::PortAccess::Private,
        e2b: sandkeep_model::E2bSettings::default(),
        access_token: Secret::random(),
        gone: None,
        gone_at: None,
        oom_kills: 0,
        time: BoxTime::default(),
    }
}

async fn open() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().join("ledger.db")).await.unwrap();
    (dir, store)
}

async fn add(store: &Store, sandbox: &Sandbox) {
    let new = NewBox {
        sandbox,
        pooled: false,
        network: None,
        idempotency: None,
        by: None,
    };
    store.insert(new).await.unwrap();
}

async fn add_running(store: &Store, sandbox: &Sandbox) {
    add(store, sandbox).await;
    let note = serde_json::json!({"pid": 7});
    assert!(
        store
            .mark_running(&sandbox.id, &note, sandbox.started_at, None, false)
            .await
            .unwrap()
    );
}

#[tokio::test]
async fn a_box_comes_back_as_it_was_written() {
    let (dir, store) = open().await;
    let mut made = sandbox(1000);
    made.end_at = Some(Timestamp::from_millis(5000));
    add(&store, &made).await;
    drop(store);
    let store = Store::open(dir.path().join("ledger.db")).await.unwrap();
    let record = store.get(&made.id).await.unwrap().unwrap();
    assert_eq!(record.sandbox, made);
    assert_eq!(record.ward, None);
    assert!(!record.pooled);
    assert!(store.get(&SandboxId::random()).await.unwrap().is_none());
}

#[tokio::test]
async fn a_step_from_the_wrong_state_changes_nothing() {
    let (_dir, store) = open().await;
    let made = sandbox(1);
    add_running(&store, &made).await;
    let stop = |from| store.begin_stop(&made.id, from, &GoneReason::Killed, None);
    assert!(stop(State::Creating).await.unwrap().is_none());
    assert!(stop(State::Running).await.unwrap().is_some());
    assert!(stop(State::Running).await.unwrap().is_none());
    let row = store.get(&made.id).await.unwrap().unwrap();
    assert_eq!(row.sandbox.state, State::Stopping);
    assert_eq!(row.sandbox.gone, Some(GoneReason::Killed));
    assert!(
        store
            .finish(&made.id, State::Stopping, &GoneReason::Killed)
            .await
            .unwrap()
            .is_some()
    );
    let row = store.get(&made.id).await.unwrap().unwrap();
    assert_eq!(row.sandbox.state, State::Gone);
    assert!(row.sandbox.gone_at.is_some());
    assert_eq!(row.ward, None);
    let states: Vec<_> = store
        .events_after(0, Some(&made.id), 100)
        .await
        .unwrap()
        .into_iter()
        .map(|event| match event.kind {
            EventKind::State { from, to, why, .. } => (from, to, why),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(
        states,
        [
            (None, State::Creating, None),
            (Some(State::Creating), State::Running, None),
            (Some(State::Running), State::Stopping, None),
            (Some(State::Stopping), State::Gone, Some(GoneReason::Killed)),
        ]
    );
}

#[tokio::test]
async fn of_many_claims_on_one_pooled_box_one_wins() {
    let (_dir, store) = open().await;
    let pooled = sandbox(1);
    let new = NewBox {
        sandbox: &pooled,
        pooled: true,
        network: None,
        idempotency: None,
        by: None,
    };
    assert!(store.insert(new).await.unwrap().is_none());
    let note = serde_json::json!(null);
    assert!(
        store
            .mark_running(&pooled.id, &note, pooled.started_at, None, true)
            .await
            .unwrap()
    );
    assert!(
        store
            .list(&ListFilter::default())
            .await
            .unwrap()
            .items
            .is_empty()
    );
    let claims = (0..8).map(|number| {
        let (store, pooled) = (store.clone(), pooled.clone());
        tokio::spawn(async move {
            let limits = Limits::default();
            let token = Secret::new(format!("token-{number}"));
            store
                .claim(&Claim {
                    id: &pooled.id,
                    limits: &limits,
                    started_at: Timestamp::from_millis(9),
                    end_at: Some(Timestamp::from_millis(99)),
                    on_timeout: OnTimeout::Kill,
                    env: &BTreeMap::new(),
                    metadata: &BTreeMap::from([("number".into(), number.to_string())]),
                    ports: sandkeep_model::PortAccess::Public,
                    e2b: &sandkeep_model::E2bSettings::default(),
                    identity: &Identity::default(),
                    time: &BoxTime::default(),
                    access_token: &token,
                    network: None,
                    idempotency: None,
                    by: Some("key:1"),
                })
                .await
                .unwrap()
                .map(|_| number)
        })
    });
    let mut winners = Vec::new();
    for claim in claims {
        winners.extend(claim.await.unwrap());
    }
    assert_eq!(winners.len(), 1);
    let row = store.get(&pooled.id).await.unwrap().unwrap();
    assert!(!row.pooled);
    assert_eq!(row.sandbox.metadata["number"], winners[0].to_string());
    assert_eq!(
        row.sandbox.access_token.expose(),
        format!("token-{}", winners[0])
    );
    assert_eq!(store.events_after(0, None, 10).await.unwrap().len(), 1);
}

#[tokio::test]
async fn subscribers_hear_events_in_ledger_order() {
    let (_dir, store) = open().await;
    let mut heard = store.subscribe();
    let adds = (0..50).map(|n| {
        let store = store.clone();
        tokio::spawn(async move { add(&store, &sandbox(n)).await })
    });
    for task in adds.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    let mut seqs = Vec::new();
    while let Ok(event) = heard.try_recv() {
        seqs.push(event.seq);
    }
    assert_eq!(seqs, (1..=50).collect::<Vec<_>>());
    assert_eq!(store.last_event().await.unwrap(), 50);
    let rest = store.events_after(45, None, 3).await.unwrap();
    assert_eq!(
        rest.iter().map(|event| event.seq).collect::<Vec<_>>(),
        [46, 47, 48]
    );
}

#[tokio::test]
async fn keys_are_unique_until_their_box_never_was() {
    let (_dir, store) = open().await;
    let given = Idempotency {
        key: "k".into(),
        hash: "h".into(),
    };
    let insert = async |made: &Sandbox| {
        let new = NewBox {
            sandbox: made,
            pooled: false,
            network: None,
            idempotency: Some(&given),
            by: None,
        };
        store.insert(new).await
    };
    let (first, second) = (sandbox(1), sandbox(2));
    insert(&first).await.unwrap();
    let error = insert(&second).await.unwrap_err();
    assert_eq!(error.code, Code::Conflict);
    let (found, hash) = store.by_key("k").await.unwrap().unwrap();
    assert_eq!((found.sandbox.id, hash.as_str()), (first.id.clone(), "h"));
    let failed = GoneReason::CreateFailed {
        message: "no".into(),
    };
    store
        .finish(&first.id, State::Creating, &failed)
        .await
        .unwrap();
    assert!(store.by_key("k").await.unwrap().is_none());
    insert(&second).await.unwrap();
}

#[tokio::test]
async fn pages_meet_without_gap_or_overlap() {
    let (_dir, store) = open().await;
    let mut all = Vec::new();
    for n in 0..25 {
        // Pairs share a time, so the id decides.
        let mut made = sandbox(n / 2);
        made.metadata.insert("parity".into(), (n % 2).to_string());
        if n == 3 {
            made.template = "other".parse().unwrap();
        }
        add(&store, &made).await;
        all.push(made);
    }
    all.sort_by_key(|made| (made.started_at, made.id.clone()));
    for order in [Order::Asc, Order::Desc] {
        let mut filter = ListFilter {
            order,
            limit: 4,
            ..ListFilter::default()
        };
        let mut seen = Vec::new();
        loop {
            let page = store.list(&filter).await.unwrap();
            assert!(page.items.len() <= 4);
            seen.extend(page.items.into_iter().map(|made| made.id));
            filter.after = page.next;
            if filter.after.is_none() {
                break;
            }
        }
        if order == Order::Desc {
            seen.reverse();
        }
        let expected: Vec<_> = all.iter().map(|made| made.id.clone()).collect();
        assert_eq!(seen, expected);
    }
    let odd = ListFilter {
        metadata: BTreeMap::from([
            ("parity".into(), "1".into()),
            ("user".into(), "O'Hara \"x\"".into()),
        ]),
        ..ListFilter::default()
    };
    let page = store.list(&odd).await.unwrap();
    assert_eq!(page.items.len(), 12);
    assert!(page.next.is_none());
    let mut none = odd;
    none.metadata.insert("missing".into(), String::new());
    assert!(store.list(&none).await.unwrap().items.is_empty());
    let other = ListFilter {
        template: Some("other".parse().unwrap()),
        started_after: Some(Timestamp::from_millis(0)),
        ..ListFilter::default()
    };
    assert_eq!(store.list(&other).await.unwrap().items.len(), 1);
}

#[tokio::test]
async fn a_full_page_that_is_the_last_has_no_next() {
    let (_dir, store) = open().await;
    for n in 0..4 {
        add(&store, &sandbox(n)).await;
    }
    let filter = ListFilter {
        limit: 4,
        ..ListFilter::default()
    };
    let page = store.list(&filter).await.unwrap();
    assert_eq!(page.items.len(), 4);
    assert!(page.next.is_none());
}

#[tokio::test]
async fn gone_boxes_are_listed_only_when_asked_for() {
    let (_dir, store) = open().await;
    let (alive, dead) = (sandbox(1), sandbox(2));
    add_running(&store, &alive).await;
    add_running(&store, &dead).await;
    store
        .finish(&dead.id, State::Running, &GoneReason::Expired)
        .await
        .unwrap();
    let ids = async |states: Vec<State>| {
        let filter = ListFilter {
            states,
            ..ListFilter::default()
        };
        let page = store.list(&filter).await.unwrap();
        page.items.into_iter().map(|b| b.id).collect::<Vec<_>>()
    };
    assert_eq!(ids(vec![]).await, std::slice::from_ref(&alive.id));
    assert_eq!(ids(vec![State::Gone]).await, std::slice::from_ref(&dead.id));
    assert_eq!(
        ids(vec![State::Gone, State::Running]).await,
        [dead.id.clone(), alive.id.clone()]
    );
    assert!(ids(vec![State::Paused]).await.is_empty());
    assert_eq!(store.live().await.unwrap().len(), 1);
}

#[tokio::test]
async fn history_is_pruned_with_its_events_and_the_living_stay() {
    let (_dir, store) = open().await;
    let (alive, dead) = (sandbox(1), sandbox(2));
    add_running(&store, &alive).await;
    add_running(&store, &dead).await;
    store.set_end(&alive.id, None).await.unwrap();
    store
        .finish(&dead.id, State::Running, &GoneReason::Killed)
        .await
        .unwrap();
    assert_eq!(store.prune(Timestamp::from_millis(5)).await.unwrap(), 0);
    let later = Timestamp::now().plus(Duration::from_secs(60));
    assert_eq!(store.prune(later).await.unwrap(), 1);
    assert!(store.get(&dead.id).await.unwrap().is_none());
    let left = store.events_after(0, None, 100).await.unwrap();
    assert!(left.iter().all(|event| event.sandbox_id == alive.id));
    assert_eq!(left.len(), 2, "{left:?}");
    // Numbers are not given out twice, even when the newest event was dropped.
    let next = store.set_end(&alive.id, None).await.unwrap().unwrap();
    assert_eq!(next.seq, 7);
}

#[tokio::test]
async fn kills_by_the_kernel_are_counted_once() {
    let (_dir, store) = open().await;
    let made = sandbox(1);
    add_running(&store, &made).await;
    assert!(store.set_oom_kills(&made.id, 2).await.unwrap().is_some());
    assert!(store.set_oom_kills(&made.id, 2).await.unwrap().is_none());
    let row = store.get(&made.id).await.unwrap().unwrap();
    assert_eq!(row.sandbox.oom_kills, 2);
}

/// A small tmpfs, gone with the value.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let done = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
            .arg(dir.path())
            .status()
            .unwrap();
        assert!(done.success(), "mounting a tmpfs needs root");
        Self(dir)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount")
            .arg("--lazy")
            .arg(self.0.path())
            .status();
    }
}

#[tokio::test]
async fn a_full_disk_is_told_as_such_and_loses_nothing() {
    let disk = SmallDisk::mount();
    let store = Store::open(disk.path().join("ledger.db")).await.unwrap();
    let first = sandbox(0);
    add(&store, &first).await;
    // Fill what is left, the way a log file would.
    let mut filler = std::fs::File::create(disk.path().join("filler")).unwrap();
    while std::io::Write::write_all(&mut filler, &[0; 4096]).is_ok() {}
    let mut refused = None;
    for n in 1..2000 {
        let made = sandbox(n);
        let new = NewBox {
            sandbox: &made,
            pooled: false,
            network: None,
            idempotency: None,
            by: None,
        };
        if let Err(error) = store.insert(new).await {
            refused = Some(error);
            break;
        }
    }
    let error = refused.expect("the disk is full");
    assert_eq!(error.code, Code::DiskFull, "{error}");
    assert!(error.message.contains("full"), "{error}");
    assert!(error.hint.is_some());
    drop(filler);
    std::fs::remove_file(disk.path().join("filler")).unwrap();
    let last = sandbox(5000);
    add(&store, &last).await;
    for id in [&first.id, &last.id] {
        assert!(store.get(id).await.unwrap().is_some());
    }
}
