//! Parcels that no server packed.

use super::{common::header, id, point_of};
use sandkeep_model::PointId;
use sha2::{Digest as _, Sha256};
use std::{collections::HashMap, path::Path};

/// A parcel made by hand, sealed as it should be.
pub struct Forged {
    pub label: serde_json::Value,
    pub tar: tar::Builder<Vec<u8>>,
}

impl Forged {
    pub fn new(entries: u64, bytes: u64) -> Self {
        let point = point_of(PointId::random(), &id(), false);
        let label = serde_json::json!({
            "format": 1, "made_by": "hand", "point": point,
            "disk": {"entries": entries, "bytes": bytes}, "memory": [],
        });
        Self {
            label,
            tar: tar::Builder::new(Vec::new()),
        }
    }

    /// Also names the tar crate would not write.
    pub fn add(
        &mut self,
        path: &[u8],
        kind: tar::EntryType,
        link: &[u8],
        body: &[u8],
    ) -> &mut Self {
        let mut header = header(kind, body.len() as u64, 0o755, 0);
        header.as_mut_bytes()[..path.len()].copy_from_slice(path);
        header.set_link_name_literal(link).unwrap();
        header.set_cksum();
        self.tar.append(&header, body).unwrap();
        self
    }

    pub fn dir(&mut self, path: &str) -> &mut Self {
        self.add(path.as_bytes(), tar::EntryType::Directory, b"", b"")
    }

    pub fn pax(&mut self, key: &str, value: &[u8]) -> &mut Self {
        self.tar.append_pax_extensions([(key, value)]).unwrap();
        self
    }

    pub fn pack(&mut self) -> Vec<u8> {
        let body = std::mem::replace(&mut self.tar, tar::Builder::new(Vec::new()));
        let body = body.into_inner().unwrap();
        let mut parts = Parts {
            label: self.label.to_string(),
            body: body[..body.len() - 1024].to_vec(),
            seal: serde_json::json!({}),
        };
        parts.sum_up();
        parts.pack()
    }
}

/// What a parcel is made of, as it is.
#[derive(Clone)]
pub struct Parts {
    pub label: String,
    /// Disk and memory, as entries of a tar.
    pub body: Vec<u8>,
    pub seal: serde_json::Value,
}

impl Parts {
    pub fn of(file: &[u8]) -> Self {
        let tar = zstd::decode_all(file).unwrap();
        let mut found = HashMap::new();
        for entry in tar::Archive::new(&tar[..]).entries().unwrap() {
            let entry = entry.unwrap();
            let (header, data) = (entry.raw_header_position(), entry.raw_file_position());
            let name = entry.path().unwrap().into_owned();
            let place = [header, data, data + entry.size()].map(|at| at as usize);
            found.insert(name, place);
        }
        let [_, label, label_end] = found[Path::new("point.json")];
        let [body_end, seal, seal_end] = found[Path::new("seal.json")];
        Self {
            label: String::from_utf8(tar[label..label_end].to_vec()).unwrap(),
            body: tar[label_end.next_multiple_of(512)..body_end].to_vec(),
            seal: serde_json::from_slice(&tar[seal..seal_end]).unwrap(),
        }
    }

    pub fn unsealed(&self) -> tar::Builder<Vec<u8>> {
        let mut tar = tar::Builder::new(Vec::new());
        text(&mut tar, "point.json", &self.label);
        tar.get_mut().extend_from_slice(&self.body);
        tar
    }

    /// Makes the sum that of what is there now.
    pub fn sum_up(&mut self) {
        let sum = Sha256::digest(self.unsealed().get_ref());
        let text: String = sum.iter().map(|b| format!("{b:02x}")).collect();
        self.seal["sha256"] = text.into();
    }

    pub fn tar(&self) -> Vec<u8> {
        let mut tar = self.unsealed();
        text(&mut tar, "seal.json", &self.seal.to_string());
        tar.into_inner().unwrap()
    }

    pub fn pack(&self) -> Vec<u8> {
        packed(&self.tar())
    }
}

/// To the byte as an export writes it.
pub fn text(tar: &mut tar::Builder<Vec<u8>>, name: &str, text: &str) {
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    header.set_size(text.len() as u64);
    header.set_entry_type(tar::EntryType::Regular);
    header.set_path(name).unwrap();
    header.set_cksum();
    tar.append(&header, text.as_bytes()).unwrap();
}

pub fn packed(tar: &[u8]) -> Vec<u8> {
    zstd::encode_all(tar, 1).unwrap()
}
