//! `template build`: a recipe and its files for the server, and what the server says meanwhile.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use http::Method;
use sandkeep_model::{Code, Error, Result, TemplateName, human_bytes};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::{
    client::Client,
    cp::{at, chunks},
    list::warmth,
    output::{Output, clean},
    sse::Parser,
};
use crate::template_args::BuildArgs;

/// A recipe is for people to read.
const LARGEST_RECIPE: u64 = 1 << 20;

pub async fn build(client: &Client, output: Output, args: &BuildArgs) -> anyhow::Result<u8> {
    let context = match &args.context {
        Some(dir) => dir.clone(),
        None => args.file.parent().map(Path::to_owned).unwrap_or_default(),
    };
    let mut recipe = read(&args.file)?;
    recipe["no_cache"] = args.no_cache.into();
    // Not by index: that would put a null where there are none.
    let steps = recipe.get_mut("steps").and_then(Value::as_array_mut);
    for step in steps.into_iter().flatten() {
        let Some(from) = step["copy"].as_str().map(str::to_owned) else {
            continue;
        };
        step["files"] = send(client, &args.name, &context, &from).await?.into();
    }
    let name = args.name.as_str();
    let request = client
        .request(Method::POST, &["templates", name, "builds"])?
        .json(&recipe);
    let begun = client.json(request).await?;
    if args.detach {
        return begun_only(output, &begun);
    }
    let id = begun["id"].as_str().unwrap_or_default().to_owned();
    let ended = tokio::select! {
        ended = follow(client, output, name, &id) => ended?,
        _ = tokio::signal::ctrl_c() => {
            // The server goes on.
            let words = format!("the build goes on; end it with: sandkeep template cancel {name}");
            return Err(Error::conflict(words).into());
        }
    };
    tell_end(output, client, name, &ended).await
}

fn begun_only(output: Output, begun: &Value) -> anyhow::Result<u8> {
    if output.json {
        output.json(begun)?;
    } else {
        output.line(begun["id"].as_str().unwrap_or_default())?;
    }
    Ok(0)
}

/// Shows the log until the build is over; gives how it stands then.
async fn follow(client: &Client, output: Output, name: &str, id: &str) -> anyhow::Result<Value> {
    let segments = ["templates", name, "builds", id, "log"];
    let mut response = client.send(client.request(Method::GET, &segments)?).await?;
    let mut parser = Parser::default();
    let broke = |error: reqwest::Error| {
        Error::internal(format!("the log broke off: {}", error.without_url()))
            .hint("the build may go on; look with `sandkeep template inspect`")
    };
    while let Some(chunk) = response.chunk().await.map_err(broke)? {
        for data in parser.feed(&chunk)? {
            let event: Value = serde_json::from_str(&data)
                .map_err(|error| Error::internal(format!("a line is not JSON: {error}")))?;
            if event.get("status").is_some() {
                return Ok(event);
            }
            if !output.json {
                show_line(&event)?;
            }
        }
    }
    Err(Error::internal("the server ended the log before the build was over").into())
}

/// The log is for people; the result goes to standard output.
fn show_line(line: &Value) -> io::Result<()> {
    let message = clean(line["message"].as_str().unwrap_or_default());
    writeln!(io::stderr().lock(), "{message}")
}

async fn tell_end(
    output: Output,
    client: &Client,
    name: &str,
    ended: &Value,
) -> anyhow::Result<u8> {
    if ended["status"] != "ready" {
        let fault = &ended["error"];
        let step = fault["step"].as_str().unwrap_or_default();
        let place = match step.parse::<u32>() {
            Ok(number) => format!("step {number}"),
            Err(_) => step.to_owned(),
        };
        let message = fault["message"].as_str().unwrap_or_default();
        let mut error = Error::new(Code::Conflict, format!("{place}: {message}"));
        error.hint = fault["hint"].as_str().map(str::to_owned);
        return Err(error.into());
    }
    let made = client.get(&["templates", name]).await?;
    if output.json {
        output.json(&made)?;
    } else {
        let size = human_bytes(made["size_bytes"].as_u64().unwrap_or_default());
        let warm = match warmth(&made["built"]).as_str() {
            "-" | "no" => String::new(),
            levels => format!(", warm on {levels}"),
        };
        output.line(&format!("template {name} built ({size}){warm}"))?;
    }
    Ok(0)
}

/// Ends the build of a template that runs.
pub async fn cancel(client: &Client, output: Output, name: &TemplateName) -> anyhow::Result<u8> {
    let segments = ["templates", name.as_str(), "builds"];
    let builds = client.get(&segments).await?;
    let running = builds["builds"]
        .as_array()
        .into_iter()
        .flatten()
        .rfind(|build| matches!(build["status"].as_str(), Some("waiting" | "building")));
    let Some(id) = running.and_then(|build| build["id"].as_str()) else {
        return Err(Error::not_found(format!("template \"{name}\" is not being built")).into());
    };
    let request = client.request(Method::DELETE, &["templates", name.as_str(), "builds", id])?;
    let now = client.json(request).await?;
    if output.json {
        output.json(&now)?;
    } else {
        output.line(id)?;
    }
    Ok(0)
}

/// What the build of a template said; of the newest build if there is one.
pub async fn logs(client: &Client, output: Output, name: &TemplateName) -> anyhow::Result<u8> {
    let builds = client.get(&["templates", name.as_str(), "builds"]).await?;
    let newest = builds["builds"].as_array().and_then(|builds| builds.last());
    if let Some(id) = newest.and_then(|build| build["id"].as_str()) {
        let ended = follow(client, output, name.as_str(), id).await?;
        if output.json {
            output.json(&ended)?;
        }
        return Ok(0);
    }
    let log = client.get(&["templates", name.as_str(), "log"]).await?;
    for line in log["lines"].as_array().into_iter().flatten() {
        if output.json {
            output.json_line(line)?;
        } else {
            show_line(line)?;
        }
    }
    Ok(0)
}

/// A recipe as the API takes it.
fn read(file: &Path) -> Result<Value> {
    let size = fs::metadata(file).map_err(|error| at(file, error))?.len();
    if size > LARGEST_RECIPE {
        return Err(Error::invalid("file", "the recipe is larger than 1 MiB"));
    }
    let text = fs::read_to_string(file).map_err(|error| at(file, error))?;
    parse(&text).map_err(|error| error.context(file.display()))
}

fn parse(text: &str) -> Result<Value> {
    let mut recipe: Value =
        toml::from_str(text).map_err(|error| Error::invalid("file", error.to_string()))?;
    // The short forms people write.
    if let Some(profile) = recipe["network"].as_str() {
        recipe["network"] = json!({ "profile": profile });
    }
    if recipe["isolation"].is_string() {
        recipe["isolation"] = json!([recipe["isolation"]]);
    }
    let Some(table) = recipe.as_object_mut() else {
        return Err(Error::invalid("file", "the recipe is no table"));
    };
    table.retain(|_, value| !value.is_null());
    if let Some(env) = table.remove("env") {
        let steps = table.entry("steps").or_insert_with(|| json!([]));
        if let Some(steps) = steps.as_array_mut() {
            steps.insert(0, json!({ "env": env }));
        }
    }
    Ok(recipe)
}

/// Packs what a copy step names and sends it, under its hash.
async fn send(client: &Client, name: &TemplateName, context: &Path, from: &str) -> Result<String> {
    let files = Files::find(context, from)?;
    let mut sum = Sum(Sha256::new());
    files.pack(&mut sum)?;
    let digest = sum.0.finalize();
    let key: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let (reader, writer) = io::pipe().map_err(|error| Error::from(error).context("a pipe"))?;
    // Packed again while it is sent: the server compares the hash.
    let packing = tokio::task::spawn_blocking(move || files.pack(writer));
    let request = client
        .request(Method::PUT, &["templates", name.as_str(), "files", &key])?
        .body(reqwest::Body::wrap_stream(chunks(Box::new(reader))));
    client.send(request).await?;
    packing
        .await
        .map_err(|_| Error::internal("packing the files was broken off"))??;
    Ok(key)
}

struct Sum(Sha256);

impl Write for Sum {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Files below a directory, in an order that does not change.
struct Files {
    context: PathBuf,
    paths: Vec<PathBuf>,
}

impl Files {
    fn find(context: &Path, from: &str) -> Result<Self> {
        let context = if context.as_os_str().is_empty() {
            PathBuf::from(".")
        } else {
            context.to_owned()
        };
        let inner = Path::new(from)
            .components()
            .filter(|part| !matches!(part, std::path::Component::CurDir));
        let start: PathBuf = inner.collect();
        let mut paths = Vec::new();
        let mut stack = vec![start];
        while let Some(path) = stack.pop() {
            let whole = context.join(&path);
            let meta = fs::symlink_metadata(&whole).map_err(|error| at(&whole, error))?;
            if meta.is_dir() {
                for entry in fs::read_dir(&whole).map_err(|error| at(&whole, error))? {
                    let entry = entry.map_err(|error| at(&whole, error))?;
                    stack.push(path.join(entry.file_name()));
                }
            }
            if !path.as_os_str().is_empty() {
                paths.push(path);
            }
        }
        paths.sort();
        Ok(Self { context, paths })
    }

    fn pack(&self, into: impl Write) -> Result<()> {
        let mut archive = tar::Builder::new(into);
        // Times and owners of this machine would make every archive a new one.
        archive.mode(tar::HeaderMode::Deterministic);
        archive.follow_symlinks(false);
        for path in &self.paths {
            let whole = self.context.join(path);
            archive
                .append_path_with_name(&whole, path)
                .map_err(|error| at(&whole, error))?;
        }
        let mut into = archive
            .into_inner()
            .map_err(|error| Error::from(error).context("packing the files"))?;
        into.flush()
            .map_err(|error| Error::from(error).context("packing the files"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_forms_become_what_the_api_takes() {
        let recipe = parse(
            "from = \"base\"\nnetwork = \"open\"\nisolation = \"gvisor\"\nstart = \"x\"\n\
             ready = { port = 80 }\nenv = { A = \"1\" }\n[[steps]]\nrun = \"make\"\n",
        )
        .unwrap();
        assert_eq!(
            recipe,
            json!({
                "from": "base",
                "network": {"profile": "open"},
                "isolation": ["gvisor"],
                "start": "x",
                "ready": {"port": 80},
                "steps": [{"env": {"A": "1"}}, {"run": "make"}],
            })
        );
        assert!(parse("from = ").is_err());
    }

    #[test]
    fn the_same_files_make_the_same_archive() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("app")).unwrap();
        fs::write(dir.path().join("app/b"), "two").unwrap();
        fs::write(dir.path().join("app/a"), "one").unwrap();
        let pack = || {
            let mut bytes = Vec::new();
            let files = Files::find(dir.path(), "./app").unwrap();
            files.pack(&mut bytes).unwrap();
            bytes
        };
        let first = pack();
        fs::write(dir.path().join("app/a"), "one").unwrap();
        assert_eq!(first, pack());
        let names: Vec<_> = tar::Archive::new(first.as_slice())
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().path().unwrap().into_owned())
            .collect();
        assert_eq!(names.len(), 3);
        assert_eq!(names[1], Path::new("app/a"));
        assert!(Files::find(dir.path(), "none").is_err());
    }
}
