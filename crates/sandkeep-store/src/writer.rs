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
}

impl Writer {
    pub const fn new(connection: SqliteConnection) -> Self {
        Self {
            connection,
            open: false,
        }
    }

    /// Outside of any transaction.
    pub async fn connection(&mut self) -> &mut SqliteConnection {
        self.rollback().await;
        &mut self.connection
    }

    /// Takes the write lock at once: a transaction that starts by reading could find the
    /// file locked halfway through.
    pub async fn begin(&mut self) -> Result<&mut SqliteConnection> {
        self.rollback().await;
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
