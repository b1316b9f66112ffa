//! Whether CRIU can put processes into their sessions again.
//!
//! A process is born into the session of its parent, and can leave it for one of its own alone. CRIU
//! finds an order in which to start the processes of an image, with helpers for leaders that have
//! ended, but it knows only orphans that init took in, and finds out at the restore that there is
//! no order. So the same is done here, when the image was written: `prepare_pstree_ids` and
//! `create_children_and_session` of CRIU, without the processes.

use std::collections::HashMap;

/// What the image says of a process.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    pub pid: u32,
    pub parent: u32,
    pub session: u32,
}

struct Node {
    pid: u32,
    session: u32,
    parent: Option<usize>,
    children: Vec<usize>,
    /// The session in which it has to be born, where that is not the one it is in.
    born: Option<u32>,
}

/// A process that CRIU cannot put into its session again.
pub fn misplaced(members: &[Member]) -> Option<Member> {
    let mut tree = Tree::of(members)?;
    tree.help_orphans();
    let found = tree.find_births().or_else(|| tree.restore())?;
    members.iter().find(|one| one.pid == found).copied()
}

struct Tree {
    nodes: Vec<Node>,
    root: usize,
}

impl Tree {
    /// None where there is no root: the restore says so itself.
    fn of(members: &[Member]) -> Option<Self> {
        let places: HashMap<u32, usize> = (members.iter().enumerate())
            .map(|(at, one)| (one.pid, at))
            .collect();
        let mut nodes: Vec<Node> = members
            .iter()
            .map(|one| Node {
                pid: one.pid,
                session: one.session,
                parent: places.get(&one.parent).copied(),
                children: Vec::new(),
                born: None,
            })
            .collect();
        let root = nodes.iter().position(|node| node.parent.is_none())?;
        for at in 0..nodes.len() {
            if let Some(parent) = nodes[at].parent {
                nodes[parent].children.push(at);
            }
        }
        Some(Self { nodes, root })
    }

    /// Orphans with init get a helper as their parent, which leads their session or is a child of
    /// who does.
    fn help_orphans(&mut self) {
        let own = self.nodes[self.root].session;
        let mut helpers: HashMap<u32, usize> = HashMap::new();
        let children = std::mem::take(&mut self.nodes[self.root].children);
        let mut kept = Vec::new();
        for child in children {
            let session = self.nodes[child].session;
            if session == own || session == self.nodes[child].pid {
                kept.push(child);
                continue;
            }
            let helper = *helpers.entry(session).or_insert_with(|| {
                let leader = self.nodes.iter().position(|node| node.pid == session);
                let made = self.nodes.len();
                self.nodes.push(Node {
                    // Where there is a leader, it has no number that matters.
                    pid: if leader.is_some() { 0 } else { session },
                    session,
                    parent: Some(leader.unwrap_or(self.root)),
                    children: Vec::new(),
                    born: None,
                });
                match leader {
                    Some(leader) => self.nodes[leader].children.push(made),
                    None => kept.push(made),
                }
                made
            });
            self.nodes[child].parent = Some(helper);
            self.nodes[helper].children.push(child);
        }
        self.nodes[self.root].children.extend(kept);
    }

    /// Who started a child and left the session after that was born in it. The number of a process
    /// for which there is no leader among its ancestors, or none that fits with the others.
    fn find_births(&mut self) -> Option<u32> {
        for at in 0..self.nodes.len() {
            let (pid, session) = (self.nodes[at].pid, self.nodes[at].session);
            let Some(mut parent) = self.nodes[at].parent else {
                continue;
            };
            if session == pid || pid == 0 || self.nodes[parent].session == session {
                continue;
            }
            while self.nodes[parent].pid != session {
                if self.nodes[parent].born.is_some_and(|born| born != session) {
                    return Some(pid);
                }
                self.nodes[parent].born = Some(session);
                match self.nodes[parent].parent {
                    Some(next) => parent = next,
                    None => return Some(pid),
                }
            }
        }
        None
    }

    /// Starts them as CRIU does. The number of one that is born into a session that it should not
    /// be in.
    fn restore(&self) -> Option<u32> {
        let mut waiting = vec![(self.root, self.nodes[self.root].session)];
        while let Some((at, inherited)) = waiting.pop() {
            let node = &self.nodes[at];
            let session = if at == self.root {
                inherited
            } else if node.pid == node.session || node.session == inherited {
                node.session
            } else {
                return Some(node.pid);
            };
            for child in &node.children {
                let to_be = &self.nodes[*child];
                let before = node.born == Some(to_be.born.unwrap_or(to_be.session));
                if before && to_be.born.is_some_and(|born| born != inherited) {
                    return Some(to_be.pid);
                }
                waiting.push((*child, if before { inherited } else { session }));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn misplaced_of(members: &[(u32, u32, u32)]) -> Option<u32> {
        let members: Vec<Member> = members
            .iter()
            .map(|&(pid, parent, session)| Member {
                pid,
                parent,
                session,
            })
            .collect();
        misplaced(&members).map(|found| found.pid)
    }

    #[test]
    fn ordinary_trees_come_back() {
        for tree in [
            &[(1, 0, 1)][..],
            &[(1, 0, 1), (4, 1, 4), (5, 4, 4), (6, 5, 4)],
            // A daemon: the leader has ended, init took it in.
            &[(1, 0, 1), (9, 1, 8), (10, 9, 8), (11, 1, 8)],
            // The leader lives elsewhere.
            &[(1, 0, 1), (4, 1, 4), (5, 4, 5), (9, 1, 5)],
            // A child was born before its parent left the session.
            &[(1, 0, 1), (4, 1, 4), (5, 4, 5), (6, 5, 4)],
            // The session of who is outside.
            &[(1, 0, 0), (4, 1, 0), (5, 4, 5)],
        ] {
            assert_eq!(misplaced_of(tree), None, "{tree:?}");
        }
    }

    #[test]
    fn orphans_of_others_than_init_do_not() {
        // 4 takes in orphans; the leader of 13 has ended.
        assert_eq!(misplaced_of(&[(1, 0, 1), (4, 1, 4), (14, 4, 13)]), Some(14));
        // Or lives beside it.
        let beside = [(1, 0, 1), (4, 1, 4), (12, 4, 12), (14, 4, 12)];
        assert_eq!(misplaced_of(&beside), Some(14));
        // Two children, from before two sessions.
        let two = [
            (1, 0, 1),
            (4, 1, 4),
            (5, 4, 5),
            (6, 5, 6),
            (7, 6, 4),
            (8, 6, 5),
        ];
        assert!(misplaced_of(&two).is_some());
    }
}
