//! The one connection that writes.

use sandkeep_model::Result;
use sqlx::SqliteConnection;

use crate::fault;

/// Transactions are driven by hand: SQLite ends one by itself when the disk is full, and
/// sqlx, which counts them, would believe it open for ever.
pub struct Writer {
    connection: SqliteConnection,
    /// A transaction may be open: its future was dropped, or it failed.
    open: bool,
    /// What commits promise now; `None`: nobody knows.
    promise: Option<Promise>,
}

/// What a commit promises when it returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// It survives the end of the server, and comes to the disk with others in a while.
    Soon,
    /// It survives a power cut.
    Durable,
}

impl Promise {
    const fn pragma(self) -> &'static str {
        match self {
            Self::Soon => "PRAGMA synchronous = NORMAL",
            Self::Durable => "PRAGMA synchronous = FULL",
        }
    }
}

impl Writer {
    pub const fn new(connection: SqliteConnection) -> Self {
        Self {
            connection,
            open: false,
            promise: None,
        }
    }

    /// Outside of any transaction.
    pub async fn connection(&mut self) -> &mut SqliteConnection {
        self.rollback().await;
        &mut self.connection
    }

    /// Takes the write lock at once: a transaction that starts by reading could find the
    /// file locked halfway through.
    pub async fn begin(&mut self, promise: Promise) -> Result<&mut SqliteConnection> {
        self.rollback().await;
        if self.promise != Some(promise) {
            self.promise = None;
            // Only outside of transactions can it be changed.
            sqlx::query(promise.pragma())
                .execute(&mut self.connection)
                .await
                .map_err(|error| fault::ledger(&error))?;
            self.promise = Some(promise);
        }
        self.open = true;
        sqlx::query("BEGIN IMMEDIATE")
            .execute(&mut self.connection)
            .await
            .map_err(|error| fault::ledger(&error))?;
        Ok(&mut self.connection)
    }

    pub async fn commit(&mut self) -> Result<()> {
        let done = sqlx::query("COMMIT").execute(&mut self.connection).await;
        match done {
            Ok(_) => {
                self.open = false;
                Ok(())
            }
            Err(error) => {
                self.rollback().await;
                Err(fault::ledger(&error))
            }
        }
    }

    /// Ends what may be open; that nothing was open is no error.
    pub async fn rollback(&mut self) {
        if self.open {
            let _ = sqlx::query("ROLLBACK").execute(&mut self.connection).await;
            self.open = false;
        }
    }
}
