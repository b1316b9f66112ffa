//! What /proc tells about a process, and which boot this is.

use std::{fs, io, path::Path};

/// The start time of a process in clock ticks since boot: with the boot id it tells one
/// process from another that got the same number later.
pub fn start_ticks(pid: i32) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse_start_ticks(&text)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "/proc/PID/stat has no start"))
}

fn parse_start_ticks(stat: &str) -> Option<u64> {
    // The command name may hold blanks and brackets; everything after the last one is numbers.
    let (_, rest) = stat.rsplit_once(')')?;
    // Field 22 of the line, and `rest` begins with field 3.
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Changes with every boot of the host.
pub fn boot_id() -> String {
    fs::read_to_string(Path::new("/proc/sys/kernel/random/boot_id"))
        .map(|text| text.trim().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_command_name_does_not_shift_the_fields() {
        let stat = "17 (a) R 1 (x)) S 1 17 17 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 987654 1 1";
        assert_eq!(parse_start_ticks(stat), Some(987_654));
        assert_eq!(parse_start_ticks("17 (short) S 1"), None);
    }

    #[test]
    fn our_own_start_is_before_now() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(start_ticks(own).unwrap() > 0);
        assert_eq!(boot_id().len(), 36);
    }
}
