//! A small world for the keeper: a real ledger, a real vault on a small pool, real agents.

#![allow(dead_code, unused_imports, reason = "not every test uses all of it")]

mod bare;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

pub use bare::{BareWard, NETWORK_PERMITS, runs, stopped};
use sandkeep_agent_client::Agent;
use sandkeep_keeper::{IsolationRule, Keeper, KeeperConfig, Limiting, NetworkConfig, PoolConfig};
use sandkeep_model::{
    CreateSandbox, Event, EventKind, Expiry, IsolationWish, Limits, LimitsWish, OnTimeout, Sandbox,
    SandboxId, State, TemplateName, TimeWish,
};
use sandkeep_store::Store;
use sandkeep_vault::{ImportLimits, Vault, VaultConfig};
use sandkeep_ward::Ward;
use tokio::sync::broadcast;

/// Generous: the machine may be busy. Only a test that fails waits this long.
const PATIENCE: Duration = Duration::from_secs(30);

pub struct World {
    pub dir: tempfile::TempDir,
    pub vault: Vault,
    pub ward: Arc<BareWard>,
    pub config: KeeperConfig,
    pool: PathBuf,
}

impl World {
    pub async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let vault = Vault::open(VaultConfig {
            state_dir: dir.path().join("state"),
            pool_dir: None,
            pool_size_bytes: Some(2 << 30),
            allow_unlimited_disk: false,
            disk_reader: None,
        })
        .await
        .unwrap();
        let pool = vault.pool().await.unwrap().path;
        let world = Self {
            ward: BareWard::new(&dir.path().join("ward")),
            dir,
            vault,
            config: config(),
            pool,
        };
        world.import("base").await;
        world
    }

    /// A root file system with next to nothing in it.
    pub async fn import(&self, name: &str) {
        let mut tar = tar::Builder::new(Vec::new());
        let text = b"root:x:0:0:root:/root:/bin/sh\n";
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        tar.append_data(&mut header, "etc/passwd", &text[..])
            .unwrap();
        let bytes = std::io::Cursor::new(tar.into_inner().unwrap());
        let name: TemplateName = name.parse().unwrap();
        self.vault
            .import_reader(&name, bytes, ImportLimits::default(), |_| {})
            .await
            .unwrap();
    }

    pub fn ledger(&self) -> PathBuf {
        self.dir.path().join("ledger.db")
    }

    pub async fn keeper(&self) -> Keeper {
        let store = Store::open(self.ledger()).await.unwrap();
        self.keeper_with(store).await
    }

    pub async fn keeper_with(&self, store: Store) -> Keeper {
        let ward: Arc<dyn Ward> = Arc::clone(&self.ward) as _;
        Keeper::open(self.config.clone(), store, self.vault.clone(), vec![ward])
            .await
            .unwrap()
    }

    /// What a new server process would have: a ward that knows nothing.
    pub fn forget_ward(&mut self) {
        self.ward = BareWard::after(&self.ward);
    }

    /// Nothing of any box is left: no process, no disk.
    pub async fn assert_empty(&self) {
        assert_eq!(self.ward.alive(), []);
        assert_eq!(self.vault.disks().await.unwrap(), []);
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.ward.end_all();
        // Lazily, because one of those may still have its feet in it.
        let _ = std::process::Command::new("umount")
            .arg("--lazy")
            .arg(&self.pool)
            .status();
    }
}

pub fn config() -> KeeperConfig {
    let most = Limits {
        cpu_millis: 4000,
        memory_mib: 4096,
        pids: 4096,
        disk_mib: 20_480,
        open_files: 1 << 20,
    };
    KeeperConfig {
        isolation: IsolationRule::default(),
        limits: Limiting {
            default: Limits {
                disk_mib: 64,
                ..Limits::default()
            },
            most,
        },
        pool: PoolConfig {
            size: 0,
            template: "base".parse().unwrap(),
            isolation: IsolationWish::Auto,
        },
        max_boxes: 50,
        max_lifetime: None,
        paused_limit: None,
        keep_history: Duration::from_secs(3600),
        network: NetworkConfig::default(),
        points: None,
        trusted_servers: Vec::new(),
    }
}

pub fn request() -> CreateSandbox {
    CreateSandbox {
        template: "base".parse().unwrap(),
        isolation: IsolationWish::Auto,
        limits: LimitsWish::default(),
        expiry: Expiry::After(Duration::from_secs(300)),
        on_timeout: OnTimeout::Kill,
        env: BTreeMap::from([("COLOUR".to_owned(), "blue".to_owned())]),
        metadata: BTreeMap::new(),
        ports: sandkeep_model::PortAccess::Private,
        e2b: sandkeep_model::E2bSettings::default(),
        identity: sandkeep_model::Identity::default(),
        time: TimeWish::default(),
        idempotency_key: None,
        by: None,
    }
}

pub fn keyed(key: &str) -> CreateSandbox {
    CreateSandbox {
        idempotency_key: Some(key.to_owned()),
        ..request()
    }
}

pub async fn agent(keeper: &Keeper, id: &SandboxId) -> Agent {
    Agent::over(keeper.connect(id).await.unwrap())
        .await
        .unwrap()
}

/// The environment the box's agent gives to every process.
pub async fn envs(keeper: &Keeper, id: &SandboxId) -> serde_json::Value {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut channel = keeper.connect(id).await.unwrap();
    channel
        .write_all(b"GET /envs HTTP/1.1\r\nHost: box\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut answer = String::new();
    channel.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    serde_json::from_str(body).unwrap()
}

/// Waits for the event that tells a box is in `state`.
pub async fn reaches(
    events: &mut broadcast::Receiver<Event>,
    id: &SandboxId,
    state: State,
) -> Event {
    let wait = async {
        loop {
            let event = events.recv().await.unwrap();
            if event.sandbox_id == *id
                && matches!(event.kind, EventKind::State { to, .. } if to == state)
            {
                return event;
            }
        }
    };
    tokio::time::timeout(PATIENCE, wait)
        .await
        .unwrap_or_else(|_| panic!("{id} never was {state}"))
}

/// Looks again and again: for things nobody sends an event about, like the pool.
pub async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub async fn pooled(keeper: &Keeper, count: usize) {
    until(&format!("{count} pooled boxes"), async || {
        (keeper.report().await.pooled == count).then_some(())
    })
    .await;
}

/// The states a box went through, as the ledger tells it.
pub async fn story(keeper: &Keeper, id: &SandboxId) -> Vec<String> {
    let events = keeper.events_after(0, Some(id), 100).await.unwrap();
    assert!(events.is_sorted_by_key(|event| event.seq));
    events
        .into_iter()
        .map(|event| match event.kind {
            EventKind::State { to, why, .. } => match why {
                Some(why) => format!("{to}: {why}"),
                None => to.to_string(),
            },
            other => other.name().to_owned(),
        })
        .collect()
}

pub fn ids(boxes: &[Sandbox]) -> Vec<SandboxId> {
    boxes.iter().map(|sandbox| sandbox.id.clone()).collect()
}
