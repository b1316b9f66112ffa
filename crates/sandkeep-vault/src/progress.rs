//! How far a build is, told from what the package tools print.

/// What is being done, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    Preparing,
    ReadingPackageLists,
    EssentialPackages,
    Packages,
    Finishing,
    Unpacking,
    Saving,
    Done,
}

impl Stage {
    pub const fn words(self) -> &'static str {
        match self {
            Self::Preparing => "preparing",
            Self::ReadingPackageLists => "reading package lists",
            Self::EssentialPackages => "installing essential packages",
            Self::Packages => "installing packages",
            Self::Finishing => "finishing",
            Self::Unpacking => "unpacking",
            Self::Saving => "saving",
            Self::Done => "done",
        }
    }
}

/// One step forward. The fraction is rough, but never goes back within one build.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    pub stage: Stage,
    /// 0.0 to 1.0
    pub fraction: f32,
}

/// Reads the lines of mmdebstrap and apt.
#[derive(Debug)]
pub struct BuildLines {
    stage: Stage,
    /// Packages of this stage, and how often one was fetched, unpacked or set up.
    packages: u32,
    steps: u32,
    fraction: f32,
}

impl BuildLines {
    pub const fn new() -> Self {
        Self {
            stage: Stage::Preparing,
            packages: 0,
            steps: 0,
            fraction: 0.0,
        }
    }

    /// What this line says about the progress, if it moved.
    pub fn line(&mut self, line: &str) -> Option<Progress> {
        if let Some(stage) = stage_of(line) {
            if stage <= self.stage {
                return None;
            }
            self.stage = stage;
            self.packages = 0;
            self.steps = 0;
        } else if let Some(count) = newly_installed(line) {
            self.packages = count;
        } else if ["Get:", "Unpacking ", "Setting up "]
            .iter()
            .any(|start| line.starts_with(start))
        {
            self.steps += 1;
        } else {
            return None;
        }
        Some(self.advance())
    }

    fn advance(&mut self) -> Progress {
        let (from, to) = span(self.stage);
        let part = if self.packages == 0 {
            0.0
        } else {
            (self.steps as f32 / (self.packages as f32 * 3.0)).min(1.0)
        };
        self.fraction = (to - from).mul_add(part, from).max(self.fraction);
        Progress {
            stage: self.stage,
            fraction: self.fraction,
        }
    }
}

/// The share of the whole, as measured.
const fn span(stage: Stage) -> (f32, f32) {
    match stage {
        Stage::Preparing => (0.0, 0.01),
        Stage::ReadingPackageLists => (0.01, 0.05),
        Stage::EssentialPackages => (0.05, 0.35),
        Stage::Packages => (0.35, 0.92),
        Stage::Finishing => (0.92, 0.97),
        Stage::Unpacking => (0.0, 0.97),
        Stage::Saving => (0.97, 1.0),
        Stage::Done => (1.0, 1.0),
    }
}

fn stage_of(line: &str) -> Option<Stage> {
    let told = line.strip_prefix("I: ")?;
    [
        ("running apt-get update", Stage::ReadingPackageLists),
        ("downloading packages", Stage::EssentialPackages),
        ("downloading apt", Stage::EssentialPackages),
        ("installing remaining packages", Stage::Packages),
        ("cleaning package lists", Stage::Finishing),
    ]
    .into_iter()
    .find_map(|(start, stage)| told.starts_with(start).then_some(stage))
}

/// `0 upgraded, 69 newly installed, 0 to remove and 0 not upgraded.`
fn newly_installed(line: &str) -> Option<u32> {
    let (before, _) = line.split_once(" newly installed")?;
    before.rsplit(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_goes_forward_only() {
        let mut lines = BuildLines::new();
        let said = [
            "I: chroot architecture amd64 is equal to the host's architecture",
            "I: running apt-get update...",
            "Get:1 somewhere bookworm InRelease [151 kB]",
            "I: downloading packages with apt...",
            "0 upgraded, 2 newly installed, 0 to remove and 0 not upgraded.",
            "Get:1 somewhere bookworm/main amd64 bash",
            "Unpacking bash (5.2) ...",
            "Setting up bash (5.2) ...",
            "I: installing remaining packages inside the chroot...",
            "0 upgraded, 1 newly installed, 0 to remove and 0 not upgraded.",
            "Setting up git (2) ...",
            "I: running apt-get update...",
            "Setting up git (2) ...",
            "Setting up git (2) ...",
            "Setting up git (2) ...",
            "I: cleaning package lists and apt cache...",
        ];
        let steps: Vec<Progress> = said.iter().filter_map(|line| lines.line(line)).collect();
        assert!(
            steps
                .windows(2)
                .all(|pair| pair[0].fraction <= pair[1].fraction)
        );
        assert!(steps.windows(2).all(|pair| pair[0].stage <= pair[1].stage));
        assert_eq!(steps.first().unwrap().stage, Stage::ReadingPackageLists);
        assert_eq!(steps.last().unwrap().stage, Stage::Finishing);
    }

    #[test]
    fn strange_lines_are_nothing() {
        let mut lines = BuildLines::new();
        for line in [
            "",
            " newly installed",
            "x newly installed",
            "I:",
            "I: hello",
        ] {
            assert_eq!(lines.line(line), None, "{line:?}");
        }
    }
}
