//! Which ward a request gets, and what the operator allows.

use std::sync::{Arc, RwLock};

use futures_util::future::join_all;
use sandkeep_moat::policy::Policy;
use sandkeep_model::{Code, Error, Isolation, IsolationWish, Recipe, Result};
use sandkeep_vault::TemplateInfo;
use sandkeep_ward::{Verdict, Ward};

use crate::{
    LevelReport,
    sync::{read, write},
};

/// What the operator says about isolation levels.
#[derive(Debug, Clone, Copy, Default)]
pub struct IsolationRule {
    /// What a request gets that names no level.
    pub default: IsolationWish,
    /// No sandbox is isolated less.
    pub minimum: Option<Isolation>,
}

/// A level as `auto` sees it.
#[derive(Debug, Clone, Copy)]
pub struct Candidate {
    pub level: Isolation,
    pub usable: bool,
    /// Whatever runs on a plain host runs there, too, and fast enough.
    pub suits_everything: bool,
}

impl IsolationRule {
    /// The level of a sandbox whose create names none. `least` is the strongest of all minima
    /// that hold for it.
    pub fn plain(self, least: Option<Isolation>, candidates: &[Candidate]) -> IsolationWish {
        let allowed = |level| least.is_none_or(|least| level >= least);
        match self.default {
            IsolationWish::Level(level) if allowed(level) => return self.default,
            _ => {}
        }
        let usable = candidates
            .iter()
            .filter(|one| one.usable && allowed(one.level));
        let suitable = usable.clone().filter(|one| one.suits_everything);
        // Of those that do not suit everything the weakest is as strong as was demanded, and nobody
        // gets an emulated machine who did not ask for one.
        let chosen = suitable
            .map(|one| one.level)
            .max()
            .or_else(|| usable.map(|one| one.level).min());
        chosen.map_or(IsolationWish::Auto, IsolationWish::Level)
    }
}

/// The weakest level that a sandbox may have, and what says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Minimum {
    pub level: Isolation,
    /// As the middle of "… demands at least gvisor".
    pub set_by: String,
}

impl Minimum {
    pub fn of_template(template: &TemplateInfo) -> Option<Self> {
        let level = template.built.as_ref()?.isolation_minimum?;
        Some(Self {
            level,
            set_by: format!("isolation_minimum of template \"{}\"", template.name),
        })
    }

    pub fn of_recipe(recipe: &Recipe) -> Option<Self> {
        recipe.isolation_minimum.map(|level| Self {
            level,
            set_by: "isolation_minimum of the recipe".to_owned(),
        })
    }

    pub fn of_policy(policy: &Policy) -> Option<Self> {
        policy.isolation_minimum.map(|level| Self {
            level,
            set_by: "isolation_minimum of the network policy".to_owned(),
        })
    }

    fn allows(&self, level: Isolation) -> bool {
        level >= self.level
    }

    fn refusal(&self, level: Isolation) -> Error {
        let enough: Vec<_> = Isolation::ALL
            .into_iter()
            .filter(|one| self.allows(*one))
            .map(Isolation::name)
            .collect();
        Error::new(
            Code::PermissionDenied,
            format!(
                "isolation level {level} is too weak: {} demands at least {}",
                self.set_by, self.level
            ),
        )
        .field("isolation")
        .hint(format!(
            "leave the level out, or ask for {}",
            enough.join(" or ")
        ))
    }
}

/// The wards of this server and what their last look at the host found.
pub struct Levels {
    rule: IsolationRule,
    /// Strongest first.
    wards: Vec<Arc<dyn Ward>>,
    reports: RwLock<Vec<LevelReport>>,
}

impl Levels {
    pub fn new(mut wards: Vec<Arc<dyn Ward>>, rule: IsolationRule) -> Result<Self> {
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
            rule,
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

    pub fn rule(&self) -> IsolationRule {
        self.rule
    }

    /// The strongest of the server's own and these.
    pub fn minimum(&self, more: impl IntoIterator<Item = Option<Minimum>>) -> Option<Minimum> {
        let own = self.rule.minimum.map(|level| Minimum {
            level,
            set_by: "the setting isolation_minimum of this server".to_owned(),
        });
        // The server's own is named where others demand the same.
        more.into_iter()
            .flatten()
            .fold(own, |strongest, one| match strongest {
                Some(strongest) if strongest.level >= one.level => Some(strongest),
                _ => Some(one),
            })
    }

    /// Refuses a level that is too weak.
    pub fn allow(
        &self,
        level: Isolation,
        more: impl IntoIterator<Item = Option<Minimum>>,
    ) -> Result<()> {
        match self.minimum(more) {
            Some(minimum) if !minimum.allows(level) => Err(minimum.refusal(level)),
            _ => Ok(()),
        }
    }

    /// The ward for a wish, or why there is none. Whatever the wish, the operator's minimum holds,
    /// and so do these minimums.
    pub fn choose(
        &self,
        wish: IsolationWish,
        more: impl IntoIterator<Item = Option<Minimum>>,
    ) -> Result<Arc<dyn Ward>> {
        let minimum = self.minimum(more);
        let wish = match wish {
            IsolationWish::Auto => {
                let least = minimum.as_ref().map(|minimum| minimum.level);
                self.rule.plain(least, &self.candidates())
            }
            named @ IsolationWish::Level(_) => named,
        };
        match wish {
            IsolationWish::Auto => Err(self.none_usable(minimum.as_ref())),
            IsolationWish::Level(level) => {
                if let Some(minimum) = minimum.filter(|minimum| !minimum.allows(level)) {
                    return Err(minimum.refusal(level));
                }
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

    fn candidates(&self) -> Vec<Candidate> {
        let candidate = |ward: &Arc<dyn Ward>| Candidate {
            level: ward.level(),
            usable: self.usable(ward.level()),
            suits_everything: ward.suits_everything(),
        };
        self.wards.iter().map(candidate).collect()
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

    fn none_usable(&self, minimum: Option<&Minimum>) -> Error {
        let found: Vec<_> = self
            .wards
            .iter()
            .filter(|ward| minimum.is_none_or(|minimum| minimum.allows(ward.level())))
            .map(|ward| format!("{}: {}", ward.level(), self.missing(ward.level())))
            .collect();
        let found = if found.is_empty() {
            "no level is built in".to_owned()
        } else {
            found.join("; ")
        };
        let which = minimum.map_or_else(
            || "no isolation level works on this host".to_owned(),
            |minimum| {
                format!(
                    "{} demands at least {}, and no such level works on this host",
                    minimum.set_by, minimum.level
                )
            },
        );
        Error::host_not_ready(format!("{which} ({found})"))
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

#[cfg(test)]
mod tests {
    use super::*;
    use Isolation::{Container, Gvisor, Microvm};

    fn candidates(microvm_suits: bool) -> [Candidate; 3] {
        [(Microvm, microvm_suits), (Gvisor, false), (Container, true)].map(
            |(level, suits_everything)| Candidate {
                level,
                usable: true,
                suits_everything,
            },
        )
    }

    fn rule(default: IsolationWish) -> IsolationRule {
        IsolationRule {
            default,
            minimum: None,
        }
    }

    #[test]
    fn a_plain_create_gets_the_strongest_level_that_suits_everything() {
        let auto = rule(IsolationWish::Auto);
        let plain = |least, suits| auto.plain(least, &candidates(suits));
        assert_eq!(plain(None, true), IsolationWish::Level(Microvm));
        assert_eq!(plain(None, false), IsolationWish::Level(Container));
        // Where only levels are allowed that do not suit everything, the weakest of them.
        assert_eq!(plain(Some(Gvisor), false), IsolationWish::Level(Gvisor));
        let none = [candidates(true)[2]];
        assert_eq!(auto.plain(Some(Gvisor), &none), IsolationWish::Auto);
    }

    #[test]
    fn the_operators_default_yields_to_a_stronger_minimum_only() {
        let gvisor = rule(IsolationWish::Level(Gvisor));
        let plain = |least| gvisor.plain(least, &candidates(true));
        assert_eq!(plain(None), IsolationWish::Level(Gvisor));
        assert_eq!(plain(Some(Container)), IsolationWish::Level(Gvisor));
        assert_eq!(plain(Some(Microvm)), IsolationWish::Level(Microvm));
    }

    #[test]
    fn a_refusal_names_the_setting_and_what_is_enough() {
        let minimum = Minimum {
            level: Gvisor,
            set_by: "the setting isolation_minimum of this server".to_owned(),
        };
        let error = minimum.refusal(Container);
        assert_eq!(error.code, Code::PermissionDenied);
        assert_eq!(
            error.message,
            "isolation level container is too weak: the setting isolation_minimum of this server \
             demands at least gvisor"
        );
        assert_eq!(
            error.hint.as_deref(),
            Some("leave the level out, or ask for gvisor or microvm")
        );
    }
}
