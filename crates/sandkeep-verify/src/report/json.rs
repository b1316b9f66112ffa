//! For programs.

use serde_json::{Value, json};

use super::{Row, SelfRow, Uncovered, counts};

pub fn as_json(rows: &[Row], version: &str, kernel: &str, complete: bool) -> Value {
    json!({
        "version": version,
        "kernel": kernel,
        "complete": complete,
        "summary": counts(rows),
        "results": rows,
    })
}

pub fn self_test_as_json(
    rows: &[SelfRow],
    uncovered: &[Uncovered],
    version: &str,
    complete: bool,
) -> Value {
    json!({
        "version": version,
        "complete": complete,
        "weakenings": rows,
        "not_covered": uncovered,
    })
}
