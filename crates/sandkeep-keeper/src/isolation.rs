//! Which ward a request gets.

use std::sync::{Arc, RwLock};

use futures_util::future::join_all;
use sandkeep_model::{Code, Error, Isolation, IsolationWish, Result};
use sandkeep_ward::{Verdict, Ward};

use crate::{
    LevelReport,
    sync::{read, write},
};

/// The wards of this server and what their last look at the host found.
pub struct Levels {
    /// Strongest first.
    wards: Vec<Arc<dyn Ward>>,
    reports: RwLock<Vec<LevelReport>>,
}

impl Levels {
    pub fn new(mut wards: Vec<Arc<dyn Ward>>) -> Result<Self> {
        wards.sort_by_key(|ward| std::cmp::Reverse(ward.level()));
        if let Some(pair) = wards
            .windows(2)
            .find(|pair| pair[0].level() == pair[1].level())
        {
            return Err(Error::internal(format!(
                "two wards were given for level {}",
                pair[0].level()
            )));
        }
        Ok(Self {
            wards,
            reports: RwLock::default(),
        })
    }

    pub fn wards(&self) -> &[Arc<dyn Ward>] {
        &self.wards
    }

    pub fn ward(&self, level: Isolation) -> Option<&Arc<dyn Ward>> {
        self.wards.iter().find(|ward| ward.level() == level)
    }

    /// Looks at the host again.
    pub async fn look(&self) {
        let looks = self.wards.iter().map(|ward| async move {
            let checks = ward.check().await;
            LevelReport {
                level: ward.level(),
                usable: checks.iter().all(|check| check.verdict != Verdict::Missing),
                checks,
            }
        });
        let found = join_all(looks).await;
        *write(&self.reports) = found;
    }

    pub fn reports(&self) -> Vec<LevelReport> {
        read(&self.reports).clone()
    }

    fn usable(&self, level: Isolation) -> bool {
        read(&self.reports)
            .iter()
            .any(|report| report.level == level && report.usable)
    }

    /// The ward for a wish, or why there is none.
    pub fn choose(&self, wish: IsolationWish) -> Result<Arc<dyn Ward>> {
        match wish {
            IsolationWish::Auto => self
                .wards
                .iter()
                .find(|ward| ward.suits_everything() && self.usable(ward.level()))
                .or_else(|| self.wards.iter().find(|ward| self.usable(ward.level())))
                .cloned()
                .ok_or_else(|| self.none_usable()),
            IsolationWish::Level(level) => {
                let ward = self.ward(level).ok_or_else(|| self.no_such_level(level))?;
                if self.usable(level) {
                    return Ok(Arc::clone(ward));
                }
                Err(Error::host_not_ready(format!(
                    "isolation level {level} does not work on this host: {}",
                    self.missing(level)
                ))
                .field("isolation")
                .hint("`sandkeep doctor` tells what to install or change"))
            }
        }
    }

    fn no_such_level(&self, level: Isolation) -> Error {
        let there: Vec<_> = self.wards.iter().map(|ward| ward.level().name()).collect();
        let there = if there.is_empty() {
            "this server has no isolation level at all".to_owned()
        } else {
            format!("use auto, or one this server has: {}", there.join(", "))
        };
        Error::new(
            Code::NotEnforceable,
            format!("this server can not run boxes at isolation level {level}"),
        )
        .field("isolation")
        .hint(there)
    }

    fn none_usable(&self) -> Error {
        let found: Vec<_> = self
            .wards
            .iter()
            .map(|ward| format!("{}: {}", ward.level(), self.missing(ward.level())))
            .collect();
        let found = if found.is_empty() {
            "no level is built in".to_owned()
        } else {
            found.join("; ")
        };
        Error::host_not_ready(format!("no isolation level works on this host ({found})"))
            .hint("`sandkeep doctor` tells what to install or change")
    }

    fn missing(&self, level: Isolation) -> String {
        let missing: Vec<_> = read(&self.reports)
            .iter()
            .filter(|report| report.level == level)
            .flat_map(|report| &report.checks)
            .filter(|check| check.verdict == Verdict::Missing)
            .map(|check| format!("{}: {}", check.name, check.found))
            .collect();
        if missing.is_empty() {
            "the host has not been looked at yet".to_owned()
        } else {
            missing.join(", ")
        }
    }
}
