//! What SQLite says, in the server's words.

use sandkeep_model::{Code, Error};
use sqlx::migrate::MigrateError;

// Primary result codes of SQLite, part of its stable file and C interface.
const BUSY: i32 = 5;
const READONLY: i32 = 8;
const CORRUPT: i32 = 11;
const FULL: i32 = 13;
const CANTOPEN: i32 = 14;
const NOTADB: i32 = 26;
// Extended codes: the shared-memory file could not grow, which is a full disk too.
const IOERR_SHMSIZE: i32 = 10 | (19 << 8);

fn sqlite_code(error: &sqlx::Error) -> Option<i32> {
    error.as_database_error()?.code()?.parse().ok()
}

/// Turns a database error into one somebody can act on.
pub fn ledger(error: &sqlx::Error) -> Error {
    let code = sqlite_code(error);
    if code == Some(IOERR_SHMSIZE) {
        return full();
    }
    if let sqlx::Error::Io(io) = error
        && io.kind() == std::io::ErrorKind::StorageFull
    {
        return full();
    }
    match code.map(|code| code & 0xff) {
        Some(FULL) => full(),
        Some(CORRUPT | NOTADB) => damaged(&error.to_string()),
        Some(BUSY) => Error::new(
            Code::HostNotReady,
            "the ledger is locked by another program",
        )
        .hint("close the other program that has the ledger file open, then try again"),
        Some(READONLY | CANTOPEN) => {
            Error::host_not_ready(format!("the ledger can not be written: {error}"))
                .hint("the state directory must be writable for the server's user")
        }
        _ => Error::internal(format!("the ledger failed: {error}")),
    }
}

fn full() -> Error {
    Error::new(
        Code::DiskFull,
        "the ledger can not be written: the disk is full",
    )
    .hint("free space on the disk that holds the state directory; nothing was lost")
}

pub fn damaged(found: &str) -> Error {
    Error::host_not_ready(format!("the ledger is damaged and was not opened: {found}"))
        .hint(
            "put back a copy of the ledger, or move the file away to start with an empty one \
             (boxes that run are then ended)",
        )
        .retryable(false)
}

pub fn migration(error: &MigrateError) -> Error {
    match error {
        MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _) => ledger(inner),
        MigrateError::VersionMissing(version) => Error::host_not_ready(format!(
            "the ledger was written by a newer sandkeep (its schema is {version})"
        ))
        .hint("start the sandkeep version that wrote it, or a newer one")
        .retryable(false),
        other => damaged(&format!(
            "its schema is not the one this version made: {other}"
        )),
    }
}

/// Whether a row broke a UNIQUE rule.
pub fn is_duplicate(error: &sqlx::Error) -> bool {
    error
        .as_database_error()
        .is_some_and(sqlx::error::DatabaseError::is_unique_violation)
}
