//! Which cgroup hierarchies this host has: unified, hybrid, or version 1 only.

use sandkeep_model::{Error, Result};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// Controllers a box can not do without.
const NEEDED: [&str; 3] = ["cpu", "memory", "pids"];
/// Controllers of version 1 that are used when they are there.
const USED_V1: [&str; 5] = ["cpu", "cpuacct", "memory", "pids", "freezer"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Every controller is on cgroup2.
    Unified,
    /// Controllers are on version 1, and cgroup2 is mounted beside them.
    Hybrid,
    V1Only,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct V2Mount {
    pub mount: PathBuf,
    /// The cgroup of this process below `mount`, without the leading slash.
    pub own: PathBuf,
    pub controllers: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Mount point of each version 1 hierarchy and the controllers on it that we use.
    pub v1: BTreeMap<PathBuf, Vec<String>>,
    pub v2: Option<V2Mount>,
}

impl Layout {
    pub fn of_this_host() -> Result<Self> {
        let mountinfo = fs::read_to_string("/proc/self/mountinfo")?;
        let cgroup = fs::read_to_string("/proc/self/cgroup")?;
        Ok(Self::parse(&mountinfo, &cgroup, |mount| {
            fs::read_to_string(mount.join("cgroup.controllers")).unwrap_or_default()
        }))
    }

    /// `v2_controllers` reads `cgroup.controllers` at the root of a cgroup2 mount.
    pub fn parse(
        mountinfo: &str,
        self_cgroup: &str,
        v2_controllers: impl Fn(&Path) -> String,
    ) -> Self {
        let mut v1 = BTreeMap::new();
        let mut v2 = None;
        for mount in mountinfo.lines().filter_map(Mount::parse) {
            match mount.kind {
                "cgroup" => {
                    let used: Vec<String> = mount
                        .options
                        .split(',')
                        .filter(|option| USED_V1.contains(option))
                        .map(str::to_owned)
                        .collect();
                    let known = |name: &String| v1.values().flatten().any(|have| have == name);
                    if !used.is_empty() && !used.iter().any(known) {
                        v1.insert(mount.point, used);
                    }
                }
                "cgroup2" if v2.is_none() => {
                    let controllers = v2_controllers(&mount.point);
                    v2 = Some(V2Mount {
                        own: own_v2(self_cgroup),
                        controllers: controllers
                            .split_ascii_whitespace()
                            .map(str::to_owned)
                            .collect(),
                        mount: mount.point,
                    });
                }
                _ => {}
            }
        }
        Self { v1, v2 }
    }

    fn on_v2(&self, controller: &str) -> bool {
        self.v2
            .as_ref()
            .is_some_and(|v2| v2.controllers.iter().any(|name| name == controller))
    }

    fn on_v1(&self, controller: &str) -> bool {
        self.v1.values().flatten().any(|name| name == controller)
    }

    pub fn missing(&self) -> Vec<&'static str> {
        NEEDED
            .into_iter()
            .filter(|name| !self.on_v1(name) && !self.on_v2(name))
            .collect()
    }

    pub fn kind(&self) -> Result<Kind> {
        let missing = self.missing();
        if !missing.is_empty() {
            return Err(Error::host_not_ready(format!(
                "no cgroup hierarchy with the controllers {} is mounted",
                missing.join(", ")
            ))
            .hint(
                "mount cgroup2 on /sys/fs/cgroup, or boot with systemd.unified_cgroup_hierarchy=1",
            ));
        }
        Ok(if NEEDED.iter().all(|name| self.on_v2(name)) {
            Kind::Unified
        } else if self.v2.is_some() {
            Kind::Hybrid
        } else {
            Kind::V1Only
        })
    }
}

/// The path in the `0::/path` line, relative.
fn own_v2(self_cgroup: &str) -> PathBuf {
    self_cgroup
        .lines()
        .find_map(|line| line.strip_prefix("0::/"))
        .map(PathBuf::from)
        .unwrap_or_default()
}

struct Mount<'a> {
    point: PathBuf,
    kind: &'a str,
    options: &'a str,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (left, right) = line.split_once(" - ")?;
        let point = unescape(left.split(' ').nth(4)?);
        let mut right = right.split(' ');
        let kind = right.next()?;
        let options = right.nth(1).unwrap_or_default();
        Some(Self {
            point,
            kind,
            options,
        })
    }
}

/// The kernel writes blanks in paths as `\040`.
fn unescape(text: &str) -> PathBuf {
    PathBuf::from(text.replace("\\040", " ").replace("\\134", "\\"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/devices rw,relatime - cgroup cgroup rw,devices
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
    const UNIFIED: &str = "\
24 23 0:22 / /sys rw,nosuid - sysfs sysfs rw
30 24 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate
";

    #[test]
    fn a_unified_host() {
        let layout = Layout::parse(UNIFIED, "0::/system.slice/sandkeep.service\n", |_| {
            "cpuset cpu io memory hugetlb pids rdma misc\n".to_owned()
        });
        assert_eq!(layout.kind().unwrap(), Kind::Unified);
        let v2 = layout.v2.unwrap();
        assert_eq!(v2.mount, Path::new("/sys/fs/cgroup"));
        assert_eq!(v2.own, Path::new("system.slice/sandkeep.service"));
        assert!(layout.v1.is_empty());
    }

    #[test]
    fn a_hybrid_host_keeps_controllers_that_share_a_hierarchy_together() {
        let layout = Layout::parse(HYBRID, "4:memory:/x\n0::/\n", |_| "hugetlb\n".to_owned());
        assert_eq!(layout.kind().unwrap(), Kind::Hybrid);
        assert_eq!(
            layout.v1[Path::new("/sys/fs/cgroup/cpu,cpuacct")],
            ["cpu", "cpuacct"]
        );
        assert_eq!(layout.v1.len(), 3, "devices and systemd are not ours");
        assert_eq!(layout.v2.unwrap().own, Path::new(""));
    }

    #[test]
    fn version_1_alone() {
        let text = HYBRID.lines().take(6).collect::<Vec<_>>().join("\n");
        let layout = Layout::parse(&text, "4:memory:/x\n", |_| unreachable!());
        assert_eq!(layout.kind().unwrap(), Kind::V1Only);
    }

    #[test]
    fn missing_controllers_are_named() {
        let layout = Layout::parse(UNIFIED, "0::/\n", |_| "cpu io".to_owned());
        assert_eq!(layout.missing(), ["memory", "pids"]);
        let error = layout.kind().unwrap_err();
        assert!(error.message.contains("memory, pids"));
        assert!(error.hint.is_some());
    }

    #[test]
    fn mount_points_with_blanks() {
        let line = "30 24 0:26 / /mnt/a\\040b rw - cgroup2 cgroup2 rw";
        assert_eq!(Mount::parse(line).unwrap().point, Path::new("/mnt/a b"));
    }
}
