//! What the host tells an agent that is the init of a virtual machine.
//!
//! The agent reads orders, one JSON object a line, from a serial port that only the host has
//! the other end of. The first one is given to a machine that was booted, checked and written
//! down before anybody wanted a box; later ones to boxes that were restored with their memory.

use serde::{Deserialize, Serialize};

use crate::host::{InitRequest, LimitsRequest};

/// The port, as the kernel of the machine names it.
pub const PORT: &str = "/dev/vport0p1";
/// The disk of the box.
pub const DISK: &str = "/dev/vda";
/// Drivers in the initial file system; what a kernel has built in is not there.
pub const DRIVERS: [&str; 9] = [
    "virtio",
    "virtio_ring",
    "virtio_mmio",
    "virtio_console",
    "failover",
    "net_failover",
    "virtio_net",
    "virtio_blk",
    "virtio_balloon",
];
/// What programs in boxes expect of a Linux kernel, and could not load: containers in the box,
/// firewalls, tunnels, file systems in files. Each after those it needs; one that a kernel does
/// not have is no fault.
pub const MORE_DRIVERS: [&str; 39] = [
    "overlay",
    "llc",
    "stp",
    "bridge",
    "br_netfilter",
    "veth",
    "nfnetlink",
    "libcrc32c",
    "nf_tables",
    "x_tables",
    "nft_compat",
    "nf_defrag_ipv4",
    "nf_defrag_ipv6",
    "nf_conntrack",
    "nf_nat",
    "nft_chain_nat",
    "nft_ct",
    "nft_masq",
    "nft_nat",
    "nf_reject_ipv4",
    "nf_reject_ipv6",
    "nft_reject",
    "nft_reject_inet",
    "xt_MASQUERADE",
    "xt_addrtype",
    "xt_conntrack",
    "xt_comment",
    "xt_tcpudp",
    "xt_mark",
    "xt_nat",
    "xt_multiport",
    "ip_tables",
    "iptable_nat",
    "iptable_filter",
    "nf_conntrack_netlink",
    "ipt_REJECT",
    "tun",
    "fuse",
    "loop",
];
/// Where they are.
pub const DRIVERS_DIR: &str = "/drivers";
/// The control group of everything that runs in the box, the agent included.
pub const GROUP: &str = "/sys/fs/cgroup/box";
/// The group in it of everything but the agent.
pub const PROGRAMS: &str = "programs";
/// What the agent says when the machine works and waits for its first order.
pub const READY: &str = "ready";
/// The option that makes the agent the init of a machine.
pub const OPTION: &str = "--machine";
/// Longer lines are none of ours. The environment of a box is in an order, up to 64 KiB of it, of
/// which every byte may be written as six.
pub const MOST_ORDER: usize = 512 << 10;
/// Brackets at which an order may begin that others were cut off before.
const MOST_CUT_OFF: usize = 16;
/// Bytes that reseed the random numbers of the machine.
pub const ENTROPY_BYTES: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// Its own, so that its answer is known.
    pub number: u64,
    /// What connections begin with from now on.
    pub token: String,
    /// Random bytes of the host, in hexadecimal: copies of a machine must not draw the same.
    pub entropy: String,
    /// The host's clock.
    pub timestamp_ms: i64,
    pub hostname: String,
    pub limits: LimitsRequest,
    /// Who the box is: what it would be told first over its network, and has known before then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub introduction: Option<InitRequest>,
}

/// What the agent says when an order has been carried out: one line, like the order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Of the order.
    pub number: u64,
    /// Why it could not be carried out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Processes killed for want of memory so far: a copy remembers those of the one before.
    pub oom_kills: u64,
    /// What the clock of the machine said then, in microseconds since 1970; agents of before say nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub now_us: Option<i64>,
}

impl Answer {
    /// One line for the port.
    pub fn to_line(&self) -> serde_json::Result<String> {
        serde_json::to_string(self).map(|text| text + "\n")
    }

    /// The answer to this order among what was read, if it is whole.
    pub fn to_order(number: u64, bytes: &[u8]) -> Option<Self> {
        let end = bytes.iter().rposition(|byte| *byte == b'\n')?;
        bytes[..end]
            .split(|byte| *byte == b'\n')
            .filter_map(|line| serde_json::from_slice(line).ok())
            .find(|answer: &Self| answer.number == number)
    }
}

impl Order {
    /// One line for the port.
    pub fn to_line(&self) -> serde_json::Result<String> {
        serde_json::to_string(self).map(|text| text + "\n")
    }

    /// Finds the last whole order in what was read: a line that was cut off by a copy of the
    /// machine may be before it.
    pub fn last_in(bytes: &[u8]) -> Option<Self> {
        let end = bytes.iter().rposition(|byte| *byte == b'\n')?;
        bytes[..end]
            .split(|byte| *byte == b'\n')
            .rev()
            .find_map(Self::in_line)
    }

    fn in_line(line: &[u8]) -> Option<Self> {
        // What was cut off has no end; ours begins at one of the brackets.
        let starts = line.iter().enumerate().filter(|(_, byte)| **byte == b'{');
        starts
            .take(MOST_CUT_OFF)
            .find_map(|(start, _)| serde_json::from_slice(&line[start..]).ok())
    }

    /// The random bytes themselves.
    pub fn entropy_bytes(&self) -> Option<Vec<u8>> {
        let digits = self.entropy.as_bytes();
        if digits.len() != 2 * ENTROPY_BYTES {
            return None;
        }
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(token: &str) -> Order {
        Order {
            number: 7,
            token: token.to_owned(),
            entropy: "0a".repeat(ENTROPY_BYTES),
            timestamp_ms: 5,
            hostname: "box".to_owned(),
            limits: LimitsRequest {
                open_files: 1,
                pids: 2,
                memory_bytes: None,
            },
            introduction: None,
        }
    }

    #[test]
    fn the_last_whole_order_counts() {
        let text = order("a").to_line().unwrap() + &order("b").to_line().unwrap();
        assert_eq!(Order::last_in(text.as_bytes()), Some(order("b")));
        assert_eq!(
            Order::last_in(&text.as_bytes()[..text.len() - 1]),
            Some(order("a"))
        );
        let glued = format!("{{\"token\":\"ha{}", order("c").to_line().unwrap());
        assert_eq!(Order::last_in(glued.as_bytes()), Some(order("c")));
        assert_eq!(Order::last_in(b"\n\n"), None);
    }

    #[test]
    fn only_the_answer_to_this_order_counts() {
        let answer = |number| Answer {
            number,
            error: None,
            oom_kills: 3,
            now_us: None,
        };
        let text = [3, 7].map(|number| answer(number).to_line().unwrap());
        let text = format!("noise\n{}{}", text[0], text[1]);
        assert_eq!(Answer::to_order(7, text.as_bytes()), Some(answer(7)));
        let cut = &text.as_bytes()[..text.len() - 1];
        assert_eq!(Answer::to_order(7, cut), None);
        assert_eq!(Answer::to_order(9, text.as_bytes()), None);
    }

    #[test]
    fn entropy_is_whole_or_none() {
        assert_eq!(order("a").entropy_bytes(), Some(vec![10; ENTROPY_BYTES]));
        let mut short = order("a");
        short.entropy.pop();
        assert_eq!(short.entropy_bytes(), None);
    }
}
