//! From create to gone.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::{collections::BTreeMap, sync::atomic::Ordering, time::Duration};

use sandkeep_model::{
    Code, EventKind, Expiry, GoneReason, Isolation, IsolationWish, LimitsWish, ListFilter,
    SandboxId, State, Timestamp,
};
use sandkeep_ward::WardEvent;
use support::{World, agent, envs, reaches, request, story, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_box_lives_and_dies() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let mut events = keeper.subscribe();
    let made = keeper.create(request()).await.unwrap();
    assert_eq!(made.state, State::Running);
    assert_eq!(made.isolation, Isolation::Process);
    assert!(made.end_at.is_some());
    let id = made.id.clone();

    agent(&keeper, &id).await.health().await.unwrap();
    let env = envs(&keeper, &id).await;
    assert_eq!(env["COLOUR"], "blue");
    assert_eq!(env["E2B_SANDBOX_ID"], id.as_str());
    assert_eq!(env["E2B_TEMPLATE_ID"], "base");

    let view = keeper.view(&id).await.unwrap();
    assert_eq!(view.sandbox, made);
    assert!(view.usage.unwrap().memory_bytes > 0);
    let samples = keeper.samples(&id, None, None).await.unwrap();
    assert_eq!(samples[0].disk_total, 64 << 20);
    let later = Timestamp::now().plus(Duration::from_secs(60));
    assert!(
        keeper
            .samples(&id, Some(later), None)
            .await
            .unwrap()
            .is_empty()
    );
    assert_eq!(keeper.access_token(&id).unwrap(), made.access_token);
    assert_eq!(keeper.live_tokens().len(), 1);
    assert_eq!(keeper.report().await.boxes, 1);

    let closed = keeper.closed(&id);
    keeper.kill(&id, GoneReason::Killed).await.unwrap();
    closed.await;
    let gone = reaches(&mut events, &id, State::Gone).await;
    assert!(matches!(
        gone.kind,
        EventKind::State {
            why: Some(GoneReason::Killed),
            ..
        }
    ));
    assert_eq!(
        story(&keeper, &id).await,
        ["creating", "running", "stopping", "gone: killed on request"]
    );
    assert_eq!(keeper.get(&id).await.unwrap_err().code, Code::NotFound);
    assert_eq!(
        keeper.connect(&id).await.err().unwrap().code,
        Code::NotFound
    );
    let remembered = keeper.get_any(&id).await.unwrap();
    assert_eq!(remembered.gone, Some(GoneReason::Killed));
    assert!(keeper.access_token(&id).is_none());
    keeper.closed(&id).await;
    let again = keeper.kill(&id, GoneReason::Killed).await.unwrap_err();
    assert_eq!(again.code, Code::NotFound);
    world.assert_empty().await;
    keeper.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_are_refused_in_words_and_leave_nothing() {
    let mut world = World::new().await;
    world.config.max_lifetime = Some(Duration::from_secs(3600));
    let keeper = world.keeper().await;

    let mut bad = request();
    bad.template = "nonsuch".parse().unwrap();
    let error = keeper.create(bad).await.unwrap_err();
    assert_eq!(error.code, Code::NotFound);
    assert_eq!(error.message, "template 'nonsuch' not found");
    assert!(error.hint.unwrap().contains("base"));

    let mut bad = request();
    bad.isolation = IsolationWish::Level(Isolation::Microvm);
    let error = keeper.create(bad).await.unwrap_err();
    assert_eq!(error.code, Code::NotEnforceable);
    assert!(error.message.contains("microvm"), "{error}");
    assert!(error.hint.unwrap().contains("process"));

    for (expiry, word) in [
        (Expiry::Never, "3600"),
        (Expiry::After(Duration::from_secs(3601)), "3600"),
        (Expiry::After(Duration::ZERO), "at least"),
    ] {
        let mut bad = request();
        bad.expiry = expiry;
        let error = keeper.create(bad).await.unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
        assert_eq!(error.field.as_deref(), Some("timeout"));
        assert!(error.message.contains(word), "{error}");
    }

    let mut bad = request();
    bad.limits = LimitsWish {
        memory_mib: Some(1 << 30),
        ..LimitsWish::default()
    };
    let error = keeper.create(bad).await.unwrap_err();
    assert_eq!(error.field.as_deref(), Some("limits.memory_mib"));

    let mut bad = request();
    bad.env = BTreeMap::from([("A=B".into(), String::new())]);
    assert_eq!(
        keeper.create(bad).await.unwrap_err().code,
        Code::InvalidArgument
    );

    let nobody = SandboxId::random();
    for error in [
        keeper.get(&nobody).await.unwrap_err(),
        keeper.get_any(&nobody).await.unwrap_err(),
        keeper.kill(&nobody, GoneReason::Killed).await.unwrap_err(),
        keeper.set_expiry(&nobody, Expiry::Never).await.unwrap_err(),
        keeper.samples(&nobody, None, None).await.unwrap_err(),
    ] {
        assert_eq!(error.code, Code::NotFound);
    }
    assert!(keeper.events_after(0, None, 10).await.unwrap().is_empty());
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_lacks_something_is_told() {
    let world = World::new().await;
    world.ward.unusable.store(true, Ordering::SeqCst);
    let keeper = world.keeper().await;
    for wish in [
        IsolationWish::Auto,
        IsolationWish::Level(Isolation::Process),
    ] {
        let mut request = request();
        request.isolation = wish;
        let error = keeper.create(request).await.unwrap_err();
        assert_eq!(error.code, Code::HostNotReady);
        assert!(error.message.contains("moon: it is new"), "{error}");
        assert!(error.hint.unwrap().contains("doctor"));
    }
    let report = keeper.report().await;
    assert!(!report.levels[0].usable);
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_says_so() {
    let mut world = World::new().await;
    world.config.max_boxes = 2;
    let keeper = world.keeper().await;
    let first = keeper.create(request()).await.unwrap();
    keeper.create(request()).await.unwrap();
    let error = keeper.create(request()).await.unwrap_err();
    assert_eq!(error.code, Code::ResourceExhausted);
    assert!(error.message.contains('2'), "{error}");
    keeper.kill(&first.id, GoneReason::Killed).await.unwrap();
    let third = keeper.create(request()).await.unwrap();
    let page = keeper.list(&ListFilter::default()).await.unwrap();
    assert_eq!(page.items.len(), 2);
    assert_eq!(page.items[0].id, third.id);
    for sandbox in page.items {
        keeper.kill(&sandbox.id, GoneReason::Killed).await.unwrap();
    }
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_box_whose_time_is_over_ends() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let mut events = keeper.subscribe();
    let mut brief = request();
    brief.expiry = Expiry::After(Duration::from_secs(1));
    let brief = keeper.create(brief).await.unwrap();
    let endless = {
        let mut request = request();
        request.expiry = Expiry::Never;
        keeper.create(request).await.unwrap()
    };
    assert_eq!(endless.end_at, None);
    let gone = reaches(&mut events, &brief.id, State::Gone).await;
    assert!(gone.at >= brief.end_at.unwrap());
    assert_eq!(
        keeper.get_any(&brief.id).await.unwrap().gone,
        Some(GoneReason::Expired)
    );

    // Shortening works at once, and a longer time later is a new end.
    let minute = Expiry::After(Duration::from_secs(60));
    let with_end = keeper.set_expiry(&endless.id, minute).await.unwrap();
    let end = with_end.end_at.unwrap();
    let sooner = Expiry::After(Duration::from_secs(5));
    let same = keeper.extend(&endless.id, sooner).await.unwrap();
    assert_eq!(same.end_at, Some(end));
    let hour = Expiry::After(Duration::from_secs(3600));
    let longer = keeper.extend(&endless.id, hour).await.unwrap();
    assert!(longer.end_at.unwrap() > end);
    let now = Expiry::After(Duration::ZERO);
    keeper.set_expiry(&endless.id, now).await.unwrap();
    reaches(&mut events, &endless.id, State::Gone).await;
    assert_eq!(
        story(&keeper, &endless.id).await,
        [
            "creating",
            "running",
            "expiry_changed",
            "expiry_changed",
            "expiry_changed",
            "stopping",
            "gone: reached the end of its time"
        ]
    );
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_refresh_outlives_the_longest_life() {
    let mut world = World::new().await;
    world.config.max_lifetime = Some(Duration::from_secs(600));
    let keeper = world.keeper().await;
    let made = keeper.create(request()).await.unwrap();
    let all = Expiry::After(Duration::from_secs(600));
    let extended = keeper.extend(&made.id, all).await.unwrap();
    let longest = made.started_at.plus(Duration::from_secs(600));
    assert_eq!(extended.end_at, Some(longest));
    let error = keeper
        .set_expiry(&made.id, Expiry::Never)
        .await
        .unwrap_err();
    assert!(error.message.contains("600"), "{error}");
    keeper.kill(&made.id, GoneReason::Killed).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_box_that_ends_by_itself_is_cleared_away() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let mut events = keeper.subscribe();
    let made = keeper.create(request()).await.unwrap();
    let pid = rustix::process::Pid::from_raw(world.ward.pid(&made.id)).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    reaches(&mut events, &made.id, State::Gone).await;
    let gone = keeper.get_any(&made.id).await.unwrap();
    assert_eq!(gone.gone, Some(GoneReason::Exited));
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kills_for_want_of_memory_are_told() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let mut events = keeper.subscribe();
    let made = keeper.create(request()).await.unwrap();
    let id = made.id.clone();
    let kills = |kills| WardEvent::OutOfMemory {
        id: id.clone(),
        kills,
    };
    world.ward.say(kills(1)).await;
    world.ward.say(kills(3)).await;
    until("three kills", async || {
        (keeper.get(&id).await.unwrap().oom_kills == 3).then_some(())
    })
    .await;
    world
        .ward
        .say(WardEvent::Exited {
            id: id.clone(),
            out_of_memory: true,
        })
        .await;
    reaches(&mut events, &id, State::Gone).await;
    assert_eq!(
        story(&keeper, &id).await,
        [
            "creating",
            "running",
            "out_of_memory",
            "out_of_memory",
            "stopping",
            "gone: ended by the kernel: out of memory"
        ]
    );
    assert_eq!(keeper.get_any(&id).await.unwrap().oom_kills, 3);
    world.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_filtered_and_paged() {
    let world = World::new().await;
    let keeper = world.keeper().await;
    let mut made = Vec::new();
    for n in 0..5 {
        let mut request = request();
        request.metadata = BTreeMap::from([("odd".into(), (n % 2).to_string())]);
        made.push(keeper.create(request).await.unwrap());
    }
    let mut filter = ListFilter {
        metadata: BTreeMap::from([("odd".into(), "0".into())]),
        limit: 2,
        ..ListFilter::default()
    };
    let first = keeper.list(&filter).await.unwrap();
    assert_eq!(
        support::ids(&first.items),
        [made[4].id.clone(), made[2].id.clone()]
    );
    filter.after = first.next;
    let second = keeper.list(&filter).await.unwrap();
    assert_eq!(second.items, [made[0].clone()]);
    assert!(second.next.is_none());
    for sandbox in made {
        keeper.kill(&sandbox.id, GoneReason::Killed).await.unwrap();
    }
    world.assert_empty().await;
}
