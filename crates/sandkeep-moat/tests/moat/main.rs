//! The moat against real sockets in real network namespaces: one test for each way out that
//! people try. Needs root, `ip` and a kernel with nf_tables.

// In a test a panic is the report.
#![allow(clippy::unwrap_used)]

mod dns;
mod edge;
mod flood;
mod http;
mod http2;
mod inside;
mod intercept;
mod limits;
mod narrowed;
mod oracle;
mod origin;
mod own;
mod plain;
mod read_alike;
mod reasons;
mod reflection;
mod syn;
mod tls;
mod world;
