//! The suite every ward must pass.
