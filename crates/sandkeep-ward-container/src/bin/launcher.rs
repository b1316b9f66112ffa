//! The launcher as a program of its own, for the tests of this crate.

fn main() {
    sandkeep_ward_container::launcher_main()
}
