//! The moat against real sockets in real network namespaces: one test for each way out that
//! people try. Needs root, `ip` and a kernel with nf_tables.

mod dns;
mod edge;
mod http;
mod limits;
mod plain;
mod tls;
mod world;
