//! The bundle: what `runsc` is told about a box, in the words of the OCI.

use crate::stage;
use sandkeep_host::slots::IDS_PER_BOX;
use sandkeep_model::Limits;
use serde_json::{Value, json};

/// Where the agent's file is in the box until the agent has copied itself into memory.
const AGENT: &str = "/run/sandkeep-agent";

/// What root has in the box; it counts in the kernel of the box alone. The same as on the
/// container level, but NET_RAW, with which the box could speak with the host's address.
/// SYS_ADMIN is the agent's: it takes it from everything it starts.
const CAPABILITIES: [&str; 14] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_ADMIN",
    "CAP_SYS_CHROOT",
    "CAP_SYS_NICE",
];

/// The agent gives less to everything it starts, and may give more later.
const MOST_OPEN_FILES: u64 = 1_048_576;

/// Tasks of the host for a box with this limit. The kernel of the box holds the limit itself;
/// this one is for a box that broke out of it, and must leave room for what runs the box: some
/// threads, and two or three for each process in it.
pub const fn host_pids(pids: u32) -> u32 {
    pids.saturating_mul(4).saturating_add(256)
}

/// Limits as the host's cgroups hold them.
pub fn host_limits(limits: &Limits) -> Limits {
    Limits {
        pids: host_pids(limits.pids),
        ..*limits
    }
}

pub struct Words<'a> {
    pub hostname: &'a str,
    pub first_id: u32,
    pub limits: &'a Limits,
    /// A path by which `runsc` finds the network namespace.
    pub netns: &'a str,
}

pub fn config(words: &Words<'_>) -> Value {
    let ids = json!([{ "containerID": 0, "hostID": words.first_id, "size": IDS_PER_BOX }]);
    let memory = words.limits.memory_bytes();
    json!({
        "ociVersion": "1.0.2",
        "hostname": words.hostname,
        "root": { "path": stage::ROOT, "readonly": false },
        "process": {
            "user": { "uid": 0, "gid": 0 },
            "args": [AGENT, "--network", sandkeep_netlink::HOST_V4.to_string()],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": {
                "bounding": CAPABILITIES,
                "effective": CAPABILITIES,
                "permitted": CAPABILITIES,
            },
            "rlimits": [{ "type": "RLIMIT_NOFILE", "hard": MOST_OPEN_FILES, "soft": 65_536 }],
        },
        "mounts": [
            { "destination": "/proc", "type": "proc", "source": "proc" },
            { "destination": "/sys", "type": "sysfs", "source": "sysfs",
              "options": ["nosuid", "noexec", "nodev", "ro"] },
            // The agent sets the limit of processes here. Root of the box could undo that; the
            // host's own limit stays.
            { "destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup" },
            { "destination": "/dev", "type": "tmpfs", "source": "tmpfs" },
            // In memory, so that files which are open there when they are deleted can be
            // written to disk with the rest of the memory.
            memory_files("/dev/shm", memory / 2),
            memory_files("/run", memory / 8),
            memory_files("/tmp", memory / 2),
            { "destination": AGENT, "type": "bind", "source": stage::AGENT,
              "options": ["bind", "ro", "nosuid", "nodev"] },
        ],
        "linux": {
            "uidMappings": ids,
            "gidMappings": ids,
            "namespaces": [
                { "type": "pid" },
                { "type": "ipc" },
                { "type": "uts" },
                { "type": "mount" },
                { "type": "user" },
                { "type": "network", "path": words.netns },
            ],
        },
    })
}

fn memory_files(destination: &str, bytes: u64) -> Value {
    json!({
        "destination": destination,
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "nodev", "mode=1777", format!("size={bytes}")],
    })
}

/// What `runsc` reads of `/proc/meminfo`.
pub fn meminfo(limits: &Limits) -> String {
    let kib = limits.memory_bytes() / 1024;
    format!("MemTotal: {kib} kB\nMemFree: {kib} kB\nMemAvailable: {kib} kB\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_has_its_own_ids_and_nothing_of_the_hosts() {
        let config = config(&Words {
            hostname: "box",
            first_id: 2_000_000_000,
            limits: &Limits::default(),
            netns: "/proc/1/fd/9",
        });
        assert_eq!(config["linux"]["uidMappings"][0]["hostID"], 2_000_000_000);
        let kinds: Vec<_> = config["linux"]["namespaces"]
            .as_array()
            .unwrap()
            .iter()
            .map(|namespace| namespace["type"].as_str().unwrap())
            .collect();
        assert_eq!(kinds, ["pid", "ipc", "uts", "mount", "user", "network"]);
        let binds = config["mounts"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|mount| mount["type"] == "bind")
            .count();
        assert_eq!(binds, 1, "only the agent comes from the host");
    }

    #[test]
    fn the_host_leaves_room_for_what_runs_the_box() {
        assert!(host_pids(64) > 3 * 64 + 100);
        assert_eq!(host_pids(u32::MAX), u32::MAX);
    }
}
