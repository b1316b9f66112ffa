//! For people: 80 columns, grouped by class.

use std::{collections::BTreeMap, fmt::Write as _};

use super::{Counts, Noticed, Outcome, Row, SelfRow, Uncovered, counts};
use crate::check::{Check, Class, Level};

const WIDTH: usize = 80;
const ATTACK: usize = 46;
const CELL: usize = 11;

/// Colours, on a terminal.
#[derive(Debug, Clone, Copy)]
pub struct Paint(pub bool);

impl Paint {
    fn with(self, code: &str, text: &str) -> String {
        if self.0 {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    fn outcome(self, outcome: Outcome, width: usize) -> String {
        let (code, word) = match outcome {
            Outcome::Held => ("32", "held"),
            Outcome::Broken => ("1;31", "BROKEN"),
            Outcome::Untested => ("33", "no test"),
        };
        self.with(code, &format!("{word:<width$}"))
    }
}

pub fn as_table(rows: &[Row], paint: Paint, complete: bool) -> String {
    let mut out = String::new();
    let levels: Vec<Level> = Level::ALL
        .into_iter()
        .filter(|level| rows.iter().any(|row| row.level == *level))
        .collect();
    for class in Class::ALL {
        // In the order of the battery.
        let mut attacks: Vec<&Row> = Vec::new();
        for row in rows.iter().filter(|row| row.class == class) {
            if !attacks.iter().any(|known| known.id == row.id) {
                attacks.push(row);
            }
        }
        if attacks.is_empty() {
            continue;
        }
        let heads: String = levels
            .iter()
            .map(|level| format!("{level:<CELL$}"))
            .collect();
        // Writing to a String can not fail.
        let _ = writeln!(
            out,
            "\n{}{}",
            paint.with("1", &format!("{:<ATTACK$}", class.title())),
            heads.trim_end()
        );
        for attack in attacks {
            let mut cells = String::new();
            for level in &levels {
                let cell = rows
                    .iter()
                    .find(|row| row.id == attack.id && row.level == *level)
                    .map_or_else(
                        || format!("{:<CELL$}", "-"),
                        |row| paint.outcome(row.outcome, CELL),
                    );
                cells.push_str(&cell);
            }
            let _ = writeln!(
                out,
                "  {:<width$}{}",
                attack.attack,
                cells.trim_end(),
                width = ATTACK - 2
            );
        }
    }
    broken(&mut out, rows, paint);
    untested(&mut out, rows);
    let _ = writeln!(out, "\n{}", summary(counts(rows), paint, complete));
    out
}

fn broken(out: &mut String, rows: &[Row], paint: Paint) {
    let mut by_id: BTreeMap<(Class, &str), Vec<&Row>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.outcome == Outcome::Broken) {
        by_id.entry((row.class, row.id)).or_default().push(row);
    }
    if by_id.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{}", paint.with("1;31", "Broken"));
    for ((_, id), rows) in by_id {
        let Some(first) = rows.first() else { continue };
        let levels: Vec<&str> = rows.iter().map(|row| row.level.name()).collect();
        let _ = writeln!(
            out,
            "\n  {} ({})",
            paint.with("1", first.attack),
            levels.join(", ")
        );
        let _ = writeln!(out, "    check  {id}; {}", first.source);
        let mut seen: Vec<&str> = Vec::new();
        for row in &rows {
            if !seen.contains(&row.detail.as_str()) {
                seen.push(&row.detail);
                wrapped(out, "    seen   ", &row.detail);
            }
        }
        wrapped(out, "    means  ", first.means);
        wrapped(out, "    do     ", first.todo);
    }
}

fn untested(out: &mut String, rows: &[Row]) {
    let mut by_reason: BTreeMap<(Level, &str), Vec<&str>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.outcome == Outcome::Untested) {
        by_reason
            .entry((row.level, &row.detail))
            .or_default()
            .push(row.id);
    }
    if by_reason.is_empty() {
        return;
    }
    let _ = writeln!(out, "\nCannot be tested here");
    for ((level, why), ids) in by_reason {
        wrapped(
            out,
            &format!("  {level}: "),
            &format!("{}: {why}", several(&ids)),
        );
    }
}

fn several(ids: &[&str]) -> String {
    match ids {
        [first, second, third, rest @ ..] if rest.len() > 2 => {
            format!("{first}, {second}, {third} and {} others", rest.len())
        }
        _ => ids.join(", "),
    }
}

fn summary(counts: Counts, paint: Paint, complete: bool) -> String {
    let mut text = format!(
        "{} held, {} broken, {} cannot be tested here.",
        counts.held, counts.broken, counts.untested
    );
    if !complete {
        text.push_str(" Stopped before the end.");
    }
    let code = if counts.broken > 0 {
        "1;31"
    } else if counts.untested > 0 || !complete {
        "33"
    } else {
        "32"
    };
    paint.with(code, &text)
}

/// Words after a heading, in lines of at most 80 columns.
fn wrapped(out: &mut String, heading: &str, text: &str) {
    let indent = heading.chars().count();
    let mut line = heading.to_owned();
    let mut used = indent;
    for word in text.split_whitespace() {
        let size = word.chars().count();
        if used > indent && used + 1 + size > WIDTH {
            let _ = writeln!(out, "{line}");
            line = " ".repeat(indent);
            used = indent;
        }
        if used > indent {
            line.push(' ');
            used += 1;
        }
        line.push_str(word);
        used += size;
    }
    let _ = writeln!(out, "{line}");
}

pub fn self_test_as_table(
    rows: &[SelfRow],
    uncovered: &[Uncovered],
    paint: Paint,
    complete: bool,
) -> String {
    let mut out = String::from("\nEvery weakening must make its checks say \"broken\".\n");
    let mut last = None;
    for row in rows {
        if last != Some(row.weakness) {
            last = Some(row.weakness);
            let _ = writeln!(out, "\n{}", paint.with("1", row.words));
        }
        let word = match row.noticed {
            Noticed::Yes => paint.with("32", "noticed"),
            Noticed::No => paint.with("1;31", "NOT NOTICED"),
            Noticed::Untested => paint.with("33", "no test"),
        };
        let _ = writeln!(out, "  {:<44}{:<11}{word}", row.attack, row.level);
        if row.noticed != Noticed::Yes {
            wrapped(&mut out, "      ", &row.detail);
        }
    }
    if !uncovered.is_empty() {
        let _ = writeln!(out, "\nNo weakening covers");
        let mut reasons: BTreeMap<&str, Vec<&Uncovered>> = BTreeMap::new();
        for one in uncovered {
            reasons.entry(one.why).or_default().push(one);
        }
        for (why, ones) in reasons {
            let _ = writeln!(out, "  {why}:");
            for one in ones {
                let levels: Vec<&str> = one.levels.iter().map(|level| level.name()).collect();
                let _ = writeln!(out, "    {:<42}{}", one.id, levels.join(", "));
            }
        }
    }
    let of = |noticed| rows.iter().filter(|row| row.noticed == noticed).count();
    let (good, bad, none) = (of(Noticed::Yes), of(Noticed::No), of(Noticed::Untested));
    let mut text = format!("{good} weakenings noticed, {bad} not noticed, {none} not tested.");
    if !complete {
        text.push_str(" Stopped before the end.");
    }
    let code = if bad > 0 {
        "1;31"
    } else if none > 0 || !complete {
        "33"
    } else {
        "32"
    };
    let _ = writeln!(out, "\n{}", paint.with(code, &text));
    out
}

/// The battery, without running it.
pub fn listed(checks: &[&Check], paint: Paint) -> String {
    let mut out = String::new();
    for class in Class::ALL {
        let own: Vec<&&Check> = checks.iter().filter(|check| check.class == class).collect();
        if own.is_empty() {
            continue;
        }
        let _ = writeln!(out, "\n{}", paint.with("1", class.title()));
        for check in own {
            let levels: Vec<&str> = check.levels.iter().map(|level| level.name()).collect();
            let _ = writeln!(out, "  {:<28}{}", check.id, check.attack);
            wrapped(
                &mut out,
                &" ".repeat(30),
                &format!("{}; {}", check.source, levels.join(", ")),
            );
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(level: Level, outcome: Outcome) -> Row {
        Row {
            id: "escape-test",
            class: Class::Escape,
            attack: "an attack with a rather long name, of 44 char",
            source: "nowhere",
            level,
            outcome,
            detail: "a detail that is long enough to be wrapped over more than one line of the \
                     terminal"
                .to_owned(),
            means: "it means something that takes more than one line to be told to the reader",
            todo: "do something",
            seconds: 0.1,
        }
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        let rows = [
            row(Level::Container, Outcome::Broken),
            row(Level::Gvisor, Outcome::Held),
            row(Level::Microvm, Outcome::Untested),
        ];
        let text = as_table(&rows, Paint(false), true);
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{line:?}");
        }
        assert!(text.contains("BROKEN") && text.contains("1 held, 1 broken, 1 cannot"));
        assert!(!text.contains('\x1b'));
    }
}
