//! `timeline`: what a box was, drawn as a tree.

use std::collections::{HashMap, HashSet};

use sandkeep_model::{Timestamp, human_bytes};
use serde_json::Value;

use super::{
    client::Client,
    output::{Output, clean},
};

/// Longer commands are cut: a line is for one look.
const SHOWN_COMMAND: usize = 60;

pub async fn timeline(client: &Client, output: Output, sandbox: &str) -> anyhow::Result<u8> {
    let id = client.find(sandbox).await?;
    let answer = client.get(&["sandboxes", &id, "points"]).await?;
    if output.json {
        output.json(&answer)?;
        return Ok(0);
    }
    let list = |name: &str| answer[name].as_array().cloned().unwrap_or_default();
    let lines = tree(&list("points"), &list("boxes"), &id, Timestamp::now());
    if lines.is_empty() {
        output.line("no points yet; make one with `sandkeep snapshot`")?;
    }
    for line in lines {
        output.line(&clean(&line))?;
    }
    Ok(0)
}

fn text<'a>(item: &'a Value, name: &str) -> &'a str {
    item[name].as_str().unwrap_or_default()
}

/// One line per point, older ones above. The line of the box itself goes straight down; what
/// was left behind and what others made of it stands to the right.
fn tree(points: &[Value], boxes: &[Value], own: &str, now: Timestamp) -> Vec<String> {
    let by_id: HashMap<&str, &Value> = points.iter().map(|p| (text(p, "id"), p)).collect();
    let mut children: HashMap<&str, Vec<&Value>> = HashMap::new();
    let mut roots = Vec::new();
    for point in points {
        match point["parent"].as_str() {
            Some(parent) if by_id.contains_key(parent) => {
                children.entry(parent).or_default().push(point);
            }
            _ => roots.push(point),
        }
    }
    let head = boxes
        .iter()
        .find(|place| text(place, "sandbox_id") == own)
        .and_then(|place| place["at"].as_str());
    let trunk = way_to(head, &by_id);
    let mut lines = Vec::new();
    let mut drawn = HashSet::new();
    // What is drawn next is on top: a point, what stands before it, and before what is below.
    let mut stack: Vec<(&Value, String, String)> = Vec::new();
    roots.sort_by_key(|root| trunk.contains(text(root, "id")));
    stack.extend(
        roots
            .iter()
            .rev()
            .map(|root| (*root, String::new(), String::new())),
    );
    while let Some((point, first, below)) = stack.pop() {
        let id = text(point, "id");
        if !drawn.insert(id) {
            continue;
        }
        let mark = if head == Some(id) { '*' } else { 'o' };
        lines.push(format!("{first}{mark} {}", describe(point, own, now)));
        let forks = boxes
            .iter()
            .filter(|place| text(place, "at") == id && text(place, "sandbox_id") != own);
        for fork in forks {
            lines.push(format!(
                "{below}├─@ {}  {}",
                text(fork, "sandbox_id"),
                text(fork, "state")
            ));
        }
        let mut after = children.remove(id).unwrap_or_default();
        // The last goes straight on.
        after.sort_by_key(|child| trunk.contains(text(child, "id")));
        if let Some(straight) = after.pop() {
            stack.push((straight, below.clone(), below.clone()));
        }
        for aside in after.into_iter().rev() {
            stack.push((aside, format!("{below}├─"), format!("{below}│ ")));
        }
    }
    lines
}

/// The points from a beginning to where the box is.
fn way_to<'a>(head: Option<&'a str>, by_id: &HashMap<&str, &'a Value>) -> HashSet<&'a str> {
    let mut way = HashSet::new();
    let mut next = head;
    while let Some(id) = next.filter(|id| way.insert(*id)) {
        next = by_id.get(id).and_then(|point| point["parent"].as_str());
    }
    way
}

fn describe(point: &Value, own: &str, now: Timestamp) -> String {
    let age = text(point, "created_at")
        .parse::<Timestamp>()
        .map_or_else(|_| "?".to_owned(), |at| age(now, at));
    let keeps = if point["memory"] == true {
        "memory"
    } else {
        "files"
    };
    let size = human_bytes(point["added_bytes"].as_u64().unwrap_or_default());
    let mut line = format!("{}  {age}  +{size}  {keeps}", text(point, "id"));
    if text(point, "kind") == "auto" {
        let why = text(&point["reason"], "why").replace('_', " ");
        line.push_str(&format!("  auto: {why}"));
    } else {
        line.push_str("  snapshot");
    }
    if let Some(name) = point["name"].as_str() {
        line.push_str(&format!("  [{name}]"));
    }
    for tag in point["tags"].as_array().into_iter().flatten() {
        line.push_str(&format!("  #{}", tag.as_str().unwrap_or_default()));
    }
    if let Some(command) = point["reason"]["command"].as_str() {
        let mut short: String = command.chars().take(SHOWN_COMMAND).collect();
        if command.chars().nth(SHOWN_COMMAND).is_some() {
            short.push('…');
        }
        line.push_str(&format!("  $ {short}"));
    }
    if text(point, "sandbox_id") != own {
        line.push_str(&format!("  (of {})", text(point, "sandbox_id")));
    }
    line
}

fn age(now: Timestamp, at: Timestamp) -> String {
    let seconds = now.millis().saturating_sub(at.millis()).max(0) / 1000;
    match seconds {
        0..60 => format!("{seconds}s ago"),
        60..3600 => format!("{}m ago", seconds / 60),
        3600..86_400 => format!("{}h ago", seconds / 3600),
        _ => format!("{}d ago", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn point(id: &str, parent: Option<&str>) -> Value {
        json!({
            "id": id, "parent": parent, "sandbox_id": "own", "kind": "snapshot", "memory": false,
            "added_bytes": 0, "created_at": "1970-01-01T00:00:10Z", "tags": [],
        })
    }

    #[test]
    fn a_timeline_is_a_tree_with_a_mark_where_the_box_is() {
        let mut risky = point("p5", Some("p3"));
        risky["kind"] = "auto".into();
        risky["reason"] = json!({"why": "before_matching", "command": "rm -rf /"});
        risky["name"] = "safe".into();
        let points = [
            point("p1", None),
            point("p2", Some("p1")),
            point("p3", Some("p1")),
            point("p4", Some("p2")),
            risky,
        ];
        let boxes = [
            json!({"sandbox_id": "own", "state": "running", "at": "p5"}),
            json!({"sandbox_id": "fork", "state": "paused", "at": "p4"}),
        ];
        let now = Timestamp::from_millis(7_210_000);
        assert_eq!(
            tree(&points, &boxes, "own", now),
            [
                "o p1  2h ago  +0 B  files  snapshot",
                "├─o p2  2h ago  +0 B  files  snapshot",
                "│ o p4  2h ago  +0 B  files  snapshot",
                "│ ├─@ fork  paused",
                "o p3  2h ago  +0 B  files  snapshot",
                "* p5  2h ago  +0 B  files  auto: before matching  [safe]  $ rm -rf /",
            ]
        );
    }

    #[test]
    fn gaps_are_beginnings_and_rings_end() {
        let now = Timestamp::from_millis(0);
        let gap = [point("p2", Some("gone")), point("p1", None)];
        assert_eq!(tree(&gap, &[], "own", now).len(), 2);
        let ring = [point("a", Some("b")), point("b", Some("a"))];
        assert!(tree(&ring, &[], "own", now).len() <= 2);
        let deep: Vec<Value> = (0..5000)
            .map(|n: u32| {
                point(
                    &n.to_string(),
                    n.checked_sub(1).map(|p| p.to_string()).as_deref(),
                )
            })
            .collect();
        assert_eq!(tree(&deep, &[], "own", now).len(), 5000);
    }
}
