//! The battery.

mod credentials;
mod egress;
mod escape;
mod exhaustion;
mod kernel;
mod neighbours;
mod restore;
mod server;

use crate::{
    check::{Check, Level, Verdict, judged},
    sandbox::Report,
};

/// In the order in which they are run: what ends or fills something comes last.
pub fn all() -> Vec<&'static Check> {
    [
        escape::CHECKS,
        kernel::CHECKS,
        neighbours::CHECKS,
        egress::CHECKS,
        credentials::CHECKS,
        restore::CHECKS,
        exhaustion::CHECKS,
        server::CHECKS,
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// What the probe could do is the verdict.
fn by_what_worked(report: &Report) -> Verdict {
    judged(&report.worked, refusals(report))
}

/// In a kernel of its own a program may do what it likes; `felt` is what was seen outside of it.
fn by_what_was_felt(level: Level, report: &Report, felt: &[String]) -> Verdict {
    if !level.own_kernel() {
        let all: Vec<String> = report.worked.iter().chain(felt).cloned().collect();
        return judged(&all, refusals(report));
    }
    judged(
        felt,
        format!(
            "{} worked in its own kernel, {} refused; nothing was felt outside",
            report.worked.len(),
            report.refused.len()
        ),
    )
}

fn refusals(report: &Report) -> String {
    let shown: Vec<&str> = report.refused.iter().take(3).map(String::as_str).collect();
    match report.refused.len() {
        0 => "nothing worked".to_owned(),
        all if all > 3 => format!("{} refused: {}, …", all, shown.join(", ")),
        all => format!("{all} refused: {}", shown.join(", ")),
    }
}
