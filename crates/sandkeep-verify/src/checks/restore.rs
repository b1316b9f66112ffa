use crate::check::Check;

pub const CHECKS: &[Check] = &[];
