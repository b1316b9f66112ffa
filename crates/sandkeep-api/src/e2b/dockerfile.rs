//! Dockerfiles of clients that build their images themselves and only send what they built
//! them from. Steps that need nothing but a box are done here; files of the client's disk
//! came with the image, and no image can be sent here.

use sandkeep_model::{Error, Result};

use super::builds::StepBody;
use crate::query::shown;

/// More was not written by hand.
const LONGEST: usize = 64 * 1024;

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Dockerfile {
    pub image: String,
    pub steps: Vec<StepBody>,
}

fn wrong(what: impl Into<String>) -> Error {
    Error::invalid("dockerfile", what)
}

impl Dockerfile {
    pub(super) fn parse(text: &str) -> Result<Self> {
        if text.len() > LONGEST {
            return Err(wrong(format!(
                "the Dockerfile is {} bytes, the limit is {LONGEST}",
                text.len()
            )));
        }
        let mut image = None;
        // What an image begins with; ours begin with a user of their own.
        let mut steps = vec![step("USER", "root"), step("WORKDIR", "/")];
        let (mut user, mut workdir) = (false, false);
        for line in instructions(text) {
            let (word, rest) = line
                .split_once(char::is_whitespace)
                .unwrap_or((line.as_str(), ""));
            let (word, rest) = (word.to_ascii_uppercase(), rest.trim());
            if image.is_none() && !matches!(word.as_str(), "FROM" | "ARG") {
                return Err(wrong("the Dockerfile does not begin with FROM"));
            }
            match word.as_str() {
                "FROM" if image.is_some() => {
                    return Err(
                        wrong("a Dockerfile of several stages can not be built here")
                            .hint("build one template for each stage, with fromTemplate"),
                    );
                }
                "FROM" => image = Some(image_of(rest)?),
                "RUN" => steps.push(step("RUN", &command(rest)?)),
                "ENV" => steps.push(StepBody::new("ENV", pairs(rest)?)),
                "ARG" => {
                    let (name, value) = rest.split_once('=').unwrap_or((rest, ""));
                    let value = words(value)?.pop().unwrap_or_default();
                    steps.push(StepBody::new("ENV", vec![name.trim().to_owned(), value]));
                }
                "WORKDIR" => {
                    steps.push(step("WORKDIR", &one(&word, rest)?));
                    workdir = true;
                }
                "USER" => {
                    let name = one(&word, rest)?;
                    steps.push(step("USER", name.split(':').next().unwrap_or_default()));
                    user = true;
                }
                // What runs in a box is said beside the Dockerfile; the rest is for people and
                // for registries.
                "CMD" | "ENTRYPOINT" | "EXPOSE" | "LABEL" | "MAINTAINER" | "STOPSIGNAL"
                | "HEALTHCHECK" | "VOLUME" => {}
                "COPY" | "ADD" => {
                    return Err(wrong(format!(
                        "{word} needs files that come with an image, and this server has no registry to send images to"
                    ))
                    .hint("build with an E2B SDK of version 2, or `sandkeep template build`: both send files"));
                }
                other => {
                    return Err(wrong(format!("{} can not be done here", shown(other))));
                }
            }
        }
        if !user {
            steps.push(step("USER", "user"));
        }
        if !workdir {
            steps.push(step("WORKDIR", "/home/user"));
        }
        let image = image.ok_or_else(|| wrong("the Dockerfile has no FROM"))?;
        Ok(Self { image, steps })
    }
}

fn step(kind: &str, arg: &str) -> StepBody {
    StepBody::new(kind, vec![arg.to_owned()])
}

/// Lines with what continues them, without comments.
fn instructions(text: &str) -> Vec<String> {
    let mut whole = Vec::new();
    let mut open = String::new();
    for line in text.lines() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        match line.strip_suffix('\\') {
            Some(part) => {
                open.push_str(part);
                open.push(' ');
            }
            None => {
                open.push_str(line);
                whole.push(std::mem::take(&mut open));
            }
        }
    }
    if !open.trim().is_empty() {
        whole.push(open.trim().to_owned());
    }
    whole
}

fn image_of(rest: &str) -> Result<String> {
    let mut words = rest.split_whitespace();
    let image = words.find(|word| !word.starts_with("--"));
    let image = image.ok_or_else(|| wrong("FROM names no image"))?;
    if image.contains('$') {
        return Err(wrong("an image named by a variable can not be looked for"));
    }
    Ok(image.to_owned())
}

/// A command for a shell, also from the form that wants none.
fn command(rest: &str) -> Result<String> {
    if rest.starts_with("--") || rest.starts_with("<<") {
        return Err(wrong(format!("RUN {} can not be done here", shown(rest))));
    }
    let Ok(list) = serde_json::from_str::<Vec<String>>(rest) else {
        return Ok(rest.to_owned());
    };
    let quoted = list
        .iter()
        .map(|word| format!("'{}'", word.replace('\'', r"'\''")));
    Ok(quoted.collect::<Vec<_>>().join(" "))
}

/// `A=1 B="two words"`, or `A all the rest`, as names and values in turn.
fn pairs(rest: &str) -> Result<Vec<String>> {
    let first = rest.split_whitespace().next().unwrap_or_default();
    if !first.contains('=') {
        let (name, value) = rest
            .split_once(char::is_whitespace)
            .ok_or_else(|| wrong("ENV has a name without a value"))?;
        return Ok(vec![name.to_owned(), value.trim().to_owned()]);
    }
    let mut flat = Vec::new();
    for word in words(rest)? {
        let (name, value) = word
            .split_once('=')
            .ok_or_else(|| wrong("ENV has a name without a value"))?;
        flat.extend([name.to_owned(), value.to_owned()]);
    }
    Ok(flat)
}

fn one(word: &str, rest: &str) -> Result<String> {
    let given = words(rest)?.pop();
    given.ok_or_else(|| wrong(format!("{word} lacks its argument")))
}

/// Words as a shell sees them, without expanding anything.
fn words(text: &str) -> Result<Vec<String>> {
    let mut all = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut letters = text.chars();
    while let Some(c) = letters.next() {
        match (c, quote) {
            (c, Some(open)) if c == open => quote = None,
            ('\'' | '"', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            ('\\', None | Some('"')) => word.get_or_insert_default().extend(letters.next()),
            (c, None) if c.is_whitespace() => all.extend(word.take()),
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        return Err(wrong("a quotation mark in the Dockerfile is not closed"));
    }
    all.extend(word);
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dockerfile_becomes_steps() {
        let text = r#"
# syntax=docker/dockerfile:1
FROM --platform=linux/amd64 e2bdev/base:latest AS only
ARG MODE=fast
ENV A=1 B="two words" \
    # in between
    C=it\'s
ENV OLD the whole rest
RUN apt-get update && \
    apt-get install -y jq
run ["echo", "it's"]
WORKDIR "/srv/a b"
USER dev:staff
EXPOSE 80
CMD ["sleep", "1"]
"#;
        let parsed = Dockerfile::parse(text).unwrap();
        assert_eq!(parsed.image, "e2bdev/base:latest");
        let env = |args: &[&str]| {
            StepBody::new("ENV", args.iter().map(|arg| (*arg).to_owned()).collect())
        };
        assert_eq!(
            parsed.steps,
            [
                step("USER", "root"),
                step("WORKDIR", "/"),
                env(&["MODE", "fast"]),
                env(&["A", "1", "B", "two words", "C", "it's"]),
                env(&["OLD", "the whole rest"]),
                step("RUN", "apt-get update &&  apt-get install -y jq"),
                step("RUN", r"'echo' 'it'\''s'"),
                step("WORKDIR", "/srv/a b"),
                step("USER", "dev"),
            ]
        );
        let plain = Dockerfile::parse("FROM base").unwrap().steps;
        assert_eq!(
            plain[2..],
            [step("USER", "user"), step("WORKDIR", "/home/user")]
        );
    }

    #[test]
    fn what_can_not_be_done_is_refused_in_words() {
        for (text, words) in [
            ("", "no FROM"),
            ("RUN true", "begin with FROM"),
            ("FROM", "names no image"),
            ("FROM $X", "variable"),
            ("FROM a\nFROM b", "several stages"),
            ("FROM a\nCOPY . /app", "registry"),
            ("FROM a\nADD x /y", "registry"),
            ("FROM a\nRUN --mount=type=cache,target=/x true", "RUN"),
            ("FROM a\nENV A=\"1", "not closed"),
            ("FROM a\nENV A", "without a value"),
            ("FROM a\nSHELL [\"/bin/zsh\"]", "SHELL"),
            ("FROM a\nUSER", "USER lacks"),
        ] {
            let error = Dockerfile::parse(text).unwrap_err();
            assert!(error.message.contains(words), "{text}: {error}");
            assert_eq!(error.field.as_deref(), Some("dockerfile"));
        }
        assert!(Dockerfile::parse(&"x".repeat(LONGEST + 1)).is_err());
    }
}
