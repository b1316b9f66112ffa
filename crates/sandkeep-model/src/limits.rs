//! What a box may use.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

const MIB: u64 = 1024 * 1024;

/// The limits a box really has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Thousandths of a core.
    pub cpu_millis: u32,
    pub memory_mib: u64,
    /// Processes and threads together.
    pub pids: u32,
    /// What the box may write beyond its template. 0 means unlimited and needs the operator's leave.
    pub disk_mib: u64,
    /// Open files per process.
    pub open_files: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            cpu_millis: 2000,
            memory_mib: 1024,
            pids: 1024,
            disk_mib: 10 * 1024,
            open_files: 65_536,
        }
    }
}

/// What a request asks for; what it leaves out comes from the server's defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsWish {
    pub cpu_millis: Option<u32>,
    pub memory_mib: Option<u64>,
    pub pids: Option<u32>,
    pub disk_mib: Option<u64>,
    pub open_files: Option<u32>,
}

impl LimitsWish {
    /// Fills the gaps from `defaults` and refuses what is below the least a box needs or above `most`.
    pub fn resolve(&self, defaults: &Limits, most: &Limits) -> Result<Limits> {
        let limits = Limits {
            cpu_millis: self.cpu_millis.unwrap_or(defaults.cpu_millis),
            memory_mib: self.memory_mib.unwrap_or(defaults.memory_mib),
            pids: self.pids.unwrap_or(defaults.pids),
            disk_mib: self.disk_mib.unwrap_or(defaults.disk_mib),
            open_files: self.open_files.unwrap_or(defaults.open_files),
        };
        between(
            "limits.cpu_millis",
            limits.cpu_millis.into(),
            10,
            most.cpu_millis.into(),
        )?;
        between("limits.memory_mib", limits.memory_mib, 16, most.memory_mib)?;
        between("limits.pids", limits.pids.into(), 8, most.pids.into())?;
        if limits.disk_mib == 0 && most.disk_mib != 0 {
            return Err(Error::invalid(
                "limits.disk_mib",
                "a box without a disk limit is not allowed here",
            )
            .hint(format!("ask for 1 to {} MiB", most.disk_mib)));
        }
        if limits.disk_mib != 0 && most.disk_mib != 0 {
            between("limits.disk_mib", limits.disk_mib, 1, most.disk_mib)?;
        }
        between(
            "limits.open_files",
            limits.open_files.into(),
            64,
            most.open_files.into(),
        )?;
        Ok(limits)
    }
}

fn between(field: &str, value: u64, least: u64, most: u64) -> Result<()> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(
        field,
        format!("{field} is {value}, it must be from {least} to {most}"),
    )
    .hint("ask for less, or let the operator raise the server's `max_*` setting"))
}

impl Limits {
    pub const fn memory_bytes(&self) -> u64 {
        self.memory_mib.saturating_mul(MIB)
    }

    pub const fn disk_bytes(&self) -> u64 {
        self.disk_mib.saturating_mul(MIB)
    }

    /// Whole cores, for clients that count only those.
    pub const fn cpu_count(&self) -> u32 {
        let cores = self.cpu_millis.div_ceil(1000);
        if cores == 0 { 1 } else { cores }
    }
}

/// `1536` -> `1.5 KiB`: sizes as people read them.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    #[expect(clippy::cast_precision_loss, reason = "shown with one digit")]
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{bytes} B")
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn most() -> Limits {
        Limits {
            cpu_millis: 8000,
            memory_mib: 8192,
            pids: 4096,
            disk_mib: 20_480,
            open_files: 1_048_576,
        }
    }

    #[test]
    fn gaps_come_from_the_defaults() {
        let wish = LimitsWish {
            memory_mib: Some(64),
            ..LimitsWish::default()
        };
        let limits = wish.resolve(&Limits::default(), &most()).unwrap();
        assert_eq!(
            limits,
            Limits {
                memory_mib: 64,
                ..Limits::default()
            }
        );
    }

    #[test]
    fn out_of_bounds_names_the_field_and_the_bound() {
        let wish = LimitsWish {
            memory_mib: Some(1 << 40),
            ..LimitsWish::default()
        };
        let error = wish.resolve(&Limits::default(), &most()).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("limits.memory_mib"));
        assert!(error.message.contains("8192"));
        let wish = LimitsWish {
            disk_mib: Some(0),
            ..LimitsWish::default()
        };
        assert!(wish.resolve(&Limits::default(), &most()).is_err());
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!(human_bytes(12), "12 B");
        assert_eq!(human_bytes(1536), "1.5 KiB");
        assert_eq!(human_bytes(u64::MAX), "16777216.0 TiB");
    }
}
