//! A throw-away sandbox of the private server, and probes in it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use reqwest::Method;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    api::Api,
    check::Level,
    fault::{Fault, Result},
    server::random,
};

/// What every probe begins with.
const PRELUDE: &str = include_str!("probes/prelude.py");
/// An emulated machine takes its time; a probe that takes longer hangs.
const PROBE_PATIENCE: Duration = Duration::from_secs(100);
const CREATE_PATIENCE: Duration = Duration::from_secs(150);

/// What a sandbox is wanted like.
#[derive(Debug, Clone, Default)]
pub struct Wish {
    pub limits: Option<Value>,
    pub network: Option<Value>,
    pub env: BTreeMap<String, String>,
}

#[derive(Debug)]
pub struct Sandbox {
    api: Arc<Api>,
    pub id: String,
}

/// What a probe said. Nothing counts that it did not say.
#[derive(Debug, Clone, Deserialize)]
pub struct Report {
    nonce: String,
    /// Whether what the attack is made of works at all: "yes", or why not.
    control: String,
    /// Attempts that worked, with what was seen.
    pub worked: Vec<String>,
    /// Attempts that were refused, with how.
    pub refused: Vec<String>,
    /// Other results, by name.
    #[serde(default)]
    pub found: BTreeMap<String, Value>,
}

impl Report {
    pub fn number(&self, name: &str) -> Result<f64> {
        self.found
            .get(name)
            .and_then(Value::as_f64)
            .ok_or_else(|| Fault::Cannot(format!("the probe told no {name}")))
    }

    pub fn text(&self, name: &str) -> Result<String> {
        self.found
            .get(name)
            .and_then(Value::as_str)
            .map(ToOwned::to_owned)
            .ok_or_else(|| Fault::Cannot(format!("the probe told no {name}")))
    }

    pub fn texts(&self, name: &str) -> Result<Vec<String>> {
        let list = self
            .found
            .get(name)
            .and_then(Value::as_array)
            .ok_or_else(|| Fault::Cannot(format!("the probe told no {name}")))?;
        Ok(list
            .iter()
            .map(|item| {
                item.as_str()
                    .map_or_else(|| item.to_string(), str::to_owned)
            })
            .collect())
    }
}

/// A program of the battery, to be run in a sandbox.
#[derive(Debug, Clone)]
pub struct Probe {
    pub words: Vec<String>,
    pub nonce: String,
}

impl Probe {
    pub fn new(script: &str, arguments: &Value) -> Result<Self> {
        let nonce = random(12)?;
        let words = vec![
            "python3".to_owned(),
            "-I".to_owned(),
            "-c".to_owned(),
            format!("{PRELUDE}\n{script}\ndone()\n"),
            nonce.clone(),
            arguments.to_string(),
        ];
        Ok(Self { words, nonce })
    }

    /// The words that start it in the background, where it goes on by itself and writes to a file.
    pub fn behind(&self, out: &str) -> Vec<String> {
        let mut words: Vec<String> = [
            "sh",
            "-c",
            "out=$1; shift; nohup \"$@\" >\"$out\" 2>&1 </dev/null &",
            "sh",
            out,
        ]
        .map(str::to_owned)
        .to_vec();
        words.extend(self.words.iter().cloned());
        words
    }

    /// Reads what it printed. A probe that crashed, was killed, or said nothing shows nothing.
    pub fn read(&self, code: Option<i64>, out: &str, err: &str) -> Result<Report> {
        let told = out
            .lines()
            .filter_map(|line| serde_json::from_str::<Report>(line).ok())
            .find(|report| report.nonce == self.nonce);
        let Some(report) = told else {
            let last = err.lines().rev().find(|line| !line.trim().is_empty());
            return Err(Fault::Cannot(format!(
                "the probe gave no result (exit {}): {}",
                code.map_or_else(|| "by a signal".to_owned(), |code| code.to_string()),
                last.unwrap_or("it printed nothing").trim()
            )));
        };
        if report.control != "yes" {
            return Err(Fault::Cannot(format!(
                "what the attack is made of does not work here: {}",
                report.control
            )));
        }
        if report.worked.is_empty() && report.refused.is_empty() && report.found.is_empty() {
            return Err(Fault::cannot("the probe tried nothing"));
        }
        Ok(report)
    }
}

/// How a command ended.
#[derive(Debug, Clone)]
pub struct Ran {
    pub code: Option<i64>,
    pub out: String,
    pub err: String,
}

impl Sandbox {
    pub fn create(api: &Arc<Api>, level: Level, wish: &Wish) -> Result<Self> {
        let small = json!({"memory_mib": 256, "cpu_millis": 1000, "disk_mib": 512, "pids": 256});
        let mut body = json!({
            "isolation": level.name(),
            "timeout_seconds": 1800,
            "limits": wish.limits.clone().unwrap_or(small),
            "metadata": {"made-by": "sandkeep verify"},
            "env": wish.env,
        });
        if let Some(network) = &wish.network {
            body["network"] = network.clone();
        }
        let made = api.json(Method::POST, "/v1/sandboxes", Some(&body), CREATE_PATIENCE)?;
        let id = made["id"]
            .as_str()
            .ok_or_else(|| Fault::cannot("the server made a sandbox without an id"))?;
        Ok(Self {
            api: Arc::clone(api),
            id: id.to_owned(),
        })
    }

    /// One that was made in another way, by a fork.
    pub fn known(api: &Arc<Api>, id: String) -> Self {
        Self {
            api: Arc::clone(api),
            id,
        }
    }

    pub fn path(&self, rest: &str) -> String {
        format!("/v1/sandboxes/{}{rest}", self.id)
    }

    pub fn post(&self, rest: &str, body: &Value) -> Result<Value> {
        self.api
            .json(Method::POST, &self.path(rest), Some(body), CREATE_PATIENCE)
    }

    pub fn info(&self) -> Result<Value> {
        self.api
            .json(Method::GET, &self.path(""), None, Duration::from_secs(30))
    }

    pub fn exec(&self, words: &[&str], user: &str) -> Result<Ran> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        self.exec_with(&words, user)
    }

    pub fn exec_with(&self, words: &[String], user: &str) -> Result<Ran> {
        let limit = u64::try_from(PROBE_PATIENCE.as_millis()).unwrap_or(u64::MAX) - 10_000;
        let body = json!({"cmd": words, "user": user, "timeout_ms": limit});
        let ran = self.api.json(
            Method::POST,
            &self.path("/exec"),
            Some(&body),
            PROBE_PATIENCE,
        )?;
        let text = |name: &str| ran[name].as_str().unwrap_or_default().to_owned();
        Ok(Ran {
            code: ran["exit_code"].as_i64(),
            out: text("stdout"),
            err: text("stderr"),
        })
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // The room ends what this does not.
        let _ = self
            .api
            .last_request(Method::DELETE, &self.path(""), Duration::from_secs(30));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe() -> Probe {
        Probe::new("", &json!({})).unwrap()
    }

    fn said(nonce: &str, control: &str, refused: &[&str]) -> String {
        json!({"nonce": nonce, "control": control, "worked": [], "refused": refused}).to_string()
    }

    #[test]
    fn a_probe_that_says_nothing_never_counts_as_held() {
        let probe = probe();
        for out in ["", "held", "{}", &said("another", "yes", &["mount: EPERM"])] {
            let fault = probe
                .read(Some(0), out, "Traceback\nNameError: x")
                .unwrap_err();
            assert!(fault.to_string().contains("NameError"), "{fault}");
        }
        let fault = probe.read(None, "", "").unwrap_err();
        assert!(fault.to_string().contains("signal"), "{fault}");
    }

    #[test]
    fn a_probe_whose_control_fails_or_that_tried_nothing_never_counts_as_held() {
        let probe = probe();
        let out = said(&probe.nonce, "no raw sockets here", &["x: EPERM"]);
        assert!(probe.read(Some(0), &out, "").is_err());
        let out = said(&probe.nonce, "yes", &[]);
        assert!(probe.read(Some(0), &out, "").is_err());
        let out = format!("noise\n{}\n", said(&probe.nonce, "yes", &["x: EPERM"]));
        assert_eq!(probe.read(Some(0), &out, "").unwrap().refused, ["x: EPERM"]);
    }
}
