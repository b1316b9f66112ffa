//! How the descriptors of the server are shared: the API has its own, and boxes cannot take them.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Connections of all boxes through the moat, at most: each takes memory as well (some 30 KiB).
const MOST_OF_BOXES: u64 = 8192;
/// A connection that is passed on has one to the box and one to the outside.
const EACH_OF_BOXES: u64 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Connections to the API and to ports of boxes.
    pub api_connections: usize,
    /// Connections of boxes to the outside.
    pub box_connections: u32,
}

/// Lifts the limit of open files as far as we may, and shares it out: half is for the API, a
/// quarter for connections of boxes, and the rest for the ledger, the boxes themselves and
/// connections into them.
pub fn share_out(wanted: usize) -> Budget {
    const PLENTY: u64 = 1 << 20;
    let most = getrlimit(Resource::Nofile).maximum;
    // Beyond the hard limit only with CAP_SYS_RESOURCE; up to it always.
    for limit in [most.map(|most| most.max(PLENTY)), most] {
        let lifted = Rlimit {
            current: limit,
            maximum: limit,
        };
        if setrlimit(Resource::Nofile, lifted).is_ok() {
            break;
        }
    }
    let budget = shares(getrlimit(Resource::Nofile).current, wanted);
    if budget.api_connections < wanted {
        tracing::info!(
            room = budget.api_connections,
            wanted,
            "the limit of open files allows fewer connections than max_connections; raise it (LimitNOFILE= in systemd)"
        );
    }
    budget
}

fn shares(open_files: Option<u64>, wanted: usize) -> Budget {
    const LEAST: u64 = 16;
    let files = open_files.unwrap_or(u64::MAX);
    let api = usize::try_from((files / 2).max(LEAST)).unwrap_or(usize::MAX);
    let boxes = (files / 4 / EACH_OF_BOXES).clamp(LEAST, MOST_OF_BOXES);
    Budget {
        api_connections: wanted.min(api),
        box_connections: u32::try_from(boxes).unwrap_or(u32::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(files: Option<u64>) -> (usize, u32) {
        let budget = shares(files, 1_000_000);
        (budget.api_connections, budget.box_connections)
    }

    #[test]
    fn a_usual_limit_has_room_for_ten_thousand() {
        assert_eq!(of(Some(20_000)), (10_000, 2500));
        assert_eq!(of(Some(1024)), (512, 128));
        assert_eq!(of(Some(64)), (32, 16));
        assert_eq!(of(Some(1 << 20)), (1 << 19, 8192));
        assert_eq!(of(None), (1_000_000, 8192));
    }

    #[test]
    fn what_boxes_may_take_leaves_the_api_its_own() {
        for files in [1024_u64, 4096, 20_000, 65_536, 1 << 20] {
            let budget = shares(Some(files), 1_000_000);
            let taken = budget.api_connections as u64 + 2 * u64::from(budget.box_connections);
            assert!(taken <= files - files / 4, "{files}");
        }
    }
}
