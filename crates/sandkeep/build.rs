//! Builds the agent that runs in every box and puts it into the server.
//!
//! The agent must be static, because it runs in root file systems we know nothing about, so
//! it needs other flags than the server: a second cargo builds it in a target directory of
//! its own (the first one holds the lock of the usual one).

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

/// Crates whose sources end up in the agent.
const AGENT_CRATES: [&str; 3] = ["sandkeep-agent", "sandkeep-agent-api", "sandkeep-netlink"];

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            println!("cargo::error={message}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), String> {
    let out = PathBuf::from(variable("OUT_DIR")?).join("sandkeep-agent");
    let workspace = PathBuf::from(variable("CARGO_MANIFEST_DIR")?)
        .ancestors()
        .nth(2)
        .ok_or("the crate is not inside its workspace")?
        .to_owned();
    watch(&workspace);
    println!("cargo::rerun-if-env-changed=SANDKEEP_AGENT_BIN");
    let agent = match env::var_os("SANDKEEP_AGENT_BIN") {
        Some(path) if !path.is_empty() => {
            let path = workspace.join(path);
            println!("cargo::rerun-if-changed={}", path.display());
            path
        }
        _ => nested_build(&workspace)?,
    };
    fs::copy(&agent, &out)
        .map(drop)
        .map_err(|error| format!("copying the agent from {}: {error}", agent.display()))
}

fn watch(workspace: &Path) {
    for name in AGENT_CRATES {
        let dir = workspace.join("crates").join(name);
        println!("cargo::rerun-if-changed={}", dir.join("src").display());
        println!(
            "cargo::rerun-if-changed={}",
            dir.join("Cargo.toml").display()
        );
    }
    println!(
        "cargo::rerun-if-changed={}",
        workspace.join("Cargo.lock").display()
    );
    println!("cargo::rerun-if-changed=build.rs");
}

fn nested_build(workspace: &Path) -> Result<PathBuf, String> {
    let arch = variable("CARGO_CFG_TARGET_ARCH")?;
    let musl = format!("{arch}-unknown-linux-musl");
    let (target, flags) = if has_target(&musl)? {
        (musl, "")
    } else {
        // Nothing in the agent needs glibc's loadable parts, so static glibc is sound.
        (
            format!("{arch}-unknown-linux-gnu"),
            "-Ctarget-feature=+crt-static",
        )
    };
    // Without optimisation the agent would be ten times as large; without LTO it is there soon.
    let profile = if variable("PROFILE")? == "release" {
        "agent"
    } else {
        "agent-dev"
    };
    let target_dir = target_dir(workspace)?.join("agent-build");
    let mut cargo = Command::new(variable("CARGO")?);
    cargo
        .current_dir(workspace)
        .args([
            "build",
            "--package",
            "sandkeep-agent",
            "--bin",
            "sandkeep-agent",
        ])
        .args(["--profile", profile, "--target", &target, "--target-dir"])
        .arg(&target_dir);
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(steers_the_outer_build) {
            cargo.env_remove(&name);
        }
    }
    cargo.env("RUSTFLAGS", flags);
    let done = cargo
        .output()
        .map_err(|error| format!("starting cargo for the agent: {error}"))?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        for line in said.lines() {
            println!("cargo::warning={line}");
        }
        return Err(format!(
            "the agent did not build ({}); see the lines above, or name a finished one in SANDKEEP_AGENT_BIN",
            done.status
        ));
    }
    Ok(target_dir.join(target).join(profile).join("sandkeep-agent"))
}

/// The outer build's flags, wrappers and descriptions would spoil the inner one; where cargo
/// keeps its files and how it reaches the network is the same for both.
fn steers_the_outer_build(name: &str) -> bool {
    const SAME_FOR_BOTH: [&str; 7] = [
        "CARGO_HOME",
        "CARGO_HTTP_",
        "CARGO_MAKEFLAGS",
        "CARGO_NET_",
        "CARGO_REGISTR",
        "CARGO_SOURCE_",
        "CARGO_TERM_",
    ];
    if let Some(rest) = name.strip_prefix("CARGO_TARGET_") {
        return !rest.ends_with("_LINKER");
    }
    if name.starts_with("CARGO") {
        return !SAME_FOR_BOTH.iter().any(|keep| name.starts_with(keep));
    }
    name.starts_with("RUSTC")
        || name.starts_with("CLIPPY")
        || matches!(
            name,
            "RUSTFLAGS" | "RUSTDOC" | "RUSTDOCFLAGS" | "TARGET" | "HOST" | "PROFILE" | "OUT_DIR"
        )
}

fn has_target(target: &str) -> Result<bool, String> {
    let asked = Command::new(variable("RUSTC")?)
        .args(["--print", "target-libdir", "--target", target])
        .output()
        .map_err(|error| format!("asking rustc for its targets: {error}"))?;
    let dir = PathBuf::from(String::from_utf8_lossy(&asked.stdout).trim());
    let holds_std = fs::read_dir(dir).is_ok_and(|mut files| {
        files.any(|file| {
            file.is_ok_and(|file| file.file_name().to_string_lossy().starts_with("libstd-"))
        })
    });
    Ok(asked.status.success() && holds_std)
}

/// The outer build's target directory: `OUT_DIR` is `<target>/[<triple>/]<profile>/build/<crate>/out`.
fn target_dir(workspace: &Path) -> Result<PathBuf, String> {
    let out = PathBuf::from(variable("OUT_DIR")?);
    let found = out
        .ancestors()
        .find(|dir| dir.join("CACHEDIR.TAG").exists() || dir.join(".rustc_info.json").exists());
    Ok(found.map_or_else(|| workspace.join("target"), Path::to_owned))
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|_| format!("cargo did not set {name}"))
}
