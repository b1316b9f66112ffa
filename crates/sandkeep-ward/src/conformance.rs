//! The suite every ward must pass, against real boxes with the real agent.
//!
//! A ward's tests make a [`Bench`] and call [`crate::conformance_tests`], which makes one
//! test of each scenario; one that writes memory to disk makes a [`MemoryBench`] and calls
//! [`crate::memory_tests`], too. A scenario panics when the ward does not keep the contract.

mod bench;
mod events;
mod freeze;
mod inside;
pub mod lab;
mod lifecycle;
mod limits;
mod memory;
mod restart;

pub use bench::{Bench, HostLimits, Stage};
pub use events::{
    a_box_that_ends_by_itself_is_reported, a_destroyed_box_is_no_news, events_can_be_taken_once,
};
pub use freeze::{
    a_frozen_box_can_be_destroyed, a_frozen_box_is_adopted, a_frozen_box_stands_still_and_goes_on,
    freezing_what_is_not_there_is_refused,
};
pub use inside::{Output, agent, run, run_as};
pub use lifecycle::{
    a_box_starts_and_answers, a_root_that_is_not_there_leaves_nothing, checks_find_nothing_missing,
    commands_run_in_the_box, destroy_leaves_nothing, destroying_twice_is_no_error,
    many_boxes_side_by_side, one_id_one_box, unknown_boxes_are_not_found,
};
pub use limits::{
    a_fork_bomb_stops_at_the_limit, limits_can_be_changed, limits_reach_the_host,
    memory_runs_out_inside_only, memory_takes_the_box, usage_counts,
};
pub use memory::{
    MemoryBench, Obstacle, a_box_comes_back_from_the_disk_as_it_was,
    a_box_that_is_written_stays_frozen_and_goes_on, a_restored_box_is_adopted_after_a_restart,
    an_image_that_is_none_leaves_nothing, copies_made_at_once_are_right_and_apart,
    limits_hold_after_a_restore, what_can_not_be_written_is_named_and_the_box_goes_on,
};
pub use restart::{
    a_box_is_adopted_after_a_restart, a_dead_box_is_gone, sweep_clears_the_unknown_only,
};

/// Makes a test of every scenario. `$bench` is an expression that gives a fresh [`Bench`].
#[macro_export]
macro_rules! conformance_tests {
    ($bench:expr) => {
        $crate::conformance_tests! { @each $bench;
            checks_find_nothing_missing,
            a_box_starts_and_answers,
            commands_run_in_the_box,
            one_id_one_box,
            unknown_boxes_are_not_found,
            a_root_that_is_not_there_leaves_nothing,
            destroy_leaves_nothing,
            destroying_twice_is_no_error,
            many_boxes_side_by_side,
            limits_reach_the_host,
            limits_can_be_changed,
            usage_counts,
            memory_runs_out_inside_only,
            a_fork_bomb_stops_at_the_limit,
            events_can_be_taken_once,
            a_box_that_ends_by_itself_is_reported,
            a_destroyed_box_is_no_news,
            a_box_is_adopted_after_a_restart,
            a_dead_box_is_gone,
            sweep_clears_the_unknown_only,
            a_frozen_box_stands_still_and_goes_on,
            a_frozen_box_can_be_destroyed,
            a_frozen_box_is_adopted,
            freezing_what_is_not_there_is_refused,
        }
    };
    (@each $bench:expr; $($scenario:ident),+ $(,)?) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                let bench = $bench;
                $crate::conformance::$scenario(&bench).await;
            }
        )+
    };
}

/// Makes a test of every scenario about memory on disk. `$bench` is an expression that gives a
/// fresh [`MemoryBench`].
#[macro_export]
macro_rules! memory_tests {
    ($bench:expr) => {
        $crate::conformance_tests! { @each $bench;
            a_box_comes_back_from_the_disk_as_it_was,
            copies_made_at_once_are_right_and_apart,
            a_box_that_is_written_stays_frozen_and_goes_on,
            what_can_not_be_written_is_named_and_the_box_goes_on,
            an_image_that_is_none_leaves_nothing,
            a_restored_box_is_adopted_after_a_restart,
            limits_hold_after_a_restore,
        }
    };
}
