//! Calls that are known but not built yet. Each says so; none pretends.

use sandkeep_model::{Code, Error};

use crate::error::E2bError;

pub(super) fn not_yet(what: &str) -> Error {
    Error::new(
        Code::NotImplemented,
        format!("{what} can not be done by this version of Sandkeep"),
    )
}

pub(crate) async fn volumes() -> E2bError {
    not_yet("using volumes").into()
}
