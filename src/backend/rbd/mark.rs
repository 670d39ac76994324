//! Names of images and snapshots, and the metadata that says whose an image is.
//!
//! Pure: texts in, texts out. An image is ours if its mark names our uid, our instance and the
//! image's own id. The id matters because clones and copies inherit the metadata of what they
//! were made from: an inherited mark is no mark.

use super::{ClassQos, RbdConfig};
use crate::model::{Qos, Record, Uid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// librbd refuses names of 96 bytes and more.
const IMAGE_NAME_MAX: usize = 95;
/// What LUKS2 takes of an image, in bytes.
pub const LUKS2_HEADER_BYTES: u64 = 16 << 20;

/// The key of the mark.
pub const KEY_MARK: &str = "volward.mark";
/// The key of the record, for `volward rebuild`.
pub const KEY_RECORD: &str = "volward.record";
/// Before the uid of a snapshot: the key of its record, on the image that it was taken of.
pub const KEY_SNAPSHOT: &str = "volward.snapshot.";
/// The key of the world wide name.
pub const KEY_WWN: &str = "wwn";
/// All keys of limits that we set; librbd applies `conf_` keys to every client that opens it.
pub const KEYS_QOS: [&str; 6] = [
    "conf_rbd_qos_iops_limit",
    "conf_rbd_qos_iops_burst",
    "conf_rbd_qos_iops_burst_seconds",
    "conf_rbd_qos_bps_limit",
    "conf_rbd_qos_bps_burst",
    "conf_rbd_qos_bps_burst_seconds",
];

/// `PREFIX-NAME-UID`, the name being the one that the volume was created with, cut if need be.
pub fn image_name(prefix: &str, born: &str, uid: Uid) -> String {
    let uid = uid.lower();
    let room = IMAGE_NAME_MAX.saturating_sub(prefix.len() + uid.len() + 2);
    let name: String = born.chars().take(room).collect();
    format!("{prefix}-{name}-{uid}")
}

/// The name of a user's snapshot in its image.
pub fn snap_name(name: &str, uid: Uid) -> String {
    format!("{name}-{}", uid.lower())
}

/// The name of the snapshot that a clone of a volume is made from; shown nowhere.
pub fn hidden_snap_name(prefix: &str, child: Uid) -> String {
    format!("{prefix}.clone-{}", child.lower())
}

/// Whether that is the name of such a snapshot.
pub fn is_hidden_snap(prefix: &str, name: &str) -> bool {
    name.strip_prefix(prefix)
        .and_then(|rest| rest.strip_prefix(".clone-"))
        .is_some_and(|uid| uid.parse::<Uid>().is_ok())
}

/// A name of type 5 whose 60 bits come from the random part of the uid, so that it needs no
/// register and survives a lost state file.
pub fn wwn(uid: Uid) -> String {
    format!("5{:015x}", uid.0 & ((1 << 60) - 1))
}

/// What the mark says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The volume.
    pub uid: Uid,
    /// Which volward made it.
    pub instance: String,
    /// The generation of the wish that was last brought about.
    pub generation: u64,
    /// The id of the image that this mark was written for.
    pub image: String,
    /// Its LUKS2 header is done.
    #[serde(default)]
    pub luks: bool,
    /// Its data isn't complete yet.
    #[serde(default)]
    pub filling: bool,
    /// It was deleted and stays for its snapshots.
    #[serde(default)]
    pub carrier: bool,
    /// Its removal has begun.
    #[serde(default)]
    pub reclaiming: bool,
}

impl Mark {
    /// The mark of a new image.
    pub fn new(record: &Record, instance: &str, image: &str) -> Mark {
        Mark {
            uid: record.image,
            instance: instance.to_owned(),
            generation: record.generation,
            image: image.to_owned(),
            luks: false,
            filling: false,
            carrier: false,
            reclaiming: false,
        }
    }

    /// As metadata.
    pub fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Whose an image is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Owner {
    /// Ours, with that mark.
    Ours(Mark),
    /// It has no mark, or an inherited one.
    Unmarked,
    /// Somebody else's, in words.
    Foreign(String),
}

/// Reads a mark. With `uid`, a mark of another volume is foreign.
pub fn owner(text: Option<&str>, image: &str, instance: &str, uid: Option<Uid>) -> Owner {
    let Some(text) = text else {
        return Owner::Unmarked;
    };
    let mark: Mark = match serde_json::from_str(text) {
        Ok(mark) => mark,
        Err(error) => return Owner::Foreign(format!("its mark can't be read: {error}")),
    };
    if mark.image != image {
        return Owner::Unmarked;
    }
    if mark.instance != instance {
        return Owner::Foreign(format!("it belongs to the instance {}", mark.instance));
    }
    match uid {
        Some(uid) if uid != mark.uid => Owner::Foreign(format!("it is the volume {}", mark.uid)),
        _ => Owner::Ours(mark),
    }
}

/// The metadata that the limits of a volume come to.
pub fn qos(wished: Option<Qos>, class: ClassQos) -> BTreeMap<String, String> {
    let wished = wished.unwrap_or_default();
    let limits = [
        wished.iops.or(class.iops),
        wished.bytes_per_second.or(class.bytes_per_second),
    ];
    let mut map = BTreeMap::new();
    for (limit, keys) in limits.into_iter().zip(KEYS_QOS.chunks(3)) {
        let Some(limit) = limit else { continue };
        map.insert(keys[0].to_owned(), limit.to_string());
        if let Some(percent) = class.burst_percent {
            // In 128 bits, so that no limit is too large for it.
            let burst = u128::from(limit) * u128::from(percent) / 100;
            map.insert(keys[1].to_owned(), burst.to_string());
            let seconds = class.burst_seconds.unwrap_or(1).max(1);
            map.insert(keys[2].to_owned(), seconds.to_string());
        }
    }
    map
}

/// The metadata of a volume's wish: record, world wide name and limits. The mark comes on top.
pub fn metadata(record: &Record, config: &RbdConfig) -> BTreeMap<String, String> {
    let class = config.classes.get(&record.place.class);
    let class_qos = class.map(|class| class.qos).unwrap_or_default();
    let mut map = qos(record.volume().and_then(|volume| volume.qos), class_qos);
    map.insert(KEY_WWN.to_owned(), wwn(record.image));
    map.insert(KEY_RECORD.to_owned(), record_text(record));
    map
}

/// The record as metadata.
pub fn record_text(record: &Record) -> String {
    serde_json::to_string(record).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid() -> Uid {
        Uid::new(1_700_000_000_000, 0x1234_5678_9abc_def0_1234)
    }

    #[test]
    fn image_names_stay_within_what_librbd_takes() {
        let name = image_name("volward", &"n".repeat(63), uid());
        assert_eq!(name.len(), 95);
        assert!(name.starts_with("volward-nnn") && name.ends_with(&uid().lower()));
        let long = image_name(&"p".repeat(32), &"n".repeat(63), uid());
        assert_eq!(long.len(), 95);
        let short = image_name("v", "db", uid());
        assert_eq!(short, format!("v-db-{}", uid().lower()));
    }

    #[test]
    fn hidden_snapshots_are_known_by_their_whole_name() {
        let name = hidden_snap_name("volward", uid());
        assert!(is_hidden_snap("volward", &name));
        assert!(!is_hidden_snap("other", &name));
        for name in ["volward.clone-", "volward.clone-x", "base-1", ""] {
            assert!(!is_hidden_snap("volward", name), "{name}");
        }
    }

    #[test]
    fn an_inherited_mark_is_none() {
        let mark = Mark {
            uid: uid(),
            instance: "i1".into(),
            generation: 3,
            image: "abc".into(),
            luks: false,
            filling: false,
            carrier: false,
            reclaiming: false,
        };
        let text = mark.text();
        let of = |image, instance, uid| owner(Some(&text), image, instance, uid);
        assert_eq!(of("abc", "i1", Some(uid())), Owner::Ours(mark.clone()));
        assert_eq!(of("abc", "i1", None), Owner::Ours(mark.clone()));
        assert_eq!(of("child", "i1", Some(uid())), Owner::Unmarked);
        assert!(matches!(of("abc", "i2", Some(uid())), Owner::Foreign(_)));
        assert!(matches!(of("abc", "i1", Some(Uid(7))), Owner::Foreign(_)));
        assert_eq!(owner(None, "abc", "i1", None), Owner::Unmarked);
        assert!(matches!(
            owner(Some("{"), "abc", "i1", None),
            Owner::Foreign(_)
        ));
    }

    #[test]
    fn limits_of_volume_and_class() {
        let class = ClassQos {
            iops: Some(500),
            bytes_per_second: None,
            burst_percent: Some(150),
            burst_seconds: Some(60),
        };
        let wished = Qos {
            iops: Some(1000),
            bytes_per_second: None,
        };
        let map = qos(Some(wished), class);
        let text: Vec<_> = map.iter().map(|(k, v)| format!("{k}={v}")).collect();
        assert_eq!(
            text,
            [
                "conf_rbd_qos_iops_burst=1500",
                "conf_rbd_qos_iops_burst_seconds=60",
                "conf_rbd_qos_iops_limit=1000",
            ]
        );
        assert_eq!(qos(None, class)["conf_rbd_qos_iops_limit"], "500");
        assert!(qos(None, ClassQos::default()).is_empty());
    }

    #[test]
    fn world_wide_names_have_16_digits() {
        let name = wwn(Uid(u128::MAX));
        assert_eq!(name, "5fffffffffffffff");
        assert_eq!(wwn(Uid(0)).len(), 16);
    }
}
