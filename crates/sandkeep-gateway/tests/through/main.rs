//! Clients, a real gateway, a real agent, and programs behind ports.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod agent;
mod harness;
mod port;
