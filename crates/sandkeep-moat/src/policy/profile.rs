//! Policies with a name.

use std::{fmt, str::FromStr};

use sandkeep_model::{Error, Result};
use serde::Deserialize;

use super::{Policy, Registries};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Profile {
    AirGapped,
    PackageRegistries,
    Open,
}

impl Profile {
    pub const ALL: [Self; 3] = [Self::AirGapped, Self::PackageRegistries, Self::Open];

    pub const fn name(self) -> &'static str {
        match self {
            Self::AirGapped => "air-gapped",
            Self::PackageRegistries => "package-registries",
            Self::Open => "open",
        }
    }

    pub const fn words(self) -> &'static str {
        match self {
            Self::AirGapped => "nothing at all",
            Self::PackageRegistries => "the package registries this host itself is configured for",
            Self::Open => "everything public; private, link-local and metadata ranges stay closed",
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Profile {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        // `deny` is what the operator's setting calls it.
        let text = if text == "deny" { "air-gapped" } else { text };
        Self::ALL
            .into_iter()
            .find(|profile| profile.name() == text)
            .ok_or_else(|| {
                let shown: String = text.chars().take(64).collect();
                Error::invalid(
                    "network.profile",
                    format!("there is no profile \"{}\"", shown.escape_debug()),
                )
                .hint(format!(
                    "there are: {}",
                    Self::ALL.map(Self::name).join(", ")
                ))
            })
    }
}

impl TryFrom<String> for Profile {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl Policy {
    pub fn of(profile: Profile, registries: &Registries) -> Self {
        match profile {
            Profile::AirGapped => Self::air_gapped(),
            Profile::PackageRegistries => registries.policy(),
            Profile::Open => Self::open(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for profile in Profile::ALL {
            assert_eq!(profile.name().parse::<Profile>().unwrap(), profile);
        }
        assert_eq!("deny".parse::<Profile>().unwrap(), Profile::AirGapped);
        let error = "closed".parse::<Profile>().unwrap_err();
        assert!(error.hint.unwrap().contains("package-registries"));
    }
}
