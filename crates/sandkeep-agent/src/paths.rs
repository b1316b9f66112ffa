//! Which file a path in a request means.

use std::path::{Component, Path, PathBuf};

use crate::users::User;

/// Turns the path of a request into an absolute, cleaned path: empty is the default working
/// directory, `~` and `~/x` start at the user's home, and so does every relative path.
pub fn resolve(path: &str, user: &User, default_workdir: Option<&Path>) -> Result<PathBuf, String> {
    if path.contains('\0') {
        return Err("path contains a null byte".to_owned());
    }
    let full = if path.is_empty() {
        default_workdir.unwrap_or(&user.home).to_path_buf()
    } else if path == "~" {
        user.home.clone()
    } else if let Some(rest) = path.strip_prefix("~/") {
        user.home.join(rest.trim_start_matches('/'))
    } else if path.starts_with('~') {
        return Err(format!(
            "cannot resolve path '{path}': only ~ and ~/ are expanded"
        ));
    } else {
        user.home.join(path)
    };
    Ok(clean(&full))
}

/// Removes `.` and resolves `..` by text alone, as the SDKs' own server does.
fn clean(path: &Path) -> PathBuf {
    let mut cleaned = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => cleaned.push(name),
            Component::ParentDir => {
                cleaned.pop();
            }
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    cleaned
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user() -> User {
        User {
            name: "user".into(),
            uid: 1000,
            gid: 1000,
            home: "/home/user".into(),
        }
    }

    #[test]
    fn paths_resolve_as_the_sdks_expect() {
        for (path, expected) in [
            ("", "/home/user"),
            ("a/b", "/home/user/a/b"),
            ("./a", "/home/user/a"),
            ("../x", "/home/x"),
            ("~", "/home/user"),
            ("~/", "/home/user"),
            ("~/a", "/home/user/a"),
            ("~//etc", "/home/user/etc"),
            ("/etc/../tmp//x/", "/tmp/x"),
            ("/../..", "/"),
        ] {
            assert_eq!(
                resolve(path, &user(), None).unwrap(),
                Path::new(expected),
                "{path}"
            );
        }
    }

    #[test]
    fn the_default_directory_is_only_for_the_empty_path() {
        let workdir = Path::new("/code");
        assert_eq!(resolve("", &user(), Some(workdir)).unwrap(), workdir);
        assert_eq!(
            resolve("a", &user(), Some(workdir)).unwrap(),
            Path::new("/home/user/a")
        );
    }

    #[test]
    fn other_homes_and_null_bytes_are_refused() {
        assert!(resolve("~other/x", &user(), None).is_err());
        assert!(resolve("a\0b", &user(), None).is_err());
    }
}
