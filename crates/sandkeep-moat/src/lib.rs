//! The moat: a box reaches only what its policy names.
//!
//! [`policy`] is pure: it says what is allowed and why. The rest enforces it from outside the
//! box, in a network namespace the host owns and that has no uplink at all.

pub mod policy;
