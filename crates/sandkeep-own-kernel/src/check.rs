//! Whether a cable can be laid and guarded on this host.

use sandkeep_model::Result;
use sandkeep_ward::Check;
use std::sync::atomic::{AtomicBool, Ordering};

const NAME: &str = "cable";

/// `lay` makes one as a sandbox would get it. Tried until it worked once: a kernel does not
/// forget how, and a host is looked at every minute.
pub async fn cable<T>(lay: impl Future<Output = Result<T>>) -> Check {
    static LAID: AtomicBool = AtomicBool::new(false);
    if !LAID.load(Ordering::Acquire) {
        if let Err(error) = lay.await {
            return Check::missing(
                NAME,
                error.message,
                "sandboxes of this level need network namespaces and nf_tables for devices \
                 (CONFIG_NF_TABLES_NETDEV); try `modprobe nf_tables`",
            );
        }
        LAID.store(true, Ordering::Release);
    }
    Check::ok(NAME, "can be laid and guarded")
}
