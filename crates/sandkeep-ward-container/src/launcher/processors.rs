//! The processors of the host, as files that a sandbox gets a copy of.

use std::{
    fs,
    path::{Path, PathBuf},
};

const HOST: &str = "/sys/devices/system/cpu";
/// How many there are: what programs size their pools by.
const LISTS: [&str; 5] = ["kernel_max", "offline", "online", "possible", "present"];
/// How they hang together; the C library and numeric libraries look.
const TOPOLOGY: [&str; 8] = [
    "core_cpus_list",
    "core_id",
    "core_siblings",
    "core_siblings_list",
    "package_cpus_list",
    "physical_package_id",
    "thread_siblings",
    "thread_siblings_list",
];
/// Of the first processor alone, from which run-time systems take the size of their heaps.
const CACHE: [&str; 8] = [
    "coherency_line_size",
    "id",
    "level",
    "number_of_sets",
    "shared_cpu_list",
    "size",
    "type",
    "ways_of_associativity",
];
/// A file of these is a line.
const MOST_BYTES: usize = 4096;

/// What is below `/sys/devices/system/cpu`: paths relative to it.
#[derive(Debug, Default)]
pub struct Processors {
    pub directories: Vec<PathBuf>,
    pub files: Vec<(PathBuf, String)>,
}

impl Processors {
    /// Once for all sandboxes: it is the text that is kept, not the file.
    pub fn of_this_host() -> Self {
        Self::below(Path::new(HOST))
    }

    fn below(host: &Path) -> Self {
        let mut found = Self::default();
        found.copy(host, Path::new(""), &LISTS);
        let mut numbers: Vec<u32> = fs::read_dir(host)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| {
                entry
                    .file_name()
                    .to_str()?
                    .strip_prefix("cpu")?
                    .parse()
                    .ok()
            })
            .collect();
        numbers.sort_unstable();
        for number in numbers {
            let own = PathBuf::from(format!("cpu{number}"));
            found.directories.push(own.clone());
            found.directory(host, &own.join("topology"), &TOPOLOGY);
            if number == 0 {
                found.caches(host, &own.join("cache"));
            }
        }
        found
    }

    fn caches(&mut self, host: &Path, cache: &Path) {
        let indices: Vec<PathBuf> = (0..8)
            .map(|index| cache.join(format!("index{index}")))
            .filter(|index| host.join(index).is_dir())
            .collect();
        if !indices.is_empty() {
            self.directories.push(cache.to_owned());
        }
        for index in indices {
            self.directory(host, &index, &CACHE);
        }
    }

    fn directory(&mut self, host: &Path, directory: &Path, names: &[&str]) {
        if host.join(directory).is_dir() {
            self.directories.push(directory.to_owned());
            self.copy(host, directory, names);
        }
    }

    /// Those that this kernel has.
    fn copy(&mut self, host: &Path, directory: &Path, names: &[&str]) {
        for name in names {
            let path = directory.join(name);
            if let Ok(text) = fs::read_to_string(host.join(&path))
                && text.len() <= MOST_BYTES
            {
                self.files.push((path, text));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_copied_as_text() {
        let host = tempfile::tempdir().unwrap();
        for cpu in ["cpu0", "cpu1"] {
            fs::create_dir_all(host.path().join(cpu).join("topology")).unwrap();
            fs::write(host.path().join(cpu).join("topology/core_id"), "0\n").unwrap();
            fs::create_dir_all(host.path().join(cpu).join("cache/index0")).unwrap();
            fs::write(host.path().join(cpu).join("cache/index0/size"), "32K\n").unwrap();
        }
        fs::create_dir(host.path().join("cpufreq")).unwrap();
        fs::write(host.path().join("online"), "0-1\n").unwrap();
        fs::write(host.path().join("microcode"), "secret").unwrap();
        let found = Processors::below(host.path());
        let paths: Vec<&str> = found
            .files
            .iter()
            .filter_map(|(path, _)| path.to_str())
            .collect();
        assert_eq!(
            paths,
            [
                "online",
                "cpu0/topology/core_id",
                "cpu0/cache/index0/size",
                "cpu1/topology/core_id",
            ]
        );
        assert_eq!(found.files[0].1, "0-1\n");
    }
}
