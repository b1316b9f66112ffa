//! Opening the ledger: mode, soundness, schema.

use std::{
    fs::{OpenOptions, Permissions},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sandkeep_model::{Error, Event, Result};
use sqlx::{
    ConnectOptions, SqlSafeStr, SqliteConnection, SqlitePool,
    migrate::{Migration, MigrationType, Migrator},
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tokio::sync::{Mutex, broadcast};

use crate::{ahead::Ahead, fault, writer::Writer};

/// Reading never waits for the writer, so a few connections are plenty.
const READERS: u32 = 4;
/// Larger files are not checked page by page at the start: that would hold up the server.
const CHECKED_UP_TO: u64 = 64 * 1024 * 1024;
/// The writer folds the log into the file itself only when [`Store::checkpoint`] was not
/// called for long: that waits for the disk.
const WAL_PAGES: &str = "8000";
/// Events a subscriber may lag behind before it is told to read them from the ledger.
const BELL: usize = 4096;

/// The ledger; clones share one.
#[derive(Clone)]
pub struct Store {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    path: PathBuf,
    /// All writes go through this one connection, one transaction at a time.
    pub(crate) writer: Mutex<Writer>,
    pub(crate) readers: SqlitePool,
    /// Rung while the writer is still held: subscribers see events in ledger order.
    pub(crate) bell: broadcast::Sender<Event>,
    /// Last: these files must not be closed before SQLite's own, see there.
    ahead: Ahead,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store")
            .field("path", &self.inner.path)
            .finish_non_exhaustive()
    }
}

impl Store {
    /// Opens the ledger at `path`, or makes it. The file holds the boxes' tokens and is for
    /// its owner alone. A damaged file, or one of a newer version, is refused and left as it is.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let size = own_file(&path)?;
        let options = SqliteConnectOptions::new()
            .filename(&path)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .foreign_keys(true)
            .busy_timeout(Duration::from_secs(5))
            .pragma("wal_autocheckpoint", WAL_PAGES)
            .disable_statement_logging();

        let mut writer = options
            .connect()
            .await
            .map_err(|error| fault::ledger(&error))?;
        if size > 0 && size <= CHECKED_UP_TO {
            check(&mut writer).await?;
        }
        migrations()
            .run_direct(None, &mut writer, false)
            .await
            .map_err(|error| fault::migration(&error))?;

        let readers = SqlitePoolOptions::new()
            .max_connections(READERS)
            .min_connections(1)
            .acquire_timeout(Duration::from_secs(30))
            .connect_with(options)
            .await
            .map_err(|error| fault::ledger(&error))?;
        let ahead = Ahead::of(&path);
        ahead.keep();
        Ok(Self {
            inner: Arc::new(Inner {
                path,
                writer: Mutex::new(Writer::new(writer)),
                readers,
                bell: broadcast::channel(BELL).0,
                ahead,
            }),
        })
    }

    /// Folds the log into the file and brings both to the disk, beside the writer. To be
    /// called now and then.
    pub async fn checkpoint(&self) -> Result<()> {
        sqlx::query("PRAGMA wal_checkpoint(PASSIVE)")
            .execute(&self.inner.readers)
            .await
            .map_err(|error| fault::ledger(&error))?;
        self.inner.ahead.keep();
        Ok(())
    }

    /// Events from now on, in the order of the ledger.
    pub fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.inner.bell.subscribe()
    }
}

/// Makes the file with mode 0600 before SQLite would make it wider; SQLite gives its
/// companions (`-wal`, `-shm`) the same mode.
fn own_file(path: &Path) -> Result<u64> {
    let about = |error: std::io::Error| {
        Error::from(error).context(format!("opening the ledger {}", path.display()))
    };
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
        .map_err(about)?;
    file.set_permissions(Permissions::from_mode(0o600))
        .map_err(about)?;
    Ok(file.metadata().map_err(about)?.len())
}

async fn check(connection: &mut SqliteConnection) -> Result<()> {
    let found: String = sqlx::query_scalar("PRAGMA quick_check(1)")
        .fetch_one(connection)
        .await
        .map_err(|error| fault::ledger(&error))?;
    if found == "ok" {
        return Ok(());
    }
    Err(fault::damaged(&found))
}

fn migrations() -> Migrator {
    let one = |version, name: &'static str, text: &'static str| {
        Migration::new(
            version,
            name.into(),
            MigrationType::Simple,
            text.into_sql_str(),
            false,
        )
    };
    Migrator::with_migrations(vec![
        one(1, "ledger", include_str!("../migrations/0001_ledger.sql")),
        one(2, "network", include_str!("../migrations/0002_network.sql")),
        one(
            3,
            "identity",
            include_str!("../migrations/0003_identity.sql"),
        ),
        one(10, "time", include_str!("../migrations/0010_time.sql")),
        one(
            11,
            "auto points",
            include_str!("../migrations/0011_auto_points.sql"),
        ),
        one(12, "ports", include_str!("../migrations/0012_ports.sql")),
        one(20, "e2b", include_str!("../migrations/0020_e2b.sql")),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandkeep_model::Code;

    #[tokio::test]
    async fn the_file_and_its_companions_are_for_the_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger.db");
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let _store = Store::open(&path).await.unwrap();
        for entry in std::fs::read_dir(dir.path()).unwrap() {
            let entry = entry.unwrap();
            let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, 0o600, "{:?}", entry.file_name());
        }
    }

    #[tokio::test]
    async fn a_file_that_is_no_ledger_is_refused_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger.db");
        let rubbish = b"this is certainly no database ".repeat(200);
        std::fs::write(&path, &rubbish).unwrap();
        let error = Store::open(&path).await.unwrap_err();
        assert_eq!(error.code, Code::HostNotReady);
        assert!(error.message.contains("damaged"), "{error}");
        assert!(!error.retryable);
        assert_eq!(std::fs::read(&path).unwrap(), rubbish);
    }

    #[tokio::test]
    async fn a_broken_page_is_found_at_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger.db");
        drop(Store::open(&path).await.unwrap());
        // A second connection folds the WAL into the file and truncates it.
        let mut other = SqliteConnectOptions::new()
            .filename(&path)
            .connect()
            .await
            .unwrap();
        sqlx::raw_sql("PRAGMA wal_checkpoint(TRUNCATE)")
            .execute(&mut other)
            .await
            .unwrap();
        sqlx::Connection::close(other).await.unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        let end = bytes.len();
        assert!(end >= 3 * 4096);
        bytes[4096..end].fill(0xa5);
        for companion in ["ledger.db-wal", "ledger.db-shm"] {
            let _ = std::fs::remove_file(dir.path().join(companion));
        }
        std::fs::write(&path, &bytes).unwrap();
        let error = Store::open(&path).await.unwrap_err();
        assert!(error.message.contains("damaged"), "{error}");
    }

    #[tokio::test]
    async fn a_ledger_of_a_newer_version_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger.db");
        let store = Store::open(&path).await.unwrap();
        sqlx::query(
            "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
             VALUES (99, 'future', true, x'00', 0)",
        )
        .execute(store.inner.writer.lock().await.connection().await)
        .await
        .unwrap();
        drop(store);
        let error = Store::open(&path).await.unwrap_err();
        assert!(error.message.contains("newer sandkeep"), "{error}");
        assert!(error.message.contains("99"), "{error}");
    }

    #[tokio::test]
    async fn a_checkpoint_lets_the_log_be_used_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger.db");
        let store = Store::open(&path).await.unwrap();
        let log = |dir: &Path| std::fs::metadata(dir.join("ledger.db-wal")).unwrap().len();
        let id = "i01234567890123456789".parse().unwrap();
        let mut sizes = Vec::new();
        for _ in 0..3 {
            for _ in 0..20 {
                store.note_adopted(std::slice::from_ref(&id)).await.unwrap();
            }
            store.checkpoint().await.unwrap();
            sizes.push(log(dir.path()));
        }
        assert_eq!(sizes[1], sizes[2], "{sizes:?}");
    }

    #[tokio::test]
    async fn a_missing_directory_is_named() {
        let error = Store::open("/nonexistent/dir/ledger.db").await.unwrap_err();
        assert!(
            error.message.contains("/nonexistent/dir/ledger.db"),
            "{error}"
        );
    }
}
