//! The native API.

mod audit;
mod auto_points;
mod builds;
mod carry;
mod command;
mod events;
mod exec;
mod exec_ws;
mod files;
mod host;
mod identity;
mod lifecycle;
mod network;
mod processes;
mod profiles;
mod run;
mod sandboxes;
mod secrets;
mod templates;
mod text;
mod time;
mod types;
mod upload;

/// What [`crate::bounds`] states.
pub(crate) mod bounds {
    pub(crate) use super::audit::MOST as MOST_ENTRIES;
    pub(crate) use super::command::{MAX_TIMEOUT_MS, MAX_TTY_SIZE, MAX_WORD_BYTES};
    pub(crate) use super::files::{MAX_DEPTH, MAX_PATH_BYTES};
}
pub(crate) use builds::take_files;
pub(crate) use sandboxes::limit;

use utoipa_axum::{router::OpenApiRouter, routes};

use crate::state::Shared;

/// Routes that answer at once and have a deadline.
pub(crate) fn quick() -> OpenApiRouter<Shared> {
    OpenApiRouter::new()
        .routes(routes!(host::health))
        .routes(routes!(host::version))
        .routes(routes!(host::host))
        .routes(routes!(host::key))
        .routes(routes!(sandboxes::create, sandboxes::list))
        .routes(routes!(sandboxes::get, lifecycle::kill))
        .routes(routes!(lifecycle::set_timeout))
        .routes(routes!(lifecycle::metrics))
        .routes(routes!(lifecycle::logs))
        .routes(routes!(processes::list))
        .routes(routes!(network::get, network::put))
        .routes(routes!(network::denials))
        .routes(routes!(network::dead_rules))
        .routes(routes!(network::traffic))
        .routes(routes!(network::test))
        .routes(routes!(profiles::list))
        .routes(routes!(profiles::get, profiles::put, profiles::remove))
        .routes(routes!(secrets::set, secrets::list))
        .routes(routes!(secrets::remove))
        .routes(routes!(identity::verify))
        .routes(routes!(identity::rotate))
        .routes(routes!(audit::list))
        .routes(routes!(audit::verify))
        .routes(routes!(files::list))
        .routes(routes!(files::stat))
        .routes(routes!(files::mkdir))
        .routes(routes!(files::rename))
        .routes(routes!(templates::list))
        .routes(routes!(builds::build, builds::builds))
        .routes(routes!(builds::status, builds::cancel))
        .routes(routes!(builds::template_log))
        .routes(routes!(time::timeline))
        .routes(routes!(time::points))
        .routes(routes!(time::point, time::label, time::delete))
        .routes(routes!(auto_points::get, auto_points::put))
}

/// Routes that last as long as a command, a file or a client does, or as the memory of a
/// sandbox takes to be written.
pub(crate) fn streaming() -> OpenApiRouter<Shared> {
    OpenApiRouter::new()
        .routes(routes!(exec::exec, exec_ws::interactive))
        .routes(routes!(files::read, files::write, files::remove))
        .routes(routes!(
            templates::get,
            templates::import,
            templates::remove
        ))
        .routes(routes!(builds::log))
        .routes(routes!(builds::files))
        .routes(routes!(events::events))
        .routes(routes!(time::pause))
        .routes(routes!(time::resume))
        .routes(routes!(time::snapshot))
        .routes(routes!(time::fork))
        .routes(routes!(time::rollback))
        .routes(routes!(time::diff))
        .routes(routes!(carry::export))
        .routes(routes!(carry::import))
}
