//! Network file systems: others change files there without telling our kernel,
//! so a watch would promise more than it can see.

use super::super::error::rpc_error;
use sandkeep_agent_api::ConnectError;
use std::path::Path;

const NETWORK: &[(u32, &str)] = &[
    (0x6969, "NFS"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB"),
    (0x517b, "SMB"),
    (0x6573_5546, "FUSE"),
];

/// Refuses a directory on a network file system.
pub(super) fn refuse(path: &Path) -> Result<(), ConnectError> {
    let stat = rustix::fs::statfs(path).map_err(|error| rpc_error("watch", path, error))?;
    // The magic numbers are 32 bits, in whatever integer the machine has.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    match kind(stat.f_type as u32) {
        None => Ok(()),
        Some(kind) => Err(ConnectError::invalid_argument(format!(
            "cannot watch '{}': it is on a network file system ({kind}), where changes made \
             elsewhere are not seen; set allowNetworkMounts to watch it all the same",
            path.display()
        ))),
    }
}

fn kind(magic: u32) -> Option<&'static str> {
    NETWORK
        .iter()
        .find(|(known, _)| *known == magic)
        .map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_network_file_systems_are_refused() {
        assert_eq!(kind(0x6573_5546), Some("FUSE"));
        assert_eq!(kind(0xff53_4d42), Some("CIFS"));
        assert_eq!(kind(0xef53), None);
        refuse(Path::new("/proc")).expect("local");
    }
}
