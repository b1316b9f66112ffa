//! For continuous integration: one suite per level, one case per attack.

use std::fmt::Write as _;

use super::{Outcome, Row};
use crate::check::Level;

pub fn as_junit(rows: &[Row]) -> String {
    let mut out = String::from(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"sandkeep verify\">\n",
    );
    for level in Level::ALL {
        let own: Vec<&Row> = rows.iter().filter(|row| row.level == level).collect();
        if own.is_empty() {
            continue;
        }
        let of = |outcome| own.iter().filter(|row| row.outcome == outcome).count();
        let time: f64 = own.iter().map(|row| row.seconds).sum();
        // Writing to a String can not fail.
        let _ = writeln!(
            out,
            "  <testsuite name=\"{level}\" tests=\"{}\" failures=\"{}\" skipped=\"{}\" errors=\"0\" time=\"{time:.3}\">",
            own.len(),
            of(Outcome::Broken),
            of(Outcome::Untested),
        );
        for row in own {
            let _ = write!(
                out,
                "    <testcase classname=\"{level}\" name=\"{}: {}\" time=\"{:.3}\">",
                escaped(row.id),
                escaped(row.attack),
                row.seconds,
            );
            let _ = match row.outcome {
                Outcome::Held => write!(out, "<system-out>{}</system-out>", escaped(&row.detail)),
                Outcome::Broken => write!(
                    out,
                    "<failure message=\"{}\">{} What to do: {}</failure>",
                    escaped(&row.detail),
                    escaped(row.means),
                    escaped(row.todo),
                ),
                Outcome::Untested => {
                    write!(out, "<skipped message=\"{}\"/>", escaped(&row.detail))
                }
            };
            out.push_str("</testcase>\n");
        }
        out.push_str("  </testsuite>\n");
    }
    out.push_str("</testsuites>\n");
    out
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            // Not allowed in XML, in any spelling.
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::escaped;

    #[test]
    fn what_a_sandbox_says_stays_text() {
        assert_eq!(
            escaped("a<b>&\"\x1b]0;x\x07"),
            "a&lt;b&gt;&amp;&quot; ]0;x "
        );
    }
}
